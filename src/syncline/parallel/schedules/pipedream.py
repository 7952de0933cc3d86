"""The pipeline is never emptied, and a stage updates its weights after each backward (Narayanan et al., 2019).

Three ranks, the first six micro-batches (one column is the time of F or of B; an update U follows each B)::

    rank 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
    rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .
    rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .

The F of micro-batch j on stage s = 0 … n − 1 sees max(0, j − (n − 1 − s)) updates. Its B uses the same weights (weight
stashing), so the stage keeps at most n − s versions of them::

    w(t+1) = w(t) − ν ∇f(w₁(t−n+1), w₂(t−n+2), …, wₙ(t))          stages 1 … n
    w(t+1) = w(t) − ν ∇f(w₁(t−n+1), w₂(t−n+1), …, wₙ(t−n+1))      with vertical_sync

With vertical_sync each stage keeps up to n versions. If all stages take equal time and transfers none, no rank is idle
between its first backward and its last forward. A longer training has the same order, up to the last forward of the
shorter one.

D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from syncline.errors import SpecError
from syncline.parallel.schedules.base import Action, PipelineSchedule, PipelineSetting
from syncline.parallel.schedules.one_f_one_b import alternate, warmup_forwards

__all__ = ["PipeDream"]


@dataclass(frozen=True, repr=False)
class PipeDream(PipelineSchedule):
    """One forward, one backward, one update in turn.

    >>> print(*PipeDream().actions(1, PipelineSetting(ranks=3, micro_batches=3)))
    1F0 1F1 1B0 1U0 1F2 1B1 1U1 1B2 1U2
    """

    name = "pipedream"
    flushes = False
    unequal_replicas = True

    vertical_sync: bool = False
    """Whether all stages use weights of the same age for a micro-batch, that of the first stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.vertical_sync, bool):
            raise SpecError(f"{self.name}(vertical_sync={self.vertical_sync!r}): it must be True or False")

    def warmup(self, rank: int, setting: PipelineSetting) -> int:
        """Forwards of a worker before forwards and backwards alternate; its first backward follows one forward later.

        It does not depend on the number of micro-batches.

        >>> [PipeDream().warmup(rank, PipelineSetting(ranks=2, micro_batches=9, replicas=(3, 1))) for rank in (0, 1)]
        [1, 0]
        """
        return warmup_forwards(rank, setting)

    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        """The actions of one worker in the whole training: `setting.micro_batches` is the number in all steps."""
        own = setting.assigned(rank, replica)
        forwards = (Action("F", rank, number) for number in own)
        backwards = (Action("B", rank, number) for number in own)
        for action in alternate(forwards, backwards, self.warmup(rank, setting)):
            yield action
            if action.kind == "B":
                yield Action("U", rank, action.micro_batch)
