"""Shares of a loader: disjoint, complete, in one order whatever the number of ranks, resumable anywhere."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncline as sl
from syncline.data import Cursor, Sharded
from syncline.errors import IncompatibleError, SpecError
from tests.data.cases import Buckets, Counting, Numbers, Several, flat, joined, merged, read, resumed, together


def loader(length: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(length), batch_size=batch, **options)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.booleans())
def test_disjoint_complete_and_weighted(size: int, batch: int, more: int, drop_last: bool) -> None:
    length = size * batch * drop_last + size + more
    data = loader(length, batch, shuffle=True, drop_last=drop_last)
    shares = [list(Sharded(data, rank=rank, size=size)) for rank in range(size)]
    kept = length - length % (size * batch) if drop_last else length
    everything = [index for share in shares for piece in share for index in flat(piece.batch)]
    assert len(set(everything)) == len(everything) == kept

    for step in range(max(map(len, shares))):
        pieces = [share[step] for share in shares if step < len(share)]
        assert all(piece.weight == len(piece.batch) / batch == (piece.count or 0) / batch for piece in pieces)
        assert [piece.total for piece in pieces] == pytest.approx([sum(piece.weight for piece in pieces)] * len(pieces))
    for rank, share in enumerate(shares):
        sharded = Sharded(data, rank=rank, size=size)
        assert len(sharded) == len(share)
        assert sharded.steps == len(shares[0])
        assert sharded.uneven == (len({len(each) for each in shares}) > 1)
        assert [piece.last for piece in share] == [False] * (len(share) - 1) + [True]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_the_same_whatever_the_number_of_ranks(shuffle: bool) -> None:
    alone = together(loader(61, 12, shuffle=shuffle), 1, seed=5)
    assert sorted(alone) == list(range(61))
    assert (alone == list(range(61))) is not shuffle
    for size in (2, 3, 4, 5):
        assert together(loader(61, 12 // size, shuffle=shuffle), size, seed=5) == alone


def test_each_global_batch_is_the_same_where_their_sizes_are() -> None:
    alone = read(loader(24, 12, shuffle=True))
    for size in (2, 3, 4):
        shares = [read(loader(24, 12 // size, shuffle=True), rank, size) for rank in range(size)]
        assert [merged([[share[step]] for share in shares]) for step in range(2)] == alone


def test_epochs_are_shuffled_anew_and_seeds_differ() -> None:
    sharded = Sharded(loader(40, 40, shuffle=True), rank=0, size=1, seed=1)
    epochs = [tuple(flat(piece.batch)) for _ in range(3) for piece in sharded]
    assert len(set(epochs)) == 3
    assert sharded.cursor.epoch == 3
    assert tuple(read(loader(40, 40, shuffle=True), seed=2)[0]) not in epochs


def stopped(data: Any, size: int, steps: int, **options: Any) -> tuple[Cursor, list[int]]:
    """Where rank 0 stands in the body of a step, and what all ranks have read by then."""
    shares = []
    cursors = []
    for rank in range(size):
        sharded = Sharded(data, rank=rank, size=size, **options)
        batches = []
        for piece in sharded:
            batches.append(flat(piece.batch))
            if len(batches) == steps:
                break
        shares.append(batches)
        cursors.append(sharded.cursor)
    saved = cursors[0].state_dict()
    assert all(each.state_dict() == saved for each in cursors)
    cursor = Cursor()
    cursor.load_state_dict(saved)
    return cursor, merged(shares)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("other", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_resumed_in_mid_epoch_it_reads_exactly_the_rest(size: int, other: int, steps: int) -> None:
    data = loader(50, 4, shuffle=True)
    uninterrupted = together(data, 1)
    cursor, before = stopped(data, size, steps)
    assert cursor.samples == len(before) == 4 * size * steps
    assert before + together(data, other, cursor) == uninterrupted


def test_resumed_on_as_many_ranks_the_batches_are_the_same() -> None:
    data = loader(50, 4, shuffle=True)
    cursor, _ = stopped(data, 3, 2)
    whole = read(data, 1, 3)
    assert read(data, 1, 3, cursor) == whole[2:]
    assert cursor.state_dict() == {"epoch": 1, "samples": 0, "streams": []}


@pytest.mark.parametrize("stop", range(1, 13))
def test_an_interrupted_loop_equals_an_uninterrupted_one(stop: int) -> None:
    """Wherever the run was saved: also in the body of an epoch's last batch, and after it."""

    def train(cursor: Cursor, log: list[Any], saved: dict[int, Any]) -> None:
        sharded = Sharded(loader(10, 4, shuffle=True), rank=0, size=1, cursor=cursor)
        for epoch in range(cursor.epoch, 3):
            for piece in sharded:
                log.append((epoch, flat(piece.batch)))
                saved[len(log)] = cursor.state_dict()
            log.append(f"end of epoch {epoch}")
            saved[len(log)] = cursor.state_dict()

    log: list[Any] = []
    saved: dict[int, Any] = {}
    train(Cursor(), log, saved)
    assert len(log) == 3 * 4
    cursor = Cursor()
    cursor.load_state_dict(saved[stop])
    rest: list[Any] = []
    train(cursor, rest, {})
    assert log[:stop] + rest == log


def test_each_iteration_is_a_fresh_epoch() -> None:
    """Also after a loop that was left in the middle, and after one that stopped at the last batch."""
    sharded = Sharded(loader(6, 2, shuffle=True), rank=0, size=1)
    epochs = [read(loader(6, 2, shuffle=True), cursor=Cursor(epoch=epoch)) for epoch in range(4)]
    assert flat(next(iter(sharded)).batch) == epochs[0][0]
    assert [flat(piece.batch) for piece in sharded] == epochs[1]
    held = iter(sharded)
    assert [flat(next(held).batch) for _ in range(3)] == epochs[2]
    assert (sharded.cursor.epoch, sharded.cursor.next_epoch) == (2, 3)
    assert [flat(piece.batch) for piece in sharded] == epochs[3]
    assert [flat(piece.batch) for piece in held] == [], "the other loop does not disturb it"
    assert sharded.cursor.state_dict() == {"epoch": 4, "samples": 0, "streams": []}


def test_only_the_first_iteration_after_a_load_continues() -> None:
    sharded = Sharded(loader(6, 2), rank=0, size=1, cursor=resumed(Cursor(samples=2)))
    assert [flat(piece.batch) for piece in sharded] == [[2, 3], [4, 5]]
    assert [flat(piece.batch) for piece in sharded] == [[0, 1], [2, 3], [4, 5]]


def test_peeking_is_undone() -> None:
    """Nothing was trained between the beginning of the loop and its end: the next one reads the same."""
    cursor = resumed(Cursor(epoch=3, samples=4))
    sharded = Sharded(loader(6, 2), rank=0, size=1, cursor=cursor)
    held = sharded.read(sharded.begin(work=7))
    assert flat(next(held).batch) == [4, 5]
    outer = sharded.begin(work=7)
    assert [flat(piece.batch) for piece in sharded.read(outer)] == [[4, 5]]
    assert cursor.state_dict() == {"epoch": 4, "samples": 0, "streams": []}

    outer = sharded.begin(work=7)
    batches = sharded.read(outer)
    next(batches)
    inner = sharded.begin(work=8)  # in the body of the outer loop, which has trained
    next(sharded.read(inner))
    cursor.leave(inner, work=8)
    assert cursor.state_dict() == {"epoch": 4, "samples": 2, "streams": []}
    assert [flat(piece.batch) for piece in batches] == [[2, 3], [4, 5]]
    assert cursor.epoch == 5


def test_a_loop_from_before_a_load_does_not_move_the_cursor() -> None:
    sharded = Sharded(loader(6, 2), rank=0, size=1)
    before = iter(sharded)
    next(before)
    sharded.cursor.load_state_dict({"epoch": 5, "samples": 2})
    list(before)
    assert sharded.cursor.state_dict() == {"epoch": 5, "samples": 2, "streams": []}
    assert [flat(piece.batch) for piece in sharded] == [[2, 3], [4, 5]]


def test_a_second_loop_continues_an_iterator() -> None:
    sharded = Sharded(iter([[0], [1], [2], [3]]), rank=0, size=1)
    assert next(iter(sharded)).batch == [0]
    assert [piece.batch for piece in sharded] == [[1], [2], [3]]
    assert sharded.cursor.epoch == 1


def test_uneven_stays_what_it_is_through_an_epoch() -> None:
    """Resumed on another number of ranks, the end of this epoch differs from that of others."""
    data = loader(12, 2)
    assert not Sharded(data, rank=0, size=3).uneven
    sharded = Sharded(data, rank=0, size=3, cursor=Cursor(samples=4))
    assert [sharded.uneven for _ in sharded] == [True, True]
    assert len(list(Sharded(data, rank=2, size=3, cursor=Cursor(samples=4)))) == 1
    assert not sharded.uneven


def test_a_dataset_needs_no_loader() -> None:
    data = TensorDataset(torch.arange(7.0))
    pieces = list(Sharded(data, rank=0, size=1, batch=4))
    assert [piece.count for piece in pieces] == [4, 3]
    assert sorted(torch.cat([piece.batch[0] for piece in pieces]).tolist()) == list(range(7))
    assert read(Numbers(5), batch=2, shuffle=False) == [[0, 1], [2, 3], [4]]
    assert read(Counting(5), 1, 2, batch=2) == [[1, 3]]


def test_the_loaders_settings_are_kept() -> None:
    data = loader(4, 2, collate_fn=lambda items: {"sum": sum(items)}, drop_last=True)
    assert [piece.batch for piece in Sharded(data, rank=1, size=2)] == [{"sum": 4}]


def test_a_dataset_may_read_a_batch_at_once() -> None:
    pick: Any = operator.itemgetter("x")
    data: DataLoader[Any] = DataLoader(Several(5), batch_size=2, collate_fn=pick)
    assert read(data, 1, 2) == [[1, 3]]
    assert [piece.weight for piece in Sharded(data, rank=0, size=2)] == [1.0, 0.5]


def test_drop_last_can_be_said_here() -> None:
    assert read(loader(7, 2), drop_last=True) == [[0, 1], [2, 3], [4, 5]]
    assert read(loader(7, 2, drop_last=True), drop_last=False)[-1] == [6]


def test_split_false_shares_nothing() -> None:
    first, second = (Sharded(loader(20, 20, shuffle=True), rank=rank, size=2, split=False) for rank in (0, 1))
    assert first.uneven
    orders = [flat(next(iter(each)).batch) for each in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]


def test_on_the_simulator() -> None:
    def sums(world: sl.World) -> torch.Tensor:
        total = torch.zeros(())
        for piece in Sharded(loader(12, 2, shuffle=True), rank=world.rank, size=world.size):
            total += sl.allreduce(piece.batch.sum(), op="sum")
        return total

    assert [float(each) for each in sl.simulate(sums, ranks=3).results] == [66.0] * 3


@pytest.mark.parametrize("place", [{}, {"epoch": 1}, {"epoch": -1, "samples": 0}, {"epoch": True, "samples": 0}])
def test_invalid_positions_are_refused(place: dict[str, Any]) -> None:
    with pytest.raises(IncompatibleError, match="cannot be read"):
        Cursor().load_state_dict(place)


def test_a_position_in_other_data_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"sample 50 of epoch 0, but an epoch of this data has 10"):
        read(loader(10, 2), cursor=Cursor(samples=50))


def refused(data: Any, kind: type[Exception], match: str, size: int = 4, **options: Any) -> None:
    for rank in range(size):  # every rank alike, or those that go on would wait
        with pytest.raises(kind, match=match):
            list(Sharded(data, rank=rank, size=size, **options))


class Unsized:
    """Three batches, which nobody is told before."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_too_little_data_is_refused() -> None:
    refused(loader(3, 2), IncompatibleError, "3 samples cannot be split over 4 workers")
    refused(loader(0, 2), IncompatibleError, "empty")
    refused(Numbers(0), IncompatibleError, "empty", batch=2)
    refused(loader(7, 2, drop_last=True), IncompatibleError, "drop_last leaves nothing of 7 samples.* takes 8")
    refused([1, 2, 3], IncompatibleError, "3 batches cannot be split over 4 workers")
    refused([], IncompatibleError, "empty")
    refused(Unsized(), IncompatibleError, "3 batches cannot be split over 4 workers")
    refused(DataLoader(Counting(3), batch_size=2), IncompatibleError, "3 items cannot be split over 4 workers")
    refused(DataLoader(Counting(0), batch_size=2), IncompatibleError, "empty")
    batches = DataLoader(Numbers(9), batch_sampler=Buckets(3))
    refused(batches, IncompatibleError, "3 batches cannot be split over 4 workers")


def test_loaders_that_cannot_be_sharded() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(8), num_replicas=4, rank=1)
    refused(loader(8, 2, sampler=sampler), IncompatibleError, r"DistributedSampler \(rank 1 of 4\).*split=False")
    assert sorted(joined(read(loader(8, 2, sampler=sampler), split=False))) == sorted(sampler)
    refused(DataLoader(Numbers(8), batch_size=None), IncompatibleError, "batch_size=None")
    refused(8, IncompatibleError, "a int cannot be sharded")
    refused(Numbers(8), SpecError, "batch=None for a Numbers")
    refused(loader(8, 2), SpecError, "a DataLoader has its own", batch=3)
    with pytest.raises(SpecError, match="rank=2 is not one of 2 ranks"):
        Sharded(loader(8, 2), rank=2, size=2)
