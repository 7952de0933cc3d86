"""The control log: every process reads the same entries in the same order."""

from __future__ import annotations

import pytest

import syncline as sl
from syncline.control import ControlLog, MemoryStore
from syncline.control.log import LOG_KEY, MAX_ENTRY_BYTES
from syncline.errors import ProtocolError
from syncline.world import World


def test_all_readers_see_the_same_order() -> None:
    values: dict[str, bytes] = {}

    def write(world: World) -> list[tuple[int, str, int]]:
        store = MemoryStore(values, lambda: world.runtime.sleep(0.0))
        log = ControlLog(store, world.runtime.now)
        for number in range(5):
            log.append("note", rank=world.rank, number=number)
        world.barrier()
        return [(entry.number, entry.fields["rank"], entry.fields["number"]) for entry in log.read()]

    for seed in range(20):
        values.clear()
        results = sl.simulate(write, ranks=3, seed=seed, chaos=True).results
        assert results[0] == results[1] == results[2]
        assert [number for number, _, _ in results[0]] == list(range(15))
        for rank in range(3):
            assert [own for _, who, own in results[0] if who == rank] == list(range(5))


def test_a_long_entry_is_refused() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        ControlLog(MemoryStore()).append("note", text="x" * MAX_ENTRY_BYTES)


def test_an_unreadable_entry_is_named() -> None:
    store = MemoryStore()
    store.set(f"{LOG_KEY}/0", "nonsense")
    with pytest.raises(ProtocolError, match="entry 0"):
        ControlLog(store).read()


def test_equal_entries_of_two_writers_both_count() -> None:
    store = MemoryStore()
    first, second = ControlLog(store, lambda: 0.0), ControlLog(store, lambda: 0.0)
    assert [first.append("note"), second.append("note")] == [0, 1]


def test_a_bounded_log_keeps_the_latest_entries_without_gaps() -> None:
    values: dict[str, bytes] = {}

    def write(world: World) -> tuple[list[tuple[int, int]], int]:
        log, late = (
            ControlLog(MemoryStore(values, lambda: world.runtime.sleep(0.0)), world.runtime.now, "ring", max_entries=8)
            for _ in range(2)
        )
        seen = []
        for number in range(10):
            log.append("note", rank=world.rank, own=number)
            seen += [(entry.fields["rank"], entry.number) for entry in log.read()]
        world.barrier()
        return seen, late.read()[0].number

    for seed in range(20):
        values.clear()
        for seen, first in sl.simulate(write, ranks=3, seed=seed, chaos=True).results:
            numbers = [number for _, number in seen]
            assert numbers == sorted(set(numbers))
            assert first == 30 - 8, "a late reader begins with the oldest entry that is left"
        assert len(values) == 8
