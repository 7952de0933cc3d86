"""Bad input, in Horovod's vocabulary: who is told, and what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import syncline as sl
import syncline.compat.horovod.torch as hvd
from syncline.compat.horovod.errors import NotInitializedError
from syncline.errors import SynclineError

ONES = torch.ones(6, 2)
"""Not changed by anything here: all who are asked refuse."""


def rows_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, *shape[1:]), shape, check_invariants=True)


OPERATIONS: dict[str, Callable[..., object]] = {
    "allreduce": hvd.allreduce,
    "allreduce_": hvd.allreduce_,
    "allreduce_async": hvd.allreduce_async,
    "allreduce_async_": hvd.allreduce_async_,
    "grouped_allreduce": lambda x, **told: hvd.grouped_allreduce([x], **told),
    "grouped_allreduce_": lambda x, **told: hvd.grouped_allreduce_([x], **told),
    "grouped_allreduce_async": lambda x, **told: hvd.grouped_allreduce_async([x], **told),
    "grouped_allreduce_async_": lambda x, **told: hvd.grouped_allreduce_async_([x], **told),
    "allgather": hvd.allgather,
    "allgather_async": hvd.allgather_async,
    "grouped_allgather": lambda x, **told: hvd.grouped_allgather([x], **told),
    "grouped_allgather_async": lambda x, **told: hvd.grouped_allgather_async([x], **told),
    "broadcast": lambda x, **told: hvd.broadcast(x, 1, **told),
    "broadcast_": lambda x, **told: hvd.broadcast_(x, 1, **told),
    "broadcast_async": lambda x, **told: hvd.broadcast_async(x, 1, **told),
    "broadcast_async_": lambda x, **told: hvd.broadcast_async_(x, 1, **told),
    "alltoall": hvd.alltoall,
    "alltoall_async": hvd.alltoall_async,
    "reducescatter": hvd.reducescatter,
    "reducescatter_async": hvd.reducescatter_async,
    "grouped_reducescatter": lambda x, **told: hvd.grouped_reducescatter([x], **told),
    "grouped_reducescatter_async": lambda x, **told: hvd.grouped_reducescatter_async([x], **told),
}
REDUCING = [name for name in OPERATIONS if "reduce" in name]
OTHERS: dict[str, Callable[[], object]] = {
    "sparse_allreduce_async": lambda: hvd.sparse_allreduce_async(rows_of((6, 2)), "table", hvd.Sum),
    "join": hvd.join,
    "barrier": hvd.barrier,
    "poll": lambda: hvd.poll(0),
    "synchronize": lambda: hvd.synchronize(0),
    "rank": hvd.rank,
    "size": hvd.size,
    "local_rank": hvd.local_rank,
    "local_size": hvd.local_size,
    "cross_rank": hvd.cross_rank,
    "cross_size": hvd.cross_size,
    "is_homogeneous": hvd.is_homogeneous,
    "mpi_enabled": hvd.mpi_enabled,
    "gloo_enabled": hvd.gloo_enabled,
    "start_timeline": lambda: hvd.start_timeline("nowhere.json"),
    "stop_timeline": hvd.stop_timeline,
    "add_process_set": lambda: hvd.add_process_set([0]),
    "remove_process_set": lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
    "ProcessSet.size": hvd.ProcessSet([0]).size,
    "ProcessSet.rank": hvd.ProcessSet([0]).rank,
    "ProcessSet.included": hvd.ProcessSet([0]).included,
    "global_process_set.size": hvd.global_process_set.size,
    "global_process_set.rank": hvd.global_process_set.rank,
    "global_process_set.included": hvd.global_process_set.included,
}
CALLS: dict[str, Callable[[], object]] = {
    **{name: (lambda call=call: call(ONES)) for name, call in OPERATIONS.items()},  # type: ignore[misc]
    **OTHERS,
}


def refusals(ranks: int, call: Callable[[int], object], kind: type[Exception] = ValueError) -> Sequence[str]:
    """What each rank is told when it calls; after it all goes on as if nothing had been."""

    def told(world: sl.World) -> str:
        hvd.init()
        with pytest.raises(kind) as caught:
            call(world.rank)
        assert isinstance(caught.value, SynclineError)
        assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item() == ranks
        hvd.shutdown()
        return str(caught.value)

    return sl.simulate(told, ranks=ranks).results


# Too early, too late.


def _not_now() -> None:
    for call in CALLS.values():
        with pytest.raises(NotInitializedError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."):
            call()


def test_before_init_and_after_shutdown() -> None:
    def case(world: sl.World) -> None:
        assert not hvd.is_initialized()
        _not_now()
        for _ in range(2):
            hvd.init()
            hvd.init()  # a second call does nothing
            assert hvd.is_initialized()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size
            hvd.shutdown()
            hvd.shutdown()
            assert not hvd.is_initialized()
            _not_now()

    sl.simulate(case, ranks=2)


def test_a_handle_of_before_shutdown() -> None:
    def case(world: sl.World) -> None:
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1))
        hvd.barrier()
        hvd.shutdown()
        for call in (hvd.synchronize, hvd.poll):
            with pytest.raises(NotInitializedError):
                call(handle)

    sl.simulate(case, ranks=2)


@pytest.mark.parametrize("leaver", [0, 1])
def test_others_have_shut_down(leaver: int) -> None:
    """Who still waits is told who has left."""

    def case(world: sl.World) -> str:
        hvd.init()
        if world.rank == leaver:
            hvd.shutdown()
            return ""
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="alone")
        return str(caught.value)

    for rank, words in enumerate(sl.simulate(case, ranks=3).results):
        if rank != leaver:
            assert "shut down" in words
            assert f"rank {leaver}" in words


# Sets, roots and splits.


@pytest.mark.parametrize("name", [*OPERATIONS, "barrier", "sparse_allreduce_async", "rank"])
def test_on_a_set_that_does_not_hold_this_rank(name: str) -> None:
    calls: dict[str, Callable[[hvd.ProcessSet], object]] = {
        "barrier": hvd.barrier,
        "sparse_allreduce_async": lambda apart: hvd.sparse_allreduce_async(rows_of((6, 2)), "t", hvd.Sum, apart),
        "rank": hvd.ProcessSet.rank,
    }

    def case(world: sl.World) -> None:
        hvd.init()
        apart = hvd.add_process_set([1, 2])
        if world.rank == 0:
            with pytest.raises(ValueError, match=r"rank 0 is not a member of the process set \[1, 2\]"):
                calls[name](apart) if name in calls else OPERATIONS[name](ONES.clone(), process_set=apart)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
        hvd.shutdown()

    sl.simulate(case, ranks=3)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "broadcast" in name])
def test_a_root_that_is_not_there(name: str) -> None:
    call: Callable[..., object] = getattr(hvd, name)
    for root in (-1, 3):
        for words in refusals(3, lambda rank, root=root: call(ONES, root)):  # type: ignore[misc]
            assert f"root_rank={root} is not among the ranks [0, 1, 2]" in words

    def on_a_set(rank: int) -> None:
        apart = hvd.add_process_set([0, 2])
        call(ONES, 1, process_set=apart)

    for words in refusals(3, on_a_set):
        assert "root_rank=1 is not among the ranks [0, 2]" in words


@pytest.mark.parametrize("call", [hvd.alltoall, hvd.alltoall_async])
@pytest.mark.parametrize(
    ("rows", "splits", "told"),
    [
        (5, None, "5 rows do not divide among 2 ranks"),
        (5, [2, 2], "add up to 5 rows"),
        (5, [6, -1], "none negative"),
        (5, [5], "must be 2 numbers"),
        (5, [2, 2, 1], "must be 2 numbers"),
        (5, torch.tensor([1, 3]), "[1, 3]"),
        (None, None, "a first dimension"),
        (None, [1, 0], "a first dimension"),
    ],
)
def test_wrong_splits(call: Callable[..., object], rows: int | None, splits: Any, told: str) -> None:
    own = torch.ones(()) if rows is None else torch.ones(rows)
    for words in refusals(2, lambda rank: call(own, splits)):
        assert told in words


# Tensors and words that an operation does not take.


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16])
def test_a_dtype_that_horovod_lacks(name: str, dtype: torch.dtype) -> None:
    for words in refusals(2, lambda rank: OPERATIONS[name](torch.zeros(6, 2, dtype=dtype))):
        assert str(dtype) in words
        assert "not supported" in words


@pytest.mark.parametrize("name", REDUCING)
def test_bool_where_numbers_are_needed(name: str) -> None:
    for words in refusals(2, lambda rank: OPERATIONS[name](torch.ones(6, 2, dtype=torch.bool))):
        assert "bool" in words


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_sparse_tensor(name: str) -> None:
    for words in refusals(2, lambda rank: OPERATIONS[name](rows_of((6, 2)))):
        assert "torch.sparse_coo" in words
        assert "sparse_allreduce_async" in words


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_no_tensor(name: str) -> None:
    for words in refusals(2, lambda rank: OPERATIONS[name]([1.0, 2.0])):
        assert "not list" in words


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name.startswith("grouped")])
def test_a_group_without_tensors(name: str) -> None:
    strange: list[Any] = [[], None, ONES]
    for given in strange:
        for words in refusals(2, lambda rank, given=given: getattr(hvd, name)(given)):  # type: ignore[misc]
            assert "a list of tensors, at least one" in words


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "allreduce" in name])
def test_average_and_op_together(name: str) -> None:
    for words in refusals(2, lambda rank: OPERATIONS[name](ONES, average=True, op=hvd.Sum)):
        assert "average=True" in words
        assert "op=1" in words or "Sum" in words


@pytest.mark.parametrize("name", REDUCING)
def test_an_op_that_is_none(name: str) -> None:
    for words in refusals(2, lambda rank: OPERATIONS[name](ONES, op=17)):
        assert "op=17" in words
        assert "hvd.Average" in words


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "reducescatter" in name])
def test_reducescatter_only_adds(name: str) -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        for words in refusals(2, lambda rank, op=op: OPERATIONS[name](ONES, op=op)):  # type: ignore[misc]
            assert "averages or sums" in words
    for words in refusals(2, lambda rank: OPERATIONS[name](torch.ones(()))):
        assert "a first dimension" in words


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "allreduce" in name])
def test_adasum_needs_pairs_and_fractions(name: str) -> None:
    for words in refusals(3, lambda rank: OPERATIONS[name](ONES, op=hvd.Adasum)):
        assert "a power of two of them, not 3" in words
    for words in refusals(2, lambda rank: OPERATIONS[name](torch.ones(2, dtype=torch.int32), op=hvd.Adasum)):
        assert "floating-point" in words


def test_sparse_sums_of_what_is_not() -> None:
    for words in refusals(2, lambda rank: hvd.sparse_allreduce_async(ONES, "t", hvd.Sum)):
        assert "a sparse COO tensor" in words
    for words in refusals(2, lambda rank: hvd.sparse_allreduce_async(rows_of((6, 2)), "t", hvd.Max)):
        assert "not combined by Max" in words


# Handles and names.


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "async" in name])
def test_a_handle_is_waited_for_once(name: str) -> None:
    def case(world: sl.World) -> None:
        hvd.init()
        handle: Any = OPERATIONS[name](ONES.clone())
        hvd.synchronize(handle)
        for call in (hvd.synchronize, hvd.poll):
            with pytest.raises(ValueError, match=f"Handle {handle} was not created or has been cleared"):
                call(handle)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        hvd.shutdown()

    sl.simulate(case, ranks=2)


@pytest.mark.parametrize("handle", [-1, 12345, None, "x"])
def test_a_handle_that_is_none(handle: Any) -> None:
    def case(world: sl.World) -> None:
        hvd.init()
        for call in (hvd.synchronize, hvd.poll):
            with pytest.raises(ValueError, match="was not created or has been cleared"):
                call(handle)

    sl.simulate(case, ranks=1)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "async" in name])
def test_a_name_that_is_in_flight(name: str) -> None:
    """The second is refused, the first goes on; once it has ended the name is free."""

    def case(world: sl.World) -> None:
        hvd.init()
        call = OPERATIONS[name]
        if world.rank == 0:  # the other does not ask yet, so it stays in flight
            handle: Any = call(ONES.clone(), name="twice")
            with pytest.raises(hvd.HorovodInternalError, match="Duplicate tensor name twice") as caught:
                call(ONES.clone(), name="twice")
            assert "in flight" in str(caught.value)
            hvd.barrier()
        else:
            hvd.barrier()
            handle = call(ONES.clone(), name="twice")
        hvd.synchronize(handle)
        again: Any = call(ONES.clone(), name="twice")
        hvd.synchronize(again)
        hvd.shutdown()

    sl.simulate(case, ranks=2)
