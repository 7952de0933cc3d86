"""Checks of the collectives of a world: every dtype, shape and kind of array."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline import world as sl
from syncline.testing.collectives import world_on
from syncline.transports import Transport
from syncline.world import World

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
ALL_DTYPES = (*FLOATS, *INTEGERS, *FLOAT8S, *COMPLEX, torch.bool)


def check_functional(transport: Transport, check: bool = False) -> int:
    """Check the functions of a world for every dtype, shape and kind of array; return the number of comparisons."""
    world = world_on(transport, check)
    counts = [
        _check_reductions(world),
        _check_data_movement(world),
        _check_shapes(world),
        _check_array_kinds(world),
        _check_teams(world),
        _check_async(world),
        _check_messages(world),
    ]
    world.barrier()
    return sum(counts)


def _of(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (7,)) -> Tensor:
    """Small integers, whose sums and products are exact in every dtype."""
    numbers = (torch.arange(torch.Size(shape).numel()) + rank) % 3
    return numbers.reshape(shape).to(dtype)


def _same(found: Tensor, wanted: Tensor, what: str) -> int:
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, not {wanted.dtype}"
    assert found.shape == wanted.shape, f"{what}: {found.shape}, not {wanted.shape}"
    wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
    assert torch.equal(found.to(wide), wanted.to(wide)), f"{what}: {found}, not {wanted}"
    return 1


def _check_reductions(world: World) -> int:
    count = 0
    for dtype in ALL_DTYPES:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        everyone = torch.stack([_of(rank, dtype).to(wide) for rank in range(world.size)])
        wanted = {"sum": everyone.sum(0), "product": everyone.prod(0)}
        if not dtype.is_complex:
            wanted |= {"min": everyone.amin(0), "max": everyone.amax(0)}
        if dtype.is_floating_point and dtype not in FLOAT8S:
            wanted["mean"] = (everyone.sum(0).to(dtype) / world.size).to(wide)
        for op, result in wanted.items():
            for algorithm in ("native", "sharded"):
                found = sl.allreduce(_of(world.rank, dtype), op=op, algorithm=algorithm)  # type: ignore[arg-type]
                count += _same(found, result.to(dtype), f"allreduce {op} of {dtype} by {algorithm}")
    large = torch.tensor([2**64 - 1 - world.rank], dtype=torch.uint64)  # larger than an int64
    assert int(sl.allreduce(large, op="max").numpy()[0]) == 2**64 - 1
    assert int(sl.allreduce(large, op="min").numpy()[0]) == 2**64 - world.size
    return count + 2


def _check_data_movement(world: World) -> int:
    count, size, rank = 0, world.size, world.rank
    for dtype in ALL_DTYPES:
        for algorithm in ("native", "naive"):
            found = sl.broadcast(_of(rank, dtype, (2, 3)), root=size - 1, algorithm=algorithm)
            count += _same(found, _of(size - 1, dtype, (2, 3)), f"broadcast of {dtype} by {algorithm}")
        for algorithm in ("native", "ring"):
            found = sl.allgather(_of(rank, dtype, (rank + 1, 2)), algorithm=algorithm)
            parts = [_of(other, dtype, (other + 1, 2)) for other in range(size)]
            count += _same(found, torch.cat(parts), f"uneven allgather of {dtype} by {algorithm}")
    for algorithm in ("native", "sharded"):
        even = sl.allgather(torch.full((3,), rank), algorithm=algorithm)
        count += _same(even, torch.arange(size).repeat_interleave(3), "even allgather")
        for rows in (size, 2 * size + 1):
            full = torch.arange(2.0 * rows).reshape(rows, 2)
            edges = [rows * part // size for part in range(size + 1)]
            found = sl.reduce_scatter(full + rank, op="sum", algorithm=algorithm)
            wanted = (size * full + sum(range(size)))[edges[rank] : edges[rank + 1]]
            count += _same(found, wanted, f"reduce_scatter of {rows} rows by {algorithm}")
    for algorithm in ("native", "pairwise", "sharded"):
        splits = [to + 1 for to in range(size)]
        outgoing = torch.cat([torch.full((to + 1, 2), 10 * rank + to) for to in range(size)])
        found = sl.alltoall(outgoing, splits=splits, algorithm=algorithm)
        wanted = torch.cat([torch.full((rank + 1, 2), 10 * source + rank) for source in range(size)])
        count += _same(found, wanted, f"alltoall by {algorithm}")
    gathered = sl.gather(torch.full((rank,), rank), root=size // 2)
    if rank == size // 2:
        count += _same(gathered, torch.cat([torch.full((other,), other) for other in range(size)]), "gather")
    else:
        assert gathered is None
    return count


def _check_shapes(world: World) -> int:
    size, rank = world.size, world.rank
    scalar = sl.allreduce(torch.tensor(float(rank)), op="sum")
    count = _same(scalar, torch.tensor(float(sum(range(size)))), "0-dim allreduce")
    count += _same(sl.allgather(torch.tensor(rank)), torch.arange(size), "0-dim allgather")
    for algorithm in ("native", "ring"):
        count += _same(
            sl.allreduce(torch.zeros(0, 3), "mean", algorithm=algorithm), torch.zeros(0, 3), "empty allreduce"
        )
        count += _same(sl.allgather(torch.zeros(0, 3), algorithm=algorithm), torch.zeros(0, 3), "empty allgather")
        count += _same(sl.broadcast(torch.zeros(0), algorithm="native"), torch.zeros(0), "empty broadcast")
    views = {"transposed": torch.arange(6.0).reshape(2, 3).T, "strided": torch.arange(12.0)[::3]}
    views["expanded"] = torch.tensor([2.0]).expand(4)
    for name, view in views.items():
        before = view.clone()
        count += _same(sl.allreduce(view, op="sum"), size * before, f"{name} allreduce")
        count += _same(sl.broadcast(view), before, f"{name} broadcast")
        assert torch.equal(view, before), "the argument was changed"
    leaf = torch.ones(2, requires_grad=True)
    assert not sl.allreduce(leaf, op="mean").requires_grad
    return count


def _check_array_kinds(world: World) -> int:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1] + world.rank
    found = sl.allreduce(array, op="max")
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert (found == np.arange(6).reshape(2, 3)[:, ::-1] + world.size - 1).all()
    assert isinstance(sl.allgather(np.array([world.rank], dtype=np.uint16)), np.ndarray)

    class Foreign:
        """An array with only the DLPack protocol."""

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self._tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._tensor.__dlpack_device__()

    return _same(sl.allreduce(Foreign(torch.ones(3)), op="sum"), torch.full((3,), float(world.size)), "DLPack") + 2


def _check_teams(world: World) -> int:
    evens, odds = world.group(range(0, world.size, 2)), world.group(range(1, world.size, 2)) if world.size > 1 else None
    backwards = world.group(range(world.size - 1, -1, -1))
    count = 0
    for team in (evens, odds):
        if team is not None and team.member:
            assert team.ranks[team.rank] == world.rank
            count += _same(sl.allgather(torch.tensor([world.rank]), group=team), torch.tensor(team.ranks), "a team")
    found = sl.allgather(torch.tensor([world.rank]), group=backwards, algorithm="ring")
    return count + _same(found, torch.arange(world.size - 1, -1, -1), "a team in another order")


def _check_async(world: World) -> int:
    team = world.group()
    pending = [
        sl.allreduce(torch.full((5,), float(k)), op="sum", algorithm=algorithm, group=team, async_=True)
        for k in range(4)
        for algorithm in ("native", "ring", "halving_doubling")
    ]
    last = sl.allreduce(torch.ones(1), op="sum", group=team)  # runs after them
    count = _same(last, torch.tensor([float(world.size)]), "after asynchronous calls")
    for number, one in reversed(list(enumerate(pending))):
        count += _same(one.wait(), torch.full((5,), float(number // 3 * world.size)), "asynchronous")
        assert one.done()
    return count


def _check_messages(world: World) -> int:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    buffer = torch.zeros(3, 2).T  # not contiguous
    sent = world.runtime.spawn(sl.send, torch.full((2, 3), float(world.rank)), right, 5, world.everyone)
    assert sl.recv(buffer, left, tag=5) == left
    sent.join(60)
    return _same(buffer, torch.full((2, 3), float(left)), "a message")
