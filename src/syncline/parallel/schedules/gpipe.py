"""All forwards, then all backwards: each rank keeps the activations of all m micro-batches (Huang et al., 2019).

Three ranks, four micro-batches (one column is the time of F or of B)::

    rank 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    rank 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    rank 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

The share of idle time is (p − 1) / (m + p − 1).

Y. Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from syncline.parallel.schedules.base import Action, PipelineSchedule, PipelineSetting, with_reductions

__all__ = ["GPipe"]


@dataclass(frozen=True, repr=False)
class GPipe(PipelineSchedule):
    """The forwards of all micro-batches, then their backwards, both in order.

    >>> print(*GPipe().actions(1, PipelineSetting(ranks=3, micro_batches=2)))
    1F0 1F1 1B0 1B1 1R
    """

    name = "gpipe"
    unequal_replicas = True

    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        """The actions of one worker in one step."""
        own = setting.assigned(rank, replica)
        forwards = [Action("F", rank, number) for number in own]
        backwards = [Action("B", rank, number) for number in own]
        yield from with_reductions(forwards + backwards, stages=(rank,))
