"""Sparse sums, ranks that join early, barriers, and handles: what they give, against NumPy where there are numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import syncline.compat.horovod.torch as hvd
from syncline.testing import Pool
from syncline.world import current_world
from tests.compat.horovod.reference import (
    DTYPES,
    REALS,
    Array,
    adasum,
    array_of,
    close,
    dense_sum,
    draw,
    numbers,
    reduced,
    run_all,
    same,
    simulated,
    tensor,
)
from tests.strategies.cases import on_gloo

TABLE = (6, 2)


def rows_of(place: int, dtype: torch.dtype) -> tuple[Array, Array]:
    """As many rows of a table as the member's place, some of them twice, and the numbers there."""
    rows = np.random.default_rng(place).integers(0, TABLE[0], place)
    return rows, draw((place, TABLE[1]), dtype, 5, place)


def sparse(part: tuple[Array, Array], dtype: torch.dtype) -> torch.Tensor:
    rows, values = part
    return torch.sparse_coo_tensor(tensor(rows, torch.int64)[None], tensor(values, dtype), TABLE, check_invariants=True)


def sparse_sums(members: hvd.ProcessSet) -> None:
    """Of rows of a table, as an embedding's gradients are; the first member has none."""
    for dtype in DTYPES:
        parts = [rows_of(place, dtype) for place in range(members.size())]
        own = sparse(parts[members.rank()], dtype)
        result = hvd.sparse_allreduce_async(own, name=f"table.{dtype}", op=hvd.Sum, process_set=members)
        found = result()
        assert found.is_sparse
        same(found.to_dense(), dense_sum(parts, TABLE, dtype), dtype)


def sparse_averages(members: hvd.ProcessSet) -> None:
    """All in flight at once; without a name, and by default."""
    parts = {dtype: [rows_of(place, dtype) for place in range(members.size())] for dtype in REALS}
    results = {
        dtype: hvd.sparse_allreduce_async(sparse(part[members.rank()], dtype), None, None, members)
        for dtype, part in parts.items()
    }
    for dtype, result in results.items():
        close(result().to_dense(), dense_sum(parts[dtype], TABLE, dtype) / members.size(), dtype)


def sparse_single_numbers(members: hvd.ProcessSet) -> None:
    """Sparse in both dimensions, in the same place on every rank."""
    place, value = torch.tensor([[1], [0]]), torch.tensor([members.rank() + 1.0])
    own = torch.sparse_coo_tensor(place, value, TABLE, check_invariants=True)
    found = hvd.sparse_allreduce_async(own, "one", hvd.Sum, members)().to_dense()
    assert found[1, 0] == sum(range(1, members.size() + 1))
    assert found.count_nonzero() == 1


def polled(members: hvd.ProcessSet) -> None:
    """A handle is not done while others have not asked; it is some time after they have, and waits no more then."""
    arrays = numbers(members, (4,), torch.float32)
    own = tensor(arrays[members.rank()], torch.float32)
    if members.rank() == 0:
        handle = hvd.allreduce_async(own, name="polled", op=hvd.Sum, process_set=members)
        assert hvd.poll(handle) is (members.size() == 1)  # the others wait for this rank first
        hvd.barrier(process_set=members)
    else:
        hvd.barrier(process_set=members)
        handle = hvd.allreduce_async(own, name="polled", op=hvd.Sum, process_set=members)
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), reduced(arrays, hvd.Sum, torch.float32), torch.float32)


def waited_for_in_any_order(members: hvd.ProcessSet) -> None:
    """Handles of every kind, waited for backwards on every second rank."""
    size, rank = members.size(), members.rank()
    arrays = numbers(members, (size, 2), torch.int32)
    own = tensor(arrays[rank], torch.int32)
    root = (members.ranks or [])[0]
    handles = {
        "allreduce": hvd.allreduce_async(own, op=hvd.Sum, process_set=members),
        "allgather": hvd.allgather_async(own, process_set=members),
        "broadcast": hvd.broadcast_async(own, root, process_set=members),
        "alltoall": hvd.alltoall_async(own, process_set=members),
        "reducescatter": hvd.reducescatter_async(own, op=hvd.Sum, process_set=members),
    }
    assert len(set(handles.values())) == len(handles)
    assert all(isinstance(handle, int) for handle in handles.values())
    total = reduced(arrays, hvd.Sum, torch.int32)
    wanted = {
        "allreduce": total,
        "allgather": np.concatenate(arrays),
        "broadcast": arrays[0],
        "alltoall": np.stack([array[rank] for array in arrays]),
        "reducescatter": total[rank : rank + 1],
    }
    for kind in list(handles)[:: -1 if rank % 2 else 1]:
        found = hvd.synchronize(handles[kind])
        same(found[0] if kind == "alltoall" else found, wanted[kind], torch.int32, kind)


def waits_for_all(members: hvd.ProcessSet) -> None:
    """Nobody leaves a barrier before the last has come to it: by the clock that all ranks here share."""
    world = current_world()
    if members.rank() == members.size() - 1:
        world.compute(0.05)
    came = world.runtime.now()
    hvd.barrier(process_set=members)
    left = world.runtime.now()
    all_came = hvd.allgather(torch.tensor([came], dtype=torch.float64), process_set=members)
    assert left >= all_came.max().item()


def joins_early(members: hvd.ProcessSet) -> None:
    """Rank r has r + 1 batches. Who has joined gives zeros; averages still divide by all; the last to join is told."""
    size, rank = hvd.size(), hvd.rank()
    for op in (hvd.Sum, hvd.Average, hvd.Adasum):
        if op == hvd.Adasum and size & (size - 1):
            continue
        for turn in range(rank + 1):
            for dtype in REALS if op == hvd.Adasum else DTYPES:
                arrays = numbers(members, (2, 3), dtype, turn)
                for place in range(turn):
                    arrays[place] = np.zeros_like(arrays[place])
                own = tensor(arrays[rank], dtype)
                found = hvd.allreduce(own, name=f"batch.{dtype}", op=op, process_set=members)
                if op == hvd.Adasum:
                    close(found, adasum(arrays, dtype), dtype, turn)
                else:
                    same(found, reduced(arrays, op, dtype), dtype, (op, turn))
        assert hvd.join() == size - 1


def joins_early_with_groups(members: hvd.ProcessSet) -> None:
    """Groups, factors and tensors without elements are summed without those who have joined, too."""
    size, rank = hvd.size(), hvd.rank()
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (5,))
    for turn in range(2 * (rank == size - 1)):
        drawn = [numbers(members, shape, torch.float32, turn) for shape in shapes]
        own = [tensor(arrays[rank], torch.float32) for arrays in drawn]
        found = hvd.grouped_allreduce(own, name="group", prescale_factor=2.0, postscale_factor=0.5)
        for result, arrays in zip(found, drawn, strict=True):
            alone = [np.zeros_like(array) for array in arrays[:-1]] + [arrays[-1]]
            same(result, reduced(alone, hvd.Average, torch.float32, 2.0, 0.5), torch.float32, turn)
    assert hvd.join() == size - 1


def goes_on_after_a_join(members: hvd.ProcessSet) -> None:
    """When all have joined, all may begin again, and every kind works."""
    hvd.join()
    arrays = numbers(members, (2,), torch.float32)
    own = tensor(arrays[hvd.rank()], torch.float32)
    same(hvd.allreduce(own, op=hvd.Max), reduced(arrays, hvd.Max, torch.float32), torch.float32)
    assert np.array_equal(array_of(hvd.allgather(own)), np.concatenate(arrays))
    last = hvd.join(device=-1)
    assert 0 <= last < hvd.size()
    assert hvd.allgather(torch.tensor([last])).tolist() == [last] * hvd.size()


ANYWHERE = (
    sparse_sums,
    sparse_averages,
    sparse_single_numbers,
    polled,
    waited_for_in_any_order,
    waits_for_all,
)
"""On any process set."""
CASES = (*ANYWHERE, joins_early, joins_early_with_groups, goes_on_after_a_join)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_simulated(case: Callable[[hvd.ProcessSet], None], ranks: int) -> None:
    simulated(ranks, case)


@pytest.mark.xdist_group("gloo")
def test_on_real_processes(gloo: Pool) -> None:
    gloo.run(on_gloo, 3, run_all, *CASES)
