"""The contract of schedules: pure, exact, in step. Checked by playing all ranks with symbols in place of numbers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from syncline.collectives import Round, Schedule, Setting

__all__ = ["ScheduleContract", "check_schedule"]

Symbol = tuple[int, int]
"""What a rank holds at first: (rank, chunk)."""
Held = dict[int, Counter[Symbol]]


def check_schedule(schedule: Schedule, size: int, root: int = 0, hosts: tuple[int, ...] = ()) -> int:
    """Assert that a schedule does what its operation promises, each contribution counted exactly once.

    Returns how many chunks were compared, over all ranks.
    """
    setting = schedule.setting(size, root, hosts)
    held = [_at_first(schedule, rank, setting) for rank in range(size)]
    _play(schedule, setting, held)
    compared = 0
    for rank in range(size):
        for chunk, wanted in _in_the_end(schedule, rank, setting).items():
            compared += 1
            assert held[rank].get(chunk) == wanted, (
                f"{schedule} of {size}: rank {rank} ends with {dict(held[rank].get(chunk, {}))} in chunk {chunk}, "
                f"not {dict(wanted)}"
            )
    return compared


def _play(schedule: Schedule, setting: Setting, held: list[Held]) -> None:
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
                    assert len(content) == move.width, f"rank {rank} sends chunk {move.chunk}, which it has not got"
                    wires[rank, move.peer].append((move.chunk, move.width, content))
                waiting[rank] = now
            if all(_enough(wires, now, rank, peer) for peer in {move.peer for move in now.recvs}):
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
        assert moved, f"{schedule} of {size}: ranks {sorted(running)} wait for ever"
    left = {pair: len(line) for pair, line in wires.items() if line}
    assert not left, f"{schedule} of {size}: messages nobody receives (from, to): {left}"
    assert len(set(counts)) == 1, f"{schedule} of {size}: ranks are not in step: {counts} rounds"


def _enough(wires: dict[tuple[int, int], deque[tuple[int, int, Held]]], now: Round, rank: int, peer: int) -> bool:
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


def _at_first(schedule: Schedule, rank: int, setting: Setting) -> Held:
    size, operation = setting.size, schedule.operation
    mine: range = range(setting.chunks)
    if operation in ("allgather", "gather"):
        mine = range(rank, rank + 1)
    elif operation == "alltoall":
        mine = range(rank * size, (rank + 1) * size)
    elif operation == "scatter" and rank != setting.root:
        mine = range(0)
    return {chunk: Counter({(rank, chunk): 1}) for chunk in mine}


def _in_the_end(schedule: Schedule, rank: int, setting: Setting) -> Held:
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
    """Inherit, set `schedule`, and pytest checks it for one to seventeen ranks, every root and odd hosts."""

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
