"""The global order of an epoch, and whose turn each sample is: pure, the same on every rank.

    order        7 2 9 4 0 5 8 1 6 3          ten samples, two ranks, two samples a rank: B = 4
    batch 0      7 2 9 4    rank 0: 7 9    rank 1: 2 4
    batch 1      0 5 8 1    rank 0: 0 8    rank 1: 5 1
    batch 2      6 3        rank 0: 6      rank 1: 3      a short one is split as evenly as it can be

A place in an epoch is the number of samples that all ranks together have consumed. It means the same whatever the
number of ranks, so a run can go on with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

__all__ = ["Deal", "Part", "Take", "count_pieces", "cut", "deal", "deal_batches", "ends_unevenly", "mixed", "order"]

Take = Callable[[int], list[Any]]
"""Gives the next n of an epoch's order; fewer, where it ends."""


@dataclass(frozen=True)
class Part:
    """Which rank of how many takes its share, and the seed that all who share have in common."""

    rank: int
    size: int
    seed: int
    who: int
    """The rank in the world, also where nothing is shared: what must differ between ranks is drawn from it."""
    may_be_empty: bool = False
    """Whether a rank may have nothing in an epoch, as in an evaluation."""


@dataclass(frozen=True)
class Deal:
    """What one rank gets of one global batch."""

    indices: list[Any]
    start: int
    """Where in the epoch the global batch begins."""
    samples: int
    """How many samples the global batch has, over all ranks."""
    last: bool
    """Whether this rank gets nothing after it."""


def mixed(*numbers: int) -> int:
    """One seed from several numbers; each of them changes all of it.

    >>> mixed(0, 1) != mixed(1, 0), 0 <= mixed(-5) < 2**63
    (True, True)
    """
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1


def order(length: int, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """The samples of an epoch in the order in which all ranks together read them.

    >>> list(order(4, seed=0, epoch=0, shuffle=False))
    [0, 1, 2, 3]
    >>> sorted(order(4, seed=0, epoch=0, shuffle=True))
    [0, 1, 2, 3]
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    shuffled: list[int] = torch.randperm(length, generator=generator).tolist()
    return shuffled


def deal(take: Take, part: Part, batch: int, drop_last: bool, start: int = 0) -> Iterator[Deal]:
    """Share out global batches of `batch` samples: rank r of k takes every k-th beginning with r.

    >>> samples = iter([7, 2, 9, 4, 0, 5, 8, 1, 6])
    >>> take = lambda count: [index for _, index in zip(range(count), samples)]
    >>> [deal.indices for deal in deal(take, Part(rank=1, size=2, seed=0, who=1), batch=4, drop_last=False)]
    [[2, 4], [5, 1]]
    """
    ahead = take(batch)
    least = batch if drop_last else 1
    while len(ahead) >= least:
        # One batch of numbers is drawn ahead to know the last; the samples themselves are not.
        now, ahead = ahead, take(batch)
        mine = now[part.rank :: part.size]
        if not mine:
            return
        last = len(ahead) < least or len(ahead) <= part.rank
        yield Deal(mine, start, len(now), last)
        start += len(now)


def deal_batches(take: Take, part: Part, drop_last: bool, start: int = 0) -> Iterator[Deal]:
    """Share out what is in batches already: batch i goes to rank i mod k.

    >>> batches = iter([[3, 1], [4], [1, 5], [9], [2]])
    >>> take = lambda count: [batch for _, batch in zip(range(count), batches)]
    >>> [deal.indices for deal in deal_batches(take, Part(rank=1, size=2, seed=0, who=1), drop_last=False)]
    [[4], [9]]
    """
    ahead = take(part.size)
    least = part.size if drop_last else 1
    while len(ahead) >= least:
        now, ahead = ahead, take(part.size)
        if part.rank >= len(now):
            return
        last = len(ahead) < least or len(ahead) <= part.rank
        samples = sum(len(each) for each in now)
        yield Deal(list(now[part.rank]), start, samples, last)
        start += samples


def count_pieces(length: int, batch: int, rank: int, drop_last: bool) -> int:
    """How many global batches of `length` samples have something for `rank`.

    >>> [count_pieces(9, batch=4, rank=rank, drop_last=False) for rank in (0, 1)]
    [3, 2]
    """
    full, rest = divmod(length, batch)
    return full + (rest > rank and not drop_last)


def ends_unevenly(length: int, batch: int, size: int, drop_last: bool) -> bool:
    """Whether the last global batch leaves some rank with nothing.

    >>> ends_unevenly(9, batch=4, size=2, drop_last=False), ends_unevenly(10, batch=4, size=2, drop_last=False)
    (True, False)
    """
    return not drop_last and 0 < length % batch < size


def cut(indices: Sequence[Any], most: int) -> list[list[Any]]:
    """Cut a share into parts of at most `most`, no two of which differ by more than one.

    >>> cut(range(10), most=4)
    [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    """
    parts = -(-len(indices) // most)
    small, larger = divmod(len(indices), parts)
    bounds = [number * small + min(number, larger) for number in range(parts + 1)]
    return [list(indices[low:high]) for low, high in pairwise(bounds)]
