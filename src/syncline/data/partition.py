"""The global order of an epoch, and the samples of each rank: pure functions, the same on every rank.

    order        7 2 9 4 0 5 8 1 6 3          ten samples, two ranks, two samples a rank: B = 4
    batch 0      7 2 9 4    rank 0: 7 9    rank 1: 2 4
    batch 1      0 5 8 1    rank 0: 0 8    rank 1: 5 1
    batch 2      6 3        rank 0: 6      rank 1: 3      a short batch is split evenly

A position in an epoch is the number of samples that all ranks together have read. It does not depend on the number of
ranks, so a run can continue with another number.

If a rank is lost in the middle of an epoch, its share of the current global batch follows what the others have trained:

    order        7 2 9 4 0 5 8 1 6 3          rank 1 is lost in batch 0; it had 2 4
    new order    7 9 2 4 0 5 8 1 6 3          the position is 2 now; B = 2 for the one rank that is left
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "EpochItems",
    "LostShares",
    "RankPartition",
    "RankShare",
    "Take",
    "count_shares",
    "ends_unevenly",
    "epoch_order",
    "mix_seeds",
    "share_batches",
    "share_samples",
    "split_evenly",
]

Take = Callable[[int], list[Any]]
"""Returns the next n items of an epoch's order; fewer at the end."""

MAX_SKIPPED_SAMPLES = 65536
"""The number of samples that are drawn at once to skip them."""


@dataclass(frozen=True)
class RankPartition:
    """The rank, the number of ranks, and their common seed."""

    rank: int
    size: int
    seed: int
    who: int
    """The rank in the world, also without a split. It seeds what must differ between ranks."""
    may_be_empty: bool = False
    """Whether a rank may have no data in an epoch, as in an evaluation."""


@dataclass(frozen=True)
class RankShare:
    """One rank's share of one global batch."""

    indices: list[Any]
    start: int
    """The position in the epoch at which the global batch starts."""
    samples: int
    """Samples of the global batch, of all ranks."""
    last: bool
    """Whether it is this rank's last share of the epoch."""


class LostShares(NamedTuple):
    """The shares of one global batch that lost ranks have not trained. They come after the other shares."""

    start: int
    """The position in the epoch at which the global batch starts."""
    samples: int
    """Samples of the global batch, of all ranks."""
    size: int
    """The number of ranks that shared it."""
    ranks: tuple[int, ...]
    """The lost ranks, of `size`."""

    def split(self, batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The items of a global batch that were trained, and those that were not.

        >>> LostShares(start=0, samples=4, size=2, ranks=(1,)).split([7, 2, 9, 4])
        ([7, 9], [2, 4])
        """
        lost = [number % self.size in self.ranks for number in range(len(batch))]
        trained = [item for item, untrained in zip(batch, lost, strict=True) if not untrained]
        return trained, [item for item, untrained in zip(batch, lost, strict=True) if untrained]


class EpochItems:
    """The samples of an epoch that are left (or the batches of a batch sampler), in the order in which they are read.

    >>> samples = iter([7, 2, 9, 4, 0, 5, 8, 1, 6, 3])
    >>> items = EpochItems(lambda count: [index for _, index in zip(range(count), samples)])
    >>> items.skip(2, [LostShares(start=0, samples=4, size=2, ranks=(1,))])
    >>> items.take(4)
    [2, 4, 0, 5]
    """

    def __init__(self, take: Take, batches: bool = False) -> None:
        self._take = take
        self._batches = batches
        self._front: list[Any] = []

    def take(self, count: int) -> list[Any]:
        """The next items; fewer at the end."""
        if not self._front:
            return self._take(count)
        found, self._front = self._front[:count], self._front[count:]
        return found + self._take(count - len(found))

    def put_back(self, items: list[Any]) -> None:
        """The next call of `take` returns these items first."""
        self._front = items + self._front

    def count(self, items: Sequence[Any]) -> int:
        """The number of samples of some items."""
        return sum(map(len, items)) if self._batches else len(items)

    def draw(self, samples: int) -> Iterator[list[Any]]:
        """The next items that have so many samples, some at a time."""
        while samples > 0 and (items := self.take(1 if self._batches else min(samples, MAX_SKIPPED_SAMPLES))):
            samples -= self.count(items)
            yield items

    def skip(self, samples: int, lost_shares: Sequence[LostShares] = ()) -> None:
        """Pass the first samples of the epoch. Lost shares change the order, one after another."""
        position = 0
        for lost in lost_shares:
            deque(self.draw(lost.start - position), maxlen=0)
            trained, untrained = lost.split(list(chain.from_iterable(self.draw(lost.samples))))
            self.put_back(untrained)
            position = lost.start + self.count(trained)
        deque(self.draw(samples - position), maxlen=0)


def mix_seeds(*numbers: int) -> int:
    """One seed made of several numbers; each number changes all bits.

    >>> mix_seeds(0, 1) != mix_seeds(1, 0), 0 <= mix_seeds(-5) < 2**63
    (True, True)
    """
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1


def epoch_order(length: int, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """The samples of an epoch, in the order in which all ranks together read them.

    >>> list(epoch_order(4, seed=0, epoch=0, shuffle=False))
    [0, 1, 2, 3]
    >>> sorted(epoch_order(4, seed=0, epoch=0, shuffle=True))
    [0, 1, 2, 3]
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(mix_seeds(seed, epoch))
    shuffled: list[int] = torch.randperm(length, generator=generator).tolist()
    return shuffled


def share_samples(take: Take, part: RankPartition, batch: int, drop_last: bool, start: int = 0) -> Iterator[RankShare]:
    """Split global batches of `batch` samples: rank r of k takes every k-th sample, starting with r.

    >>> samples = iter([7, 2, 9, 4, 0, 5, 8, 1, 6])
    >>> take = lambda count: [index for _, index in zip(range(count), samples)]
    >>> part = RankPartition(rank=1, size=2, seed=0, who=1)
    >>> [share.indices for share in share_samples(take, part, batch=4, drop_last=False)]
    [[2, 4], [5, 1]]
    """
    for now, last in _steps_of(take, part, batch, drop_last):
        yield RankShare(now[part.rank :: part.size], start, len(now), last)
        start += len(now)


def share_batches(take: Take, part: RankPartition, drop_last: bool, start: int = 0) -> Iterator[RankShare]:
    """Share ready batches: batch i goes to rank i mod k.

    >>> batches = iter([[3, 1], [4], [1, 5], [9], [2]])
    >>> take = lambda count: [batch for _, batch in zip(range(count), batches)]
    >>> part = RankPartition(rank=1, size=2, seed=0, who=1)
    >>> [share.indices for share in share_batches(take, part, drop_last=False)]
    [[4], [9]]
    """
    for now, last in _steps_of(take, part, part.size, drop_last):
        samples = sum(len(each) for each in now)
        yield RankShare(list(now[part.rank]), start, samples, last)
        start += samples


def _steps_of(take: Take, part: RankPartition, count: int, drop_last: bool) -> Iterator[tuple[list[Any], bool]]:
    """The `count` items of each step in which this rank has data, and whether it is the last such step."""
    following = take(count)
    least = max(part.rank + 1, count if drop_last else 1)
    while len(following) >= least:
        # One step of indices is drawn ahead, to know which is the last. The samples are not read ahead.
        now, following = following, take(count)
        yield now, len(following) < least


def count_shares(length: int, batch: int, rank: int, drop_last: bool) -> int:
    """The number of global batches of `length` samples that have data for `rank`.

    >>> [count_shares(9, batch=4, rank=rank, drop_last=False) for rank in (0, 1)]
    [3, 2]
    """
    full, rest = divmod(length, batch)
    return full + (rest > rank and not drop_last)


def ends_unevenly(length: int, batch: int, size: int, drop_last: bool) -> bool:
    """Whether some rank has no data in the last global batch.

    >>> ends_unevenly(9, batch=4, size=2, drop_last=False), ends_unevenly(10, batch=4, size=2, drop_last=False)
    (True, False)
    """
    return not drop_last and 0 < length % batch < size


def split_evenly(indices: Sequence[Any], most: int) -> list[list[Any]]:
    """Split a share into parts of at most `most`, whose sizes differ by at most one.

    >>> split_evenly(range(10), most=4)
    [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    """
    parts = -(-len(indices) // most)
    small, larger = divmod(len(indices), parts)
    bounds = [number * small + min(number, larger) for number in range(parts + 1)]
    return [list(indices[low:high]) for low, high in pairwise(bounds)]
