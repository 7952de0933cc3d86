"""Bad input, in Horovod's vocabulary: who is told, and what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
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
ALLREDUCES = [name for name in OPERATIONS if "allreduce" in name]
SCATTERS = [name for name in OPERATIONS if "reducescatter" in name]
ASYNCHRONOUS = {name: call for name, call in OPERATIONS.items() if "async" in name}
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
    "start_timeline": lambda: hvd.start_timeline("nowhere.json"),
    "stop_timeline": hvd.stop_timeline,
    "add_process_set": lambda: hvd.add_process_set([0]),
    "ProcessSet.included": hvd.ProcessSet([0]).included,
    "global_process_set.size": hvd.global_process_set.size,
    "global_process_set.rank": hvd.global_process_set.rank,
    "global_process_set.included": hvd.global_process_set.included,
}
CALLS: dict[str, Callable[[], object]] = {
    **{name: (lambda call=call: call(ONES)) for name, call in OPERATIONS.items()},  # type: ignore[misc]
    **OTHERS,
}


def each_refused(
    ranks: int, calls: Mapping[str, Callable[[], object]], *words: str, kind: type[Exception] = ValueError
) -> None:
    """Every one of the calls is refused on every rank in these words; after it all goes on as if nothing had been."""

    def case(world: sl.World) -> None:
        hvd.init()
        for name, call in calls.items():
            with pytest.raises(kind) as caught:
                call()
            assert isinstance(caught.value, SynclineError)
            assert all(word in str(caught.value) for word in words), f"{name}: {caught.value}"
            assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item() == ranks, name
        hvd.shutdown()

    sl.simulate(case, ranks=ranks)


def of_each(names: Iterable[str], *arguments: Any, **told: Any) -> dict[str, Callable[[], object]]:
    """A call of each of the operations."""
    return {name: partial(OPERATIONS[name], *arguments, **told) for name in names}


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
            assert f"Horovod has been shut down on rank {leaver}" in words


# Sets, roots and splits.


def test_on_a_set_that_does_not_hold_this_rank() -> None:
    calls: dict[str, Callable[[hvd.ProcessSet], object]] = {
        **{name: lambda apart, name=name: OPERATIONS[name](ONES, process_set=apart) for name in OPERATIONS},  # type: ignore[misc]
        "barrier": hvd.barrier,
        "sparse_allreduce_async": lambda apart: hvd.sparse_allreduce_async(rows_of((6, 2)), "t", hvd.Sum, apart),
        "rank": hvd.ProcessSet.rank,
    }

    def case(world: sl.World) -> None:
        hvd.init()
        apart = hvd.add_process_set([1, 2])
        for call in calls.values() if world.rank == 0 else ():
            with pytest.raises(ValueError, match=r"rank 0 is not a member of the process set \[1, 2\]"):
                call(apart)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
        hvd.shutdown()

    sl.simulate(case, ranks=3)


BROADCASTS: list[Callable[..., object]] = [hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_]


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_is_not_there(root: int) -> None:
    calls = {call.__name__: partial(call, ONES, root) for call in BROADCASTS}
    each_refused(3, calls, f"root_rank={root} is not among the ranks [0, 1, 2]")


def test_a_root_that_is_not_in_the_set() -> None:
    def case(world: sl.World) -> None:
        hvd.init()
        apart = hvd.add_process_set([0, 2])
        for call in BROADCASTS if apart.included() else ():
            with pytest.raises(ValueError, match=r"root_rank=1 is not among the ranks \[0, 2\]"):
                call(ONES, 1, process_set=apart)

    sl.simulate(case, ranks=3)


@pytest.mark.parametrize(
    ("rows", "splits", "told"),
    [
        (5, None, "5 rows do not divide among 2 ranks"),
        (5, [4, 2], "add up to at most 5 rows"),
        (5, [6, -1], "none negative"),
        (5, [5], "must be 2 numbers"),
        (5, [2, 2, 1], "must be 2 numbers"),
        (5, torch.tensor([3, 3]), "[3, 3]"),
        (None, None, "a first dimension"),
        (None, [1, 0], "a first dimension"),
    ],
)
def test_wrong_splits(rows: int | None, splits: Any, told: str) -> None:
    own = torch.ones(()) if rows is None else torch.ones(rows)
    each_refused(2, of_each(["alltoall", "alltoall_async"], own, splits), told)


# Tensors and words that an operation does not take.


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16])
def test_a_dtype_that_horovod_lacks(dtype: torch.dtype) -> None:
    each_refused(2, of_each(OPERATIONS, torch.zeros(6, 2, dtype=dtype)), str(dtype), "not supported")


def test_bool_where_numbers_are_needed() -> None:
    each_refused(2, of_each(REDUCING, torch.ones(6, 2, dtype=torch.bool)), "bool")


def test_a_sparse_tensor() -> None:
    each_refused(2, of_each(OPERATIONS, rows_of((6, 2))), "torch.sparse_coo", "sparse_allreduce_async")


def test_what_is_no_tensor() -> None:
    each_refused(2, of_each(OPERATIONS, [1.0, 2.0]), "not list")


@pytest.mark.parametrize("given", [[], None, ONES], ids=["empty", "none", "a tensor"])
def test_a_group_without_tensors(given: Any) -> None:
    grouped = [name for name in OPERATIONS if name.startswith("grouped")]
    calls = {name: partial(getattr(hvd, name), given) for name in grouped}
    each_refused(2, calls, "a list of tensors, at least one")


def test_average_and_op_together() -> None:
    each_refused(2, of_each(ALLREDUCES, ONES, average=True, op=hvd.Sum), "average=True", "op=")


def test_an_op_that_is_none() -> None:
    each_refused(2, of_each(REDUCING, ONES, op=17), "op=17", "hvd.Average")


def test_reducescatter_only_adds() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        each_refused(2, of_each(SCATTERS, ONES, op=op), "averages or sums", op.name, kind=hvd.HorovodInternalError)
    each_refused(2, of_each(SCATTERS, torch.ones(())), "a first dimension")


def test_adasum_needs_pairs_and_fractions() -> None:
    each_refused(3, of_each(ALLREDUCES, ONES, op=hvd.Adasum), "a power of two of them, not 3")
    each_refused(2, of_each(ALLREDUCES, torch.ones(2, dtype=torch.int32), op=hvd.Adasum), "floating-point")


def test_sparse_sums_of_what_is_not() -> None:
    each_refused(2, {"": lambda: hvd.sparse_allreduce_async(ONES, "t", hvd.Sum)}, "a sparse COO tensor")
    each_refused(2, {"": lambda: hvd.sparse_allreduce_async(rows_of((6, 2)), "t", hvd.Max)}, "not combined by Max")


# Handles and names.


def test_a_handle_is_waited_for_once() -> None:
    """Afterwards it stands for nothing, as in Horovod: a second wait gives None, a poll is refused."""

    def case(world: sl.World) -> None:
        hvd.init()
        for call in ASYNCHRONOUS.values():
            handle: Any = call(ONES.clone())
            assert hvd.synchronize(handle) is not None
            assert hvd.synchronize(handle) is None
            with pytest.raises(ValueError, match=f"Handle {handle} was not created or has been cleared"):
                hvd.poll(handle)
        hvd.shutdown()

    sl.simulate(case, ranks=2)


@pytest.mark.parametrize("handle", [-1, 12345, None, "x"])
def test_a_handle_that_is_none(handle: Any) -> None:
    def case(world: sl.World) -> None:
        hvd.init()
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            hvd.poll(handle)

    sl.simulate(case, ranks=1)


def test_a_name_that_is_in_flight() -> None:
    """The second is refused, the first goes on; once it has ended the name is free."""

    def case(world: sl.World) -> None:
        hvd.init()
        for call in ASYNCHRONOUS.values():
            if world.rank == 0:  # the other does not ask yet, so it stays in flight
                handle: Any = call(ONES.clone(), name="twice")
                with pytest.raises(ValueError, match=r"Duplicate tensor name twice.*in flight"):
                    call(ONES.clone(), name="twice")
                hvd.barrier()
            else:
                hvd.barrier()
                handle = call(ONES.clone(), name="twice")
            hvd.synchronize(handle)
            again: Any = call(ONES.clone(), name="twice")
            hvd.synchronize(again)
        hvd.shutdown()

    sl.simulate(case, ranks=2)
