"""Process sets: every operation on some of the ranks, sets that are there from the start and sets that come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import syncline as sl
import syncline.compat.horovod.torch as hvd
from syncline.testing import Pool
from tests.compat.horovod import (
    test_reference_allreduce,
    test_reference_gradients,
    test_reference_meeting,
    test_reference_moving,
    test_reference_reducescatter,
)
from tests.compat.horovod.reference import numbers, reduced, same, tensor
from tests.strategies.cases import on_gloo

CASES: tuple[Callable[[hvd.ProcessSet], None], ...] = (
    *test_reference_allreduce.CASES,
    *test_reference_moving.CASES,
    *test_reference_reducescatter.CASES,
    *test_reference_gradients.CASES,
    *test_reference_meeting.ANYWHERE,
)
ONE_OF_EACH: tuple[Callable[[hvd.ProcessSet], None], ...] = (
    test_reference_allreduce.every_dtype_op_and_shape,
    test_reference_moving.joined_groups_of_many_dtypes,
    test_reference_moving.from_each_root_at_once,
    test_reference_moving.all_to_one,
    test_reference_reducescatter.groups_of_many_dtypes,
    test_reference_gradients.of_allgather,
    *test_reference_meeting.ANYWHERE,
)
SETS: dict[int, list[list[int]]] = {
    3: [[0, 2], [1]],
    4: [[3, 1], [1, 2, 3]],
}


def on_members(members: hvd.ProcessSet, cases: Sequence[Callable[[hvd.ProcessSet], None]]) -> None:
    if members.included():
        for case in cases:
            case(members)


def on_static_sets(world: sl.World) -> None:
    """Sets that init names: one of each kind of operation on each of them."""
    _on_static_sets(world, ONE_OF_EACH)


def all_on_static_sets(world: sl.World) -> None:
    """All that there is, on a pair and on a single rank."""
    _on_static_sets(world, CASES)


def _on_static_sets(world: sl.World, cases: Sequence[Callable[[hvd.ProcessSet], None]]) -> None:
    sets = [hvd.ProcessSet(ranks) for ranks in SETS[world.size]]
    hvd.init(process_sets=sets)
    assert [each.process_set_id for each in sets] == list(range(1, len(sets) + 1))  # whoever is in them
    for members in sets:
        on_members(members, cases)
    hvd.shutdown()


def on_dynamic_sets(world: sl.World) -> None:
    """Sets that are added one by one, given up, and added again."""
    hvd.init(process_sets="dynamic")
    for ranks in SETS[world.size]:
        first = hvd.add_process_set(hvd.ProcessSet(ranks))
        if first.included():
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=first).tolist() == [len(ranks)] * 2
        assert hvd.remove_process_set(first)
        assert first.process_set_id is None
        again = hvd.add_process_set(ranks)
        assert again.process_set_id not in (None, 0)
        on_members(again, ONE_OF_EACH)
        hvd.barrier()
        assert hvd.remove_process_set(again)
    assert list(hvd.get_process_set_ids_and_ranks()) == [0]
    hvd.shutdown()


def who_is_in(world: sl.World) -> None:
    """What a set says of itself, on members and on others."""
    hvd.init()
    for ranks in SETS[world.size]:
        members = hvd.add_process_set(ranks)
        assert members.ranks == sorted(ranks)
        assert members.size() == len(ranks)
        assert members.included() is (world.rank in ranks)
        if world.rank in ranks:
            assert members.rank() == sorted(ranks).index(world.rank)
        assert hvd.get_process_set_ids_and_ranks()[members.process_set_id or -1] == sorted(ranks)
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.ranks) == (0, list(range(world.size)))
    assert (everyone.size(), everyone.rank(), everyone.included()) == (world.size, world.rank, True)
    assert not hvd.remove_process_set(everyone)
    hvd.shutdown()


def at_once(world: sl.World) -> None:
    """Overlapping sets and all ranks, the same names in each, in flight together and in any order."""
    hvd.init()
    sets = [hvd.global_process_set, *(hvd.add_process_set(ranks) for ranks in SETS[world.size])]
    mine = [each for each in sets if each.included()]
    for turn in range(3):
        waiting = []
        for members in mine[:: -1 if world.rank % 2 else 1]:
            for dtype in (torch.int16, torch.bfloat16, torch.float32):
                arrays = numbers(members, (3,), dtype, 10 * turn + len(members.ranks or ()))
                own = tensor(arrays[members.rank()], dtype)
                handle = hvd.allreduce_async_(own, name=f"w.{dtype}", op=hvd.Sum, process_set=members)
                waiting.append((handle, reduced(arrays, hvd.Sum, dtype), dtype, members))
        for handle, wanted, dtype, note in waiting:
            same(hvd.synchronize(handle), wanted, dtype, note)
    hvd.shutdown()


RUNS = (on_static_sets, on_dynamic_sets, who_is_in, at_once)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_simulated(run: Callable[[sl.World], None]) -> None:
    sl.simulate(run, ranks=4)


def test_every_case_on_sets() -> None:
    sl.simulate(all_on_static_sets, ranks=3)


def _several(world: sl.World, *runs: Callable[[sl.World], None]) -> None:
    for run in runs:
        run(world)


@pytest.mark.xdist_group("gloo")
def test_on_real_processes(gloo: Pool) -> None:
    gloo.run(on_gloo, 3, _several, *RUNS)


def _words(ranks: int, call: Callable[[], object]) -> Sequence[str]:
    """What each rank is told when it calls."""

    def told(world: sl.World) -> str:
        hvd.init()
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are compared by the caller
            call()
        hvd.barrier()  # all goes on
        hvd.shutdown()
        return str(caught.value)

    return sl.simulate(told, ranks=ranks).results


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([0, 7], "ranks [7] are not among 0 to 2"),
        ([-1], "ranks [-1] are not among 0 to 2"),
        ([], "it is empty"),
        ([1, 1], "each rank once"),
        ([0, 1, 2], "there is a process set of ranks [0, 1, 2] already, with id 0"),
        (["a"], "a list of ranks"),
        (3, "a list of ranks"),
    ],
)
def test_sets_that_cannot_be(ranks: list[int], told: str) -> None:
    for words in _words(3, lambda: hvd.add_process_set(ranks)):
        assert told in words


def test_a_set_that_was_removed() -> None:
    def use() -> None:
        members = hvd.add_process_set([0, 1])
        hvd.remove_process_set(members)
        hvd.allreduce(torch.ones(1), process_set=members)

    for words in _words(2 + 1, use):
        assert "is not usable" in words
        assert "hvd.add_process_set" in words


def test_a_set_that_was_never_added() -> None:
    for words in _words(2, lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))):
        assert "is not usable" in words


def test_ranks_that_add_different_sets() -> None:
    def add(world: sl.World) -> str:
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.add_process_set([0, 1] if world.rank else [0])
        return str(caught.value)

    for words in sl.simulate(add, ranks=3).results:
        assert "ranks: [0] on rank 0, [0, 1] on ranks 1, 2" in words


def test_none_after_init_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    for words in _words(2, lambda: hvd.add_process_set([0])):
        assert "HOROVOD_DYNAMIC_PROCESS_SETS" in words
