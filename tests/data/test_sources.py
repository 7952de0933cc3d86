"""Samplers, streams, ready batches and loader processes; what is drawn, and from which generator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from syncline.data import Cursor, Sharded
from syncline.errors import IncompatibleError
from tests.data.cases import (
    Buckets,
    Counting,
    Mixed,
    Noisy,
    Numbers,
    Restless,
    Sized,
    flat,
    joined,
    read,
    resumed,
    states,
    together,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on one core


def with_sampler(sampler: Any, batch: int = 3) -> DataLoader[Any]:
    return DataLoader(Numbers(40), batch_size=batch, sampler=sampler)


def samplers() -> list[Any]:
    return [
        WeightedRandomSampler([1.0] * 40, 30),
        WeightedRandomSampler([1.0] * 40, 30, generator=torch.Generator()),
        SubsetRandomSampler(range(5, 30), generator=torch.Generator()),
        RandomSampler(Numbers(40), replacement=True, num_samples=30),
        RandomSampler(Numbers(40), num_samples=25),
        Mixed(20),
    ]


@pytest.mark.parametrize("number", range(6))
def test_any_sampler_is_drawn_alike_on_every_rank(number: int) -> None:
    """Though each rank's generators stand elsewhere."""
    alone = together(with_sampler(samplers()[number], batch=6), 1)
    torch.manual_seed(99)
    sampler = samplers()[number]
    if getattr(sampler, "generator", None) is not None:
        sampler.generator.manual_seed(7)
    assert together(with_sampler(sampler), 2) == alone
    assert together(with_sampler(sampler, batch=2), 3, Cursor(samples=6)) == alone[6:]
    assert together(with_sampler(sampler), 2, Cursor(epoch=1)) != alone


def test_a_sampler_that_hides_its_length_may_end_unevenly() -> None:
    sharded = Sharded(with_sampler(Mixed(5)), rank=0, size=2)
    assert sharded.uneven
    assert sharded.steps is None
    with pytest.raises(TypeError, match="unknown"):
        len(sharded)
    assert [piece.last for piece in sharded] == [False, False, True]


def test_the_samplers_own_generator_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    read(with_sampler(SubsetRandomSampler(range(9), generator=generator)))
    assert torch.equal(generator.get_state(), before)


def test_a_batch_sampler_is_shared_out_batch_by_batch() -> None:
    data: DataLoader[Any] = DataLoader(Numbers(100), batch_sampler=Buckets(7))
    whole = read(data)
    assert sorted(map(len, whole)) == [1, 2, 3, 4, 5, 6, 7]
    shares = [list(Sharded(data, rank=rank, size=3)) for rank in range(3)]
    assert [[flat(piece.batch) for piece in share] for share in shares] == [whole[0::3], whole[1::3], whole[2::3]]
    for step in range(2):
        pieces = [share[step] for share in shares]
        assert [piece.weight for piece in pieces] == [len(piece.batch) / len(whole[0]) for piece in pieces]
        assert [piece.total for piece in pieces] == pytest.approx([sum(piece.weight for piece in pieces)] * len(pieces))
    sharded = Sharded(data, rank=1, size=3)
    assert (len(sharded), sharded.steps, sharded.uneven) == (2, 3, True)
    assert not Sharded(data, rank=1, size=3, drop_last=True).uneven
    assert [len(read(data, rank, 3, drop_last=True)) for rank in range(3)] == [2, 2, 2]


def test_a_batch_sampler_resumes_on_another_number_of_ranks() -> None:
    data: DataLoader[Any] = DataLoader(Numbers(100), batch_sampler=Buckets(7))
    whole = read(data)
    sharded = Sharded(data, rank=0, size=3)
    next(iter(sharded))
    place = sharded.cursor.state_dict()
    assert place["samples"] == sum(map(len, whole[:3]))
    assert not Sharded(data, rank=0, size=7).uneven
    assert Sharded(data, rank=0, size=7, cursor=resumed(sharded.cursor)).uneven
    for rank in (0, 1):
        cursor = Cursor()
        cursor.load_state_dict(place)
        pieces = list(Sharded(data, rank=rank, size=2, cursor=cursor))
        assert [flat(piece.batch) for piece in pieces] == whole[3:][rank::2]
        assert pieces[0].weight == len(whole[3 + rank]) / len(whole[0])


def test_torchs_own_batch_sampler_says_what_a_usual_batch_is() -> None:
    sampler = BatchSampler(RandomSampler(Numbers(10)), batch_size=4, drop_last=False)
    sharded = Sharded(DataLoader(Numbers(10), batch_sampler=sampler), rank=0, size=1)
    assert sharded.batch == 4
    assert [piece.weight for piece in sharded] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_stream_is_shared_out_item_by_item(size: int) -> None:
    data: DataLoader[Any] = DataLoader(Counting(17), batch_size=2)
    assert together(data, size) == list(range(17))
    rest = Cursor(samples=6)
    assert together(data, size, rest) == list(range(6, 17))
    sharded = Sharded(data, rank=0, size=size)
    assert sharded.uneven
    assert [piece.weight for piece in sharded][:2] == [1.0, 1.0]
    assert sharded.cursor.epoch == 1
    with pytest.raises(TypeError):
        len(sharded)


def test_a_short_batch_of_a_stream_is_dropped_by_all_or_none() -> None:
    data: DataLoader[Any] = DataLoader(Sized(17), batch_size=2, drop_last=True)
    assert [read(data, rank, 3) for rank in range(3)] == [[[rank, rank + 3], [rank + 6, rank + 9]] for rank in range(3)]
    sharded = Sharded(data, rank=0, size=3)
    assert not sharded.uneven
    assert len(sharded) == 2


def test_a_stream_of_ready_batches() -> None:
    data: DataLoader[Any] = DataLoader(Counting(5), batch_size=None)
    assert [int(piece.batch) for piece in Sharded(data, rank=1, size=2)] == [1, 3]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_random_stream_is_the_same_on_every_rank_and_resumed(processes: int) -> None:
    data: DataLoader[Any] = DataLoader(Restless(20), batch_size=2, num_workers=processes)
    torch.manual_seed(1)
    alone = together(data, 1)
    assert sorted(alone) == list(range(20))
    torch.manual_seed(2)
    assert together(data, 3) == alone
    assert together(data, 2, Cursor(samples=8)) == alone[8:]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_streams_of_several_processes_resume_with_the_right_one(size: int, steps: int) -> None:
    data: DataLoader[Any] = DataLoader(Counting(60), batch_size=2, num_workers=2)
    for rank in range(size):
        whole = read(data, rank, size)
        sharded = Sharded(data, rank=rank, size=size)
        for _, _piece in zip(range(steps), sharded, strict=False):
            pass
        assert sharded.cursor.samples == 2 * size * steps
        assert read(data, rank, size, resumed(sharded.cursor)) == whole[steps:]


def test_streams_resume_on_another_number_of_ranks() -> None:
    data: DataLoader[Any] = DataLoader(Counting(60), batch_size=2, num_workers=2)
    seen: list[int] = []
    for rank in range(3):
        sharded = Sharded(data, rank=rank, size=3)
        for _, piece in zip(range(3), sharded, strict=False):
            seen += flat(piece.batch)
    for rank in range(2):
        seen += joined(read(data, rank, 2, resumed(sharded.cursor)))
    assert sorted(seen) == list(range(60))
    with pytest.raises(IncompatibleError, match=r"2 loader processes read, and now num_workers=0"):
        read(DataLoader(Counting(60), batch_size=2), cursor=resumed(sharded.cursor))


@pytest.mark.parametrize("sized", [True, False])
def test_ready_batches(sized: bool) -> None:
    class Fresh:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([number] for number in range(7))

    data: Any = [[number] for number in range(7)] if sized else Fresh()
    shares = [list(Sharded(data, rank=rank, size=3)) for rank in range(3)]
    assert [[piece.batch[0] for piece in share] for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [piece.total for piece in shares[0]] == [3.0, 3.0, 1.0]
    assert [piece.last for piece in shares[1]] == [False, sized]
    sharded = Sharded(data, rank=1, size=3)
    assert sharded.uneven
    assert sharded.steps == (3 if sized else None)
    assert together(data, 2, Cursor(samples=3)) == [3, 4, 5, 6]
    assert [len(list(Sharded(data, rank=rank, size=3, drop_last=True))) for rank in range(3)] == [2, 2, 2]
    assert not Sharded(data, rank=1, size=3, drop_last=True).uneven


def test_an_iterator_cannot_go_back() -> None:
    sharded = Sharded(iter(range(6)), rank=0, size=2)
    assert next(iter(sharded)).batch == 0
    assert [piece.batch for piece in sharded] == [2, 4]
    with pytest.raises(IncompatibleError, match=r"epoch 1 has no data for rank 0: an iterator"):
        list(sharded)


def test_a_loader_that_iterates_in_its_own_way_keeps_it() -> None:
    class Doubling(DataLoader[int]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    assert read(Doubling(Numbers(8), batch_size=2), 1, 2) == [[4, 6], [12, 14]]


def everything(processes: int) -> list[Any]:
    class Drawing:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.rand(2) for _ in range(4))

    settings: dict[str, Any] = {"batch_size": 2, "num_workers": processes}
    found = [
        DataLoader(Numbers(12), shuffle=True, **settings),
        DataLoader(Numbers(12), sampler=Mixed(5), **settings),
        DataLoader(Numbers(12), batch_sampler=Buckets(4), num_workers=processes),
        DataLoader(Restless(9), **settings),
    ]
    return [*found, Drawing()]


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("number", range(5))
def test_reading_leaves_the_global_generators_alone(processes: int, number: int) -> None:
    before = states()
    sharded = Sharded(everything(processes)[number], rank=1, size=2)
    for _ in sharded:
        assert states() == before
    assert states() == before


def noise(data: DataLoader[Any], rank: int = 0, size: int = 1, cursor: Cursor | None = None) -> list[Any]:
    return [[each.tolist() for each in piece.batch] for piece in Sharded(data, rank=rank, size=size, cursor=cursor)]


@pytest.mark.parametrize("persistent", [False, True])
def test_what_loader_processes_draw_is_the_same_when_resumed(persistent: bool) -> None:
    data: DataLoader[Any] = DataLoader(
        Noisy(18), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent
    )
    sharded = Sharded(data, rank=0, size=1)
    epochs = [[[each.tolist() for each in piece.batch] for piece in sharded] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert noise(data, cursor=Cursor(epoch=1, samples=6)) == epochs[1][3:]
    draws = [value for batch in epochs[0] for value in batch[1]]
    assert len(set(draws)) == 18
    first, second = ([value for batch in noise(data, rank, 2) for value in batch[1]] for rank in (0, 1))
    assert not set(first) & set(second)


def remember(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Told
    info.dataset.told = number


class Told(Numbers):
    told = -1

    def __getitem__(self, index: int) -> int:
        return self.told


def test_the_users_init_function_sees_the_users_dataset() -> None:
    data: DataLoader[Any] = DataLoader(Told(8), batch_size=2, num_workers=2, worker_init_fn=remember)
    assert read(data) == [[0, 0], [1, 1], [0, 0], [1, 1]]


class Named(Numbers):
    """Sample i is the process that read it."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_persistent_processes_live_on_from_epoch_to_epoch() -> None:
    data: DataLoader[Any] = DataLoader(Named(8), batch_size=2, num_workers=2, persistent_workers=True)
    sharded = Sharded(data, rank=0, size=2)
    epochs = [{name for piece in sharded for name in flat(piece.batch)} for _ in range(2)]
    assert len(epochs[0]) == 2
    assert epochs[0] == epochs[1]


def test_processes_that_live_on_serve_one_loop_at_a_time() -> None:
    data: DataLoader[Any] = DataLoader(Numbers(8), batch_size=2, num_workers=1, persistent_workers=True)
    sharded = Sharded(data, rank=0, size=1)
    held = iter(sharded)
    assert flat(next(held).batch) == [0, 1]
    assert [flat(piece.batch) for piece in sharded] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    second = iter(sharded)
    assert flat(next(second).batch) == [0, 1]
    with pytest.raises(IncompatibleError, match="persistent_workers"):
        next(held)
