"""The contract of schedules, checked with symbols instead of numbers, and a world on an existing transport."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from syncline.collectives import Round, Schedule, Setting
from syncline.environment import Environment
from syncline.transports import Transport
from syncline.world.world import World, make_current

__all__ = ["ScheduleContract", "check_schedule", "world_on"]

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
