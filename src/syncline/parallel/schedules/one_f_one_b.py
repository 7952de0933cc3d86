"""One forward, one backward: the time of GPipe, but rank s keeps at most p − s micro-batches (Narayanan et al., 2019).

Three ranks, four micro-batches (one column is the time of F or of B)::

    rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Rank s computes p − 1 − s forwards, then forwards and backwards in turn, then the remaining backwards. The share of
idle time is (p − 1) / (m + p − 1).

The alternation is that of PipeDream; the pipeline is emptied at the end of each step, as in DAPPLE (Fan et al., 2021)
and PipeDream-Flush (Narayanan et al., 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from syncline.parallel.schedules.base import Action, PipelineSchedule, PipelineSetting, with_reductions

__all__ = ["OneFOneB", "alternate", "warmup_forwards"]


@dataclass(frozen=True, repr=False)
class OneFOneB(PipelineSchedule):
    """A warm-up of forwards, then one forward and one backward in turn.

    >>> print(*OneFOneB().actions(1, PipelineSetting(ranks=3, micro_batches=3)))
    1F0 1F1 1B0 1F2 1B1 1B2 1R
    """

    name = "1f1b"
    unequal_replicas = True

    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        """The actions of one worker in one step."""
        own = setting.assigned(rank, replica)
        forwards = (Action("F", rank, number) for number in own)
        backwards = (Action("B", rank, number) for number in own)
        ordered = alternate(forwards, backwards, warmup_forwards(rank, setting))
        yield from with_reductions(ordered, stages=(rank,))


def warmup_forwards(rank: int, setting: PipelineSetting) -> int:
    """Forwards of a worker before forwards and backwards alternate: p − 1 − s on pipeline rank s.

    With rₛ replicas of rank s::

        W(s) = ⌈(rₛ + rₛ₊₁ + … + rₚ₋₁) / rₛ⌉ − 1

    Then W(s+1)·rₛ₊₁ < (W(s) + 1)·rₛ: a rank never needs a micro-batch that the rank before it computes only after a
    later backward. So the order cannot deadlock.

    >>> [warmup_forwards(rank, PipelineSetting(4, 32)) for rank in range(4)]
    [3, 2, 1, 0]
    >>> [warmup_forwards(rank, PipelineSetting(4, 32, replicas=(9, 5, 1, 1))) for rank in range(4)]
    [1, 1, 1, 0]
    """
    replicas = setting.replicas or (1,) * setting.ranks
    return -(-sum(replicas[rank:]) // replicas[rank]) - 1


def alternate(forwards: Iterable[Action], backwards: Iterable[Action], warmup: int) -> Iterator[Action]:
    """`warmup` forwards, then a forward and a backward in turn, then the remaining backwards.

    It reads no further than it has to, so both may be endless.

    >>> print(*alternate([Action("F", 0, j) for j in range(3)], [Action("B", 0, j) for j in range(3)], warmup=1))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    remaining, later = iter(forwards), iter(backwards)
    yield from islice(remaining, warmup)
    for forward in remaining:
        yield forward
        yield next(later)
    yield from later
