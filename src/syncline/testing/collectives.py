"""Checks of collectives: schedules with symbols, schedules on a transport, and the functions of a world."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline import world as sl
from syncline.collectives import BufferPool, Channel, Round, Schedule, Setting, build, names
from syncline.collectives.channel import allreduce, broadcast, move_pieces, reduce, reduce_scatter
from syncline.collectives.executor import chunk_edges
from syncline.environment import Environment
from syncline.transports import Op, Transport
from syncline.world.world import World, make_current

__all__ = [
    "ScheduleContract",
    "check_functional",
    "check_schedule",
    "move_by_every_schedule",
    "reduce_by_every_schedule",
    "sizes_for",
    "world_on",
]

Symbol = tuple[int, int]
"""The initial data of a rank: (rank, chunk)."""
Held = dict[int, Counter[Symbol]]


def check_schedule(schedule: Schedule, size: int, root: int = 0, hosts: tuple[int, ...] = ()) -> int:
    """Assert that a schedule computes its operation, with each contribution counted exactly once.

    Returns the number of compared chunks over all ranks.
    """
    setting = schedule.setting(size, root, hosts)
    held = [_initial_chunks(schedule, rank, setting) for rank in range(size)]
    _simulate(schedule, setting, held)
    compared = 0
    for rank in range(size):
        for chunk, wanted in _final_chunks(schedule, rank, setting).items():
            compared += 1
            assert held[rank].get(chunk) == wanted, (
                f"{schedule} of {size}: rank {rank} ends with {dict(held[rank].get(chunk, {}))} in chunk {chunk}, "
                f"not {dict(wanted)}"
            )
    return compared


def _simulate(schedule: Schedule, setting: Setting, held: list[Held]) -> None:
    size = setting.size
    rounds: list[Iterator[Round]] = [schedule.rounds(rank, setting) for rank in range(size)]
    wires: dict[tuple[int, int], deque[tuple[int, int, Held]]] = defaultdict(deque)
    waiting: list[Round | None] = [None] * size
    counts = [0] * size
    running = set(range(size))
    while running:
        moved = False
        for rank in list(running):
            now = waiting[rank]
            if now is None:
                now = next(rounds[rank], None)
                moved = True
                if now is None:
                    running.discard(rank)
                    continue
                counts[rank] += 1
                _check_round(now, rank, setting)
                for move in now.sends:
                    chunks = range(move.chunk, move.chunk + move.width)
                    content = {c: Counter(held[rank][c]) for c in chunks if c in held[rank]}
                    assert len(content) == move.width, f"rank {rank} sends chunk {move.chunk}, which it does not have"
                    wires[rank, move.peer].append((move.chunk, move.width, content))
                waiting[rank] = now
            if all(_has_arrived(wires, now, rank, peer) for peer in {move.peer for move in now.recvs}):
                for move in now.recvs:
                    chunk, width, content = wires[move.peer, rank].popleft()
                    assert (chunk, width) == (move.chunk, move.width), (
                        f"rank {rank} expects chunk {move.chunk} (×{move.width}) from {move.peer}, "
                        f"which sends {chunk} (×{width})"
                    )
                    for c, symbols in content.items():
                        held[rank][c] = held[rank][c] + symbols if move.combine else symbols
                waiting[rank] = None
                moved = True
        assert moved, f"{schedule} of {size}: ranks {sorted(running)} wait forever"
    left = {pair: len(line) for pair, line in wires.items() if line}
    assert not left, f"{schedule} of {size}: messages that no rank receives (from, to): {left}"
    assert len(set(counts)) == 1, f"{schedule} of {size}: ranks have different numbers of rounds: {counts}"


def _has_arrived(wires: dict[tuple[int, int], deque[tuple[int, int, Held]]], now: Round, rank: int, peer: int) -> bool:
    return len(wires[peer, rank]) >= sum(move.peer == peer for move in now.recvs)


def _check_round(now: Round, rank: int, setting: Setting) -> None:
    sent = {c for move in now.sends for c in range(move.chunk, move.chunk + move.width)}
    placed: set[int] = set()
    for move in (*now.sends, *now.recvs):
        assert 0 <= move.peer < setting.size, f"rank {rank} talks to {move.peer}"
        assert move.peer != rank, f"rank {rank} talks to itself"
        assert 0 <= move.chunk < move.chunk + move.width <= setting.chunks, f"rank {rank}: {move} is outside the data"
    for move in now.recvs:
        if not move.combine:
            chunks = set(range(move.chunk, move.chunk + move.width))
            assert not chunks & sent, f"rank {rank} overwrites what it sends: {now}"
            assert not chunks & placed, f"rank {rank} receives a chunk twice: {now}"
            placed |= chunks


def _initial_chunks(schedule: Schedule, rank: int, setting: Setting) -> Held:
    size, operation = setting.size, schedule.operation
    mine: range = range(setting.chunks)
    if operation in ("allgather", "gather"):
        mine = range(rank, rank + 1)
    elif operation == "alltoall":
        mine = range(rank * size, (rank + 1) * size)
    elif operation == "scatter" and rank != setting.root:
        mine = range(0)
    return {chunk: Counter({(rank, chunk): 1}) for chunk in mine}


def _final_chunks(schedule: Schedule, rank: int, setting: Setting) -> Held:
    size, root, operation = setting.size, setting.root, schedule.operation
    every = range(setting.chunks)

    def summed(chunk: int) -> Counter[Symbol]:
        return Counter({(other, chunk): 1 for other in range(size)})

    def copied(source: int, chunk: int) -> Counter[Symbol]:
        return Counter({(source, chunk): 1})

    if operation == "allreduce" or (operation == "reduce" and rank == root):
        return {chunk: summed(chunk) for chunk in every}
    if operation == "reduce_scatter":
        return {rank: summed(rank)}
    if operation == "broadcast":
        return {chunk: copied(root, chunk) for chunk in every}
    if operation == "allgather" or (operation == "gather" and rank == root):
        return {chunk: copied(chunk, chunk) for chunk in every}
    if operation == "scatter":
        return {rank: copied(root, rank)}
    if operation == "alltoall":
        return {source * size + rank: copied(source, source * size + rank) for source in range(size)}
    return {}


class ScheduleContract:
    """The contract of schedules: pure and exact for 1 to 17 ranks, several roots and several layouts of hosts.

    ```python
    class TestMyRing(ScheduleContract):
        schedule = MyRing()
    ```
    """

    schedule: Schedule

    def test_exact_for_every_size_and_root(self) -> None:
        for size in range(1, 18):
            for root in {0, size // 2, size - 1} if self.schedule.operation in _ROOTED else {0}:
                assert check_schedule(self.schedule, size, root)

    def test_exact_whatever_the_hosts(self) -> None:
        for hosts in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (5, 5, 5), (0, 1, 1, 2, 2, 2, 0), (0,) * 8):
            assert check_schedule(self.schedule, len(hosts), hosts=hosts)

    def test_pure(self) -> None:
        setting = self.schedule.setting(6)
        for rank in range(6):
            assert list(self.schedule.rounds(rank, setting)) == list(self.schedule.rounds(rank, setting))


_ROOTED = ("reduce", "broadcast", "gather", "scatter")


def sizes_for(ranks: int, large: int = 5003) -> list[int]:
    """Numbers of elements at which a schedule may fail: 0, 1, near the number of ranks, primes, large."""
    return sorted({0, 1, max(0, ranks - 1), ranks, ranks + 1, 13, 101, large})


def values_of(rank: int, numel: int) -> torch.Tensor:
    """Integers as floats, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(-50, 50, (numel,), generator=generator).to(torch.float32)


def reduce_by_every_schedule(transport: Transport, hosts: tuple[int, ...] = (), large: int = 5003) -> int:
    """Check allreduce, reduce and reduce-scatter with every schedule; return the number of checks."""
    channel = Channel(transport, hosts, BufferPool(transport.runtime))
    size, checked = transport.size, 0
    for numel in sizes_for(size, large):
        everyone = torch.stack([values_of(rank, numel) for rank in range(size)])
        for op, wanted in _reductions(everyone).items():
            for name in names("allreduce"):
                mine = values_of(transport.rank, numel)
                allreduce(channel, mine, op, build("allreduce", name), lanes=1 + numel % 3)
                assert torch.equal(mine, wanted), f"allreduce by {name}: {op} of {numel} among {size}"
                checked += 1
        for name in names("reduce"):
            mine = values_of(transport.rank, numel)
            reduce(channel, mine, "sum", size - 1, build("reduce", name))
            if transport.rank == size - 1:
                assert torch.equal(mine, everyone.sum(0)), f"reduce by {name}: {numel} among {size}"
            checked += 1
        for name in names("reduce_scatter"):
            mine, edges = values_of(transport.rank, numel), chunk_edges(numel, size)
            reduce_scatter(channel, mine, edges, "sum", build("reduce_scatter", name))
            part = slice(edges[transport.rank], edges[transport.rank + 1])
            assert torch.equal(mine[part], everyone.sum(0)[part]), f"reduce_scatter by {name}: {numel} among {size}"
            checked += 1
    return checked


def move_by_every_schedule(transport: Transport) -> int:
    """Check broadcast, allgather, gather, scatter and all-to-all with every schedule; return the number of checks."""
    channel = Channel(transport, (), BufferPool(transport.runtime))
    rank, size, checked = transport.rank, transport.size, 0
    root = size // 2
    for numel in sizes_for(size):
        for name in names("broadcast"):
            mine = values_of(rank, numel)
            broadcast(channel, mine, root, build("broadcast", name))
            assert torch.equal(mine, values_of(root, numel)), f"broadcast by {name}: {numel} among {size}"
            checked += 1
        for operation in ("allgather", "gather", "scatter"):
            for name in names(operation):
                _move_one_each(channel, operation, name, root, numel)
                checked += 1
        for name in names("alltoall"):
            parts = {rank * size + to: values_of(rank * size + to, numel + to) for to in range(size) if to != rank}
            parts |= {source * size + rank: torch.zeros(numel + rank) for source in range(size) if source != rank}
            move_pieces(channel, "alltoall", parts, name)
            for source in range(size):
                if source != rank:
                    wanted = values_of(source * size + rank, numel + rank)
                    assert torch.equal(parts[source * size + rank], wanted), f"alltoall by {name} among {size}"
            checked += 1
    return checked


def _move_one_each(channel: Channel, operation: str, name: str, root: int, numel: int) -> None:
    """Check one collective with chunks of different sizes: chunk i has numel + i elements."""
    rank, size = channel.rank, channel.size
    right = {chunk: values_of(chunk, numel + chunk) for chunk in range(size)}
    blank = {chunk: torch.zeros(numel + chunk) for chunk in range(size)}
    if operation == "scatter":
        parts = dict(right) if rank == root else {rank: blank[rank]}
        move_pieces(channel, "scatter", parts, name, root)
        wanted = [rank]
    else:
        parts = {**blank, rank: right[rank]}
        move_pieces(channel, "allgather" if operation == "allgather" else "gather", parts, name, root)
        wanted = list(range(size)) if operation == "allgather" or rank == root else [rank]
    for chunk in wanted:
        assert torch.equal(parts[chunk], right[chunk]), f"{operation} by {name}: chunk {chunk} among {size}"


def _reductions(everyone: torch.Tensor) -> dict[Op, torch.Tensor]:
    return {"sum": everyone.sum(0), "max": everyone.amax(0), "min": everyone.amin(0)}


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
ALL_DTYPES = (*FLOATS, *INTEGERS, *FLOAT8S, *COMPLEX, torch.bool)


def world_on(transport: Transport, check: bool = False) -> World:
    """Make a world on an existing transport, and make it the current world."""
    environment = Environment(
        source="a test",
        rank=transport.rank,
        size=transport.size,
        local_rank=transport.rank,
        local_size=transport.size,
        host="here",
    )
    world = World(environment, transport, ["here"] * transport.size, check)
    make_current(world)
    return world


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
