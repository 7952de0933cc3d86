"""ZB-V: two stages a rank, placed as a V: no idle time if F, I and W take equal time (Qi et al., 2024).

Two ranks, four micro-batches; rank 0 has stages 0 and 3, rank 1 stages 1 and 2 (one column is the time of F, of I or of
W of one stage)::

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
    rank 1   .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

A micro-batch passes the ranks forth and back, so the last stage is on the first rank, which begins the backward without
a transfer::

    rank      0      1      …      p − 1
    forth     0  →   1  →   …  →   p − 1
    back    2p − 1 ← 2p − 2 ← … ←   p

Every rank keeps up to 2p stages' activations of one micro-batch. A stage is half of a rank's part of the model, so that
is as much as the first rank of 1F1B keeps.

P. Qi, X. Wan, G. Huang and M. Lin, *Zero Bubble Pipeline Parallelism*, ICLR 2024, section 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from syncline.parallel.schedules.base import Action, Kind, PipelineSchedule, PipelineSetting, with_reductions

__all__ = ["ZBV"]

Computation = tuple[Kind, int]
"""Kind and stage of an action."""


@dataclass(frozen=True, repr=False)
class ZBV(PipelineSchedule):
    """Rank s has the stages s and 2p − 1 − s, so the first rank computes the first stage and the last one.

    >>> print(*ZBV().actions(0, PipelineSetting(ranks=1, micro_batches=1)))
    0F0 1F0 1I0 1W0 1R 0I0 0W0 0R
    """

    name = "zbv"
    splits_backward = True

    @property
    def stages_per_rank(self) -> int:
        """The number of stages that each rank computes."""
        return 2

    def rank_of(self, stage: int, ranks: int) -> int:
        """The pipeline rank that computes a stage: 0, 1, …, p − 1, p − 1, …, 1, 0."""
        return min(stage, 2 * ranks - 1 - stage)

    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        """The actions of a rank in one step."""
        yield from with_reductions(_numbered(rank, setting))


def _numbered(rank: int, setting: PipelineSetting) -> Iterator[Action]:
    """The pattern with the micro-batches numbered in order, without those that are not there.

    The pattern needs 2p − 1 micro-batches; with fewer, the others are left out.
    """
    total = max(setting.micro_batches, 2 * setting.ranks - 1)
    next_numbers: Counter[Computation] = Counter()
    for kind, stage in _pattern(rank, setting.ranks, total):
        number = next_numbers[kind, stage]
        next_numbers[kind, stage] += 1
        if number < setting.micro_batches:
            yield Action(kind, stage, number)


def _pattern(rank: int, ranks: int, total: int) -> Iterator[Computation]:
    """Kind and stage of each computation of a rank, for at least 2p − 1 micro-batches."""
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - rank
    forward_down: Computation = ("F", down)
    forward_up: Computation = ("F", up)
    input_down: Computation = ("I", down)
    input_up: Computation = ("I", up)
    weight_down: Computation = ("W", down)
    weight_up: Computation = ("W", up)
    yield from [forward_down] * (2 * after - 1)
    yield from [forward_up, forward_down] * rank
    yield from [forward_up, input_up, weight_up] * after
    forwards_left = total - (2 * after - 1) - rank
    for number in range(total - ranks):
        if number < forwards_left:
            yield forward_down
        yield from [input_down, weight_down, forward_up, input_up, weight_up]
    yield from [input_down, input_up] * rank
    yield from [input_down, weight_down] * after
    yield from [weight_up] * rank
    yield from [weight_down] * rank
