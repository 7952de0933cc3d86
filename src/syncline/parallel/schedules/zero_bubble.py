"""ZB-H1: the backward is split, and the weights' part of it fills idle time (Qi et al., 2024).

Three ranks, four micro-batches (one column is the time of F, of I or of W)::

    rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Rank s computes p − 1 − s forwards, then F and I in turn, then the remaining I. The W of a micro-batch follows s
backwards later. The idle time of a rank is (p − 1)(F + I − W), instead of (p − 1)(F + I + W) in 1F1B. Every rank keeps
up to p micro-batches, as many as the first rank of 1F1B.

P. Qi, X. Wan, G. Huang and M. Lin, *Zero Bubble Pipeline Parallelism*, ICLR 2024.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from syncline.parallel.schedules.base import Action, PipelineSetting, with_reductions
from syncline.parallel.schedules.interleaved import ChunkedSchedule

__all__ = ["ZeroBubble"]


@dataclass(frozen=True, repr=False)
class ZeroBubble(ChunkedSchedule):
    """One forward and one backward of the inputs in turn; on rank s, the weights' part follows s backwards later.

    With two `chunks` or more, the micro-batches pass them in rounds, as in `Interleaved`.

    >>> print(*ZeroBubble().actions(1, PipelineSetting(ranks=2, micro_batches=3)))
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1R
    """

    name = "zero_bubble"
    splits_backward = True

    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        """The actions of a rank in one step."""
        yield from with_reductions(self._with_weights(rank, setting))

    def _with_weights(self, rank: int, setting: PipelineSetting) -> Iterator[Action]:
        pending: deque[Action] = deque()
        for action in self.ordered(rank, setting, "I", setting.ranks - 1 - rank):
            yield action
            if action.kind == "I":
                pending.append(Action("W", action.stage, action.micro_batch))
                if len(pending) > rank:
                    yield pending.popleft()
        yield from pending
