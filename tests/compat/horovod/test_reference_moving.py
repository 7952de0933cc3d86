"""What only moves tensors, against NumPy: allgather, broadcast and alltoall, of every dtype and shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import syncline.compat.horovod.torch as hvd
from syncline.testing import Pool
from tests.compat.horovod.reference import (
    MOVABLE,
    SHAPES,
    Array,
    draw,
    gathered,
    numbers,
    run_all,
    same,
    simulated,
    tensor,
    traded,
)
from tests.strategies.cases import on_gloo

TAILS: tuple[tuple[int, ...], ...] = ((), (3,), (2, 2), (0,))


def uneven(members: hvd.ProcessSet, tail: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Array]:
    """As many rows as the member's place: the first has none."""
    return [draw((place, *tail), dtype, seed, place) for place in range(members.size())]


def joined_rows(members: hvd.ProcessSet) -> None:
    """allgather and allgather_async: single numbers, nothing at all, the same and different numbers of rows."""
    for dtype in MOVABLE:
        drawn = [numbers(members, shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
        drawn += [uneven(members, tail, dtype, seed) for seed, tail in enumerate(TAILS)]
        own = [tensor(arrays[members.rank()], dtype) for arrays in drawn]
        handles = [hvd.allgather_async(each, process_set=members) for each in own]
        for handle, arrays in zip(handles, drawn, strict=True):
            same(hvd.synchronize(handle), gathered(arrays), dtype, "allgather_async")
        for each, arrays in zip(own, drawn, strict=True):
            same(hvd.allgather(each, process_set=members), gathered(arrays), dtype, "allgather")
            same(each, arrays[members.rank()], dtype, "what allgather was given")


def joined_groups(members: hvd.ProcessSet) -> None:
    """grouped_allgather(_async): each tensor of a group has rows of its own."""
    for dtype in MOVABLE:
        drawn = [numbers(members, shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
        drawn += [uneven(members, tail, dtype, seed) for seed, tail in enumerate(TAILS)]
        own = [tensor(arrays[members.rank()], dtype) for arrays in drawn]
        waited = hvd.grouped_allgather(own, process_set=members)
        for found in (waited, hvd.synchronize(hvd.grouped_allgather_async(own, process_set=members))):
            for result, arrays in zip(found, drawn, strict=True):
                same(result, gathered(arrays), dtype)


def joined_groups_of_many_dtypes(members: hvd.ProcessSet) -> None:
    drawn = [(uneven(members, (2,), dtype), dtype) for dtype in MOVABLE]
    own = [tensor(arrays[members.rank()], dtype) for arrays, dtype in drawn]
    for result, (arrays, dtype) in zip(hvd.grouped_allgather(own, process_set=members), drawn, strict=True):
        same(result, gathered(arrays), dtype)


def joined_by_name(members: hvd.ProcessSet) -> None:
    """Other numbers of rows under the same name, time after time."""
    for turn in range(4):
        rows = [(place * turn) % 3 + 1 for place in range(members.size())]
        arrays = [draw((count, 2), torch.float32, turn, place) for place, count in enumerate(rows)]
        own = tensor(arrays[members.rank()], torch.float32)
        same(hvd.allgather(own, name="rows", process_set=members), gathered(arrays), torch.float32, turn)


def from_each_root(members: hvd.ProcessSet) -> None:
    """The four forms of broadcast; a root is named by its rank among all."""
    for place, root in enumerate(members.ranks or ()):
        for dtype in MOVABLE:
            waiting = []
            for seed, shape in enumerate(SHAPES):
                arrays = numbers(members, shape, dtype, seed)
                mine = arrays[members.rank()]
                kept, taken = tensor(mine, dtype), tensor(mine, dtype)
                waiting.append(
                    (
                        hvd.broadcast_async(kept, root, process_set=members),
                        hvd.broadcast_async_(taken, root, process_set=members),
                        (kept, taken, mine, arrays[place]),
                    )
                )
            for apart, within, (kept, taken, mine, wanted) in waiting:
                same(hvd.synchronize(apart), wanted, dtype, "broadcast_async")
                same(kept, mine, dtype, "what broadcast_async was given")
                assert hvd.synchronize(within) is taken
                same(taken, wanted, dtype, "broadcast_async_")


def from_each_root_at_once(members: hvd.ProcessSet) -> None:
    for place, root in enumerate(members.ranks or ()):
        for dtype in MOVABLE:
            arrays = numbers(members, (2, 3), dtype)
            own = tensor(arrays[members.rank()], dtype)
            same(hvd.broadcast(own, root, process_set=members), arrays[place], dtype, "broadcast")
            same(own, arrays[members.rank()], dtype, "what broadcast was given")
            assert hvd.broadcast_(own, root, process_set=members) is own
            same(own, arrays[place], dtype, "broadcast_")


def rows_for_each(members: hvd.ProcessSet) -> None:
    """alltoall in equal parts: without splits; those that are received come with a handle alone."""
    size = members.size()
    for dtype in MOVABLE:
        for seed, tail in enumerate(TAILS):
            for each in (0, 2):
                arrays = numbers(members, (each * size, *tail), dtype, seed)
                own = tensor(arrays[members.rank()], dtype)
                wanted = traded(arrays, [[each] * size] * size)[members.rank()]
                same(hvd.alltoall(own, process_set=members), wanted, dtype, "alltoall")
                handle = hvd.alltoall_async(own, process_set=members)
                rows, received = hvd.synchronize(handle)
                same(rows, wanted, dtype, "alltoall_async")
                assert received.tolist() == [each] * size
                same(own, arrays[members.rank()], dtype, "what alltoall was given")


def uneven_rows_for_each(members: hvd.ProcessSet) -> None:
    """alltoall with splits: a list or a tensor; what came from whom is told."""
    size, rank = members.size(), members.rank()
    splits = [[(source + 2 * to) % 3 for to in range(size)] for source in range(size)]
    came = np.array([split[rank] for split in splits], dtype=np.int32)
    forms: list[Callable[[list[int]], Any]] = [
        list,
        lambda split: torch.tensor(split, dtype=torch.int32),
        lambda split: torch.tensor(split),
    ]
    for dtype in MOVABLE:
        for seed, tail in enumerate(TAILS):
            arrays = [draw((sum(split), *tail), dtype, seed, place) for place, split in enumerate(splits)]
            own = tensor(arrays[rank], dtype)
            wanted = traded(arrays, splits)[rank]
            given = forms[seed % len(forms)](splits[rank])
            handle = hvd.alltoall_async(own, splits=given, process_set=members)
            for output, received in (hvd.alltoall(own, given, process_set=members), hvd.synchronize(handle)):
                same(output, wanted, dtype, splits)
                told = given.dtype if isinstance(given, torch.Tensor) else torch.int32
                same(received, came.astype(np.int64 if told == torch.int64 else np.int32), told, splits)


def all_to_one(members: hvd.ProcessSet) -> None:
    """Every row goes to the last member; the others receive nothing."""
    size, rank = members.size(), members.rank()
    splits = [[0] * (size - 1) + [place + 1] for place in range(size)]
    arrays = [draw((place + 1, 2), torch.float64, 0, place) for place in range(size)]
    output, received = hvd.alltoall(tensor(arrays[rank], torch.float64), splits[rank], process_set=members)
    same(output, traded(arrays, splits)[rank], torch.float64)
    assert received.tolist() == [split[rank] for split in splits]


def not_contiguous(members: hvd.ProcessSet) -> None:
    """Transposed tensors move like any other; a broadcast in place leaves the gaps."""
    size, rank = members.size(), members.rank()
    root = (members.ranks or [])[-1]
    for dtype in MOVABLE:
        arrays = numbers(members, (3, 2 * size), dtype)
        turned = [array.T for array in arrays]
        own = tensor(arrays[rank], dtype).T
        assert not own.is_contiguous()
        same(hvd.allgather(own, process_set=members), gathered(turned), dtype)
        same(hvd.grouped_allgather([own, own], process_set=members)[1], gathered(turned), dtype)
        same(hvd.alltoall(own, process_set=members), traded(turned, [[2] * size] * size)[rank], dtype)
        same(hvd.broadcast(own, root, process_set=members), turned[-1], dtype)
        whole = tensor(arrays[rank], dtype)
        hvd.broadcast_(whole[:, ::2], root, process_set=members)
        wanted = arrays[rank].copy()
        wanted[:, ::2] = arrays[-1][:, ::2]
        same(whole, wanted, dtype)


def one_element_of_many(members: hvd.ProcessSet) -> None:
    """It is contiguous for torch, with a stride that is not 1."""
    size, rank = members.size(), members.rank()
    root = (members.ranks or [])[-1]
    for dtype in MOVABLE:
        arrays = numbers(members, (6,), dtype)
        ones = [array[::6] for array in arrays]
        whole = tensor(arrays[rank], dtype)
        own = whole[::6]
        assert own.stride() == (6,)
        same(hvd.allgather(own, process_set=members), gathered(ones), dtype)
        splits = [[1] + [0] * (size - 1)] * size
        output, _ = hvd.alltoall(own, splits[rank], process_set=members)
        same(output, traded(ones, splits)[rank], dtype)
        same(hvd.broadcast(own, root, process_set=members), ones[-1], dtype)
        hvd.broadcast_(own, root, process_set=members)
        wanted = arrays[rank].copy()
        wanted[0] = arrays[-1][0]
        same(whole, wanted, dtype)


CASES = (
    one_element_of_many,
    joined_rows,
    joined_groups,
    joined_groups_of_many_dtypes,
    joined_by_name,
    from_each_root,
    from_each_root_at_once,
    rows_for_each,
    uneven_rows_for_each,
    all_to_one,
    not_contiguous,
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_simulated(case: Callable[[hvd.ProcessSet], None], ranks: int) -> None:
    simulated(ranks, case)


@pytest.mark.xdist_group("gloo")
def test_on_real_processes(gloo: Pool) -> None:
    gloo.run(on_gloo, 3, run_all, *CASES)
