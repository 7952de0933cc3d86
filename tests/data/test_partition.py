"""The global order, and how it is shared out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.data.partition import (
    RankPartition,
    RankShare,
    count_shares,
    ends_unevenly,
    epoch_order,
    mix_seeds,
    share_samples,
    split_evenly,
)


def shares_of(samples: list[int], size: int, batch: int, drop_last: bool = False) -> list[list[RankShare]]:
    """The shares of each rank."""
    shares = []
    for rank in range(size):
        left = iter(samples)

        def take(count: int, left: Iterator[int] = left) -> list[int]:
            return list(islice(left, count))

        shares.append(list(share_samples(take, RankPartition(rank, size, 0, rank), batch * size, drop_last)))
    return shares


def test_an_order_has_every_sample_once() -> None:
    assert sorted(epoch_order(1000, seed=3, epoch=2, shuffle=True)) == list(range(1000))
    assert list(epoch_order(5, seed=3, epoch=2, shuffle=False)) == [0, 1, 2, 3, 4]


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    first = epoch_order(100, seed=0, epoch=1, shuffle=True)
    assert first == epoch_order(100, seed=0, epoch=1, shuffle=True)
    assert len({tuple(epoch_order(100, seed, epoch, True)) for seed in range(4) for epoch in range(4)}) == 16


def test_mixing_is_the_same_everywhere() -> None:
    """Ranks on different machines, and runs resumed under another NumPy, must draw the same."""
    assert mix_seeds(0, 0) == 7896617691693857887
    assert mix_seeds(1, 2, 3) == mix_seeds(1, 2, 3) != mix_seeds(3, 2, 1)


def test_the_example_of_the_module() -> None:
    first, second = shares_of([7, 2, 9, 4, 0, 5, 8, 1, 6, 3], size=2, batch=2)
    assert [each.indices for each in first] == [[7, 9], [0, 8], [6]]
    assert [each.indices for each in second] == [[2, 4], [5, 1], [3]]
    assert [(each.start, each.samples, each.last) for each in first] == [(0, 4, False), (4, 4, False), (8, 2, True)]


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 6), st.booleans())
def test_disjoint_complete_and_even(length: int, size: int, batch: int, drop_last: bool) -> None:
    shares = shares_of(list(range(length)), size, batch, drop_last)
    kept = length - length % (size * batch) if drop_last else length
    everything = [index for share in shares for each in share for index in each.indices]
    assert sorted(everything) == list(range(kept))

    counts = [len(share) for share in shares]
    assert counts == [count_shares(length, size * batch, rank, drop_last) for rank in range(size)]
    assert (len(set(counts)) > 1) == ends_unevenly(length, size * batch, size, drop_last)
    assert all(each.last == (place == len(share) - 1) for share in shares for place, each in enumerate(share))
    for step in range(max(counts)):
        sizes = [len(share[step].indices) if step < len(share) else 0 for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert {share[step].samples for share in shares if step < len(share)} == {sum(sizes)}


@given(st.lists(st.integers(), min_size=1, max_size=50), st.integers(1, 60))
def test_split_evenly_is_complete_and_even(samples: list[int], most: int) -> None:
    parts = split_evenly(samples, most)
    assert [each for part in parts for each in part] == samples
    sizes = [len(part) for part in parts]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-len(samples) // most)


@pytest.mark.parametrize(("length", "uneven"), [(8, False), (9, True), (10, True), (11, False), (15, False)])
def test_uneven_is_when_a_rank_gets_nothing(length: int, uneven: bool) -> None:
    assert ends_unevenly(length, 8, 3, drop_last=False) is uneven
