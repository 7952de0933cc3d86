"""Which rank an error names, from the records in the store, in virtual time; and a store that hangs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import syncline as sl
from syncline.environment.lost_after import ALIVE, DEAD, lost_after
from syncline.runtime import RealRuntime
from syncline.transports.key_value_store import BoundedStore, StoreSilentError
from syncline.transports.liveness import HEARTBEAT_EVERY_S, Liveness, LossReason

TEST_TIMEOUT_S = 60.0


class Table:
    """A store in memory."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.rows[key] = value

    def get(self, key: str) -> bytes:
        return self.rows[key].encode()

    def add(self, key: str, amount: int) -> int:
        self.rows[key] = str(int(self.rows.get(key, "0")) + amount)
        return int(self.rows[key])

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.rows for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.rows.setdefault(key, desired).encode()

    def close(self) -> None:
        return


Watch = Callable[[sl.World], Liveness]


def watching(gone: dict[int, str] | None = None) -> tuple[Table, Watch]:
    """A store, and the liveness of each rank; with `gone`, on a transport whose members may leave one by one."""
    table = Table()

    def watch(world: sl.World) -> Liveness:
        known = None if gone is None else lambda: gone
        return Liveness(table, table, world.rank, world.size, world.runtime, gone=known)

    return table, watch


def ring(watch: Watch, *, frozen: int, gone: dict[int, str] | None = None) -> list[Any]:
    """Every rank waits for the one before it; `frozen` sends no heartbeat. Returns the rank that each one names."""

    def wait(world: sl.World) -> LossReason | None:
        liveness, before = watch(world), (world.rank - 1) % world.size
        liveness.enter("0", "allreduce by ring")
        over = liveness.waiting("a message", "0", range(world.size), before)
        world.runtime.sleep(3 * HEARTBEAT_EVERY_S)
        if world.rank == frozen:
            liveness.closed.set()  # its beat ends, and nobody is told
            world.runtime.sleep(60.0)
            return None
        world.runtime.sleep(5.0)
        over()
        return liveness.blame("0", range(world.size), before, broken=False)

    return list(sl.simulate(wait, ranks=4).results)


@pytest.mark.parametrize("gone", [None, {}], ids=["fixed", "changing"])
def test_all_name_the_frozen_rank_of_a_ring(gone: dict[int, str] | None) -> None:
    """The ring's own order would have rank 3 blame rank 2, and rank 0 rank 3."""
    _, watch = watching(gone)
    verdicts = ring(watch, frozen=1)
    assert [each.rank for each in verdicts if each is not None] == [1, 1, 1]
    assert all("no heartbeat" in each.reason for each in verdicts if each is not None)


def test_a_rank_that_ended_because_of_another_is_not_blamed() -> None:
    """Rank 2 has named rank 1 before it left; rank 3, which only sees rank 2 go, names rank 1 too."""
    gone = {1: "its connection broke"}
    _, watch = watching(gone)

    def wait(world: sl.World) -> LossReason | None:
        liveness = watch(world)
        if world.rank == 2:
            verdict = liveness.cause_of(1, gone[1])
            liveness.close()
            gone[2] = "it has left"
            return verdict
        world.runtime.sleep(1.0)
        return liveness.cause_of(2, gone[2]) if world.rank == 3 else None

    results = sl.simulate(wait, ranks=4).results
    assert results[2] == results[3] == LossReason(1, "its connection broke")


def test_a_blame_does_not_outlive_the_next_wait() -> None:
    """A rank that continues after a loss and then ends by itself is named."""
    _, watch = watching({})

    def wait(world: sl.World) -> LossReason:
        liveness = watch(world)
        if world.rank == 1:
            liveness.cause_of(2, "it was killed")
            liveness.waiting("a message", "0", range(3), 0)()
        world.runtime.sleep(2 * HEARTBEAT_EVERY_S)
        return liveness.cause_of(1, "its connection broke")

    assert sl.simulate(wait, ranks=3).results[0] == LossReason(1, "its connection broke")


def test_a_rank_that_left_is_named_despite_its_heartbeats() -> None:
    """Its last record is written while it leaves: it seems alive, and the operation can only have ended with it."""
    _, watch = watching()

    def wait(world: sl.World) -> LossReason | None:
        liveness = watch(world)
        liveness.enter("0", "barrier")
        if world.rank == 1:
            world.runtime.sleep(0.9 * HEARTBEAT_EVERY_S)
            liveness.leave()
            world.runtime.sleep(3 * HEARTBEAT_EVERY_S)
            liveness.close()
            return None
        return liveness.blame("0", range(world.size), None, broken=True)

    verdict = sl.simulate(wait, ranks=2).results[0]
    assert verdict == LossReason(1, "it has closed its world and left")


def test_the_chain_ends_at_the_rank_that_is_busy() -> None:
    _, watch = watching()

    def wait(world: sl.World) -> LossReason | None:
        liveness = watch(world)
        if world.rank == 2:
            liveness.undelivered["0"] = (lambda: "the gradient of fc1", None)
        else:
            liveness.waiting("a message", "0", range(3), world.rank + 1)
        world.runtime.sleep(4.0)
        return liveness.blame("0", range(3), 1, broken=False) if world.rank == 0 else None

    verdict = sl.simulate(wait, ranks=3).results[0]
    assert verdict.rank == 2
    assert "alive but did not answer; rank 2 has not delivered the gradient of fc1" in verdict.reason


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    _, watch = watching()

    def wait(world: sl.World) -> LossReason:
        liveness = watch(world)
        liveness.waiting("a message", "0", range(3), (world.rank + 1) % 3)
        world.runtime.sleep(4.0)
        return liveness.blame("0", range(3), (world.rank + 1) % 3, broken=False)

    verdicts = sl.simulate(wait, ranks=3).results
    assert {each.rank for each in verdicts} == {0}
    assert "ranks 0, 1, 2 wait for each other in a circle" in verdicts[0].reason


def test_another_loss_in_a_group_of_survivors_is_named() -> None:
    """The rank that all have named before is no member of theirs."""
    table, watch = watching()
    table.set("lost/0", json.dumps({"rank": 2, "reason": "it was killed"}))
    table.set("left/3", "1")

    def wait(world: sl.World) -> LossReason | None:
        if world.rank > 1:
            return None
        liveness = watch(world)
        return liveness.blame("0.1", [0, 1, 3], None, broken=True)

    assert [each and each.rank for each in sl.simulate(wait, ranks=4).results] == [3, 3, None, None]


def test_ranks_in_different_operations_end_their_waits() -> None:
    """Both wait in their third call, and neither wait would end. Both get an error that names both operations."""
    _, watch = watching()
    broken: list[tuple[int, float]] = []

    def wait(world: sl.World) -> str:
        liveness = watch(world)
        for call in ("barrier", "barrier", ("allreduce of float32[4]", "broadcast of uint8[16]")[world.rank]):
            liveness.enter("0", call)
        over = liveness.waiting("it", "0", range(2), None, lambda: broken.append((world.rank, world.runtime.now())))
        world.runtime.sleep(5.0)
        over()
        return liveness.blame("0", range(2), None, broken=True).reason

    told = sl.simulate(wait, ranks=2).results
    assert {rank for rank, _ in broken} == {0, 1}
    assert max(when for _, when in broken) < 5.0
    for text in told:
        assert "rank 0: allreduce of float32[4]; rank 1: broadcast of uint8[16]" in text
        assert "check=True" in text


def test_who_is_late_breaks_nothing_off() -> None:
    _, watch = watching()

    def wait(world: sl.World) -> bool:
        liveness, broken = watch(world), []
        liveness.enter("0", "barrier")
        if world.rank == 0:
            liveness.enter("0", "allreduce of float32[4]")
        liveness.waiting("it", "0", range(2), None, lambda: broken.append(1))
        world.runtime.sleep(20.0)
        return bool(broken)

    assert sl.simulate(wait, ranks=2).results == (False, False)


def test_deaths_are_read_despite_errors_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an unreadable entry nor an error of the store ends the heartbeats or hides another death."""

    class Flaky(Table):
        failed = False

        def get(self, key: str) -> bytes:
            if key == "syncline/dead/2" and not self.failed:
                self.failed = True
                raise RuntimeError("the store does not answer")
            return super().get(key)

    launcher = Flaky()
    launcher.set("syncline/dead/1", "not JSON")
    launcher.set("syncline/dead/2", json.dumps({"reason": "exit code 7"}))
    launcher.add("syncline/dead", 2)

    def wait(world: sl.World) -> dict[int, str]:
        liveness = Liveness(Table(), launcher, 0, 3, world.runtime)
        world.runtime.sleep(3 * HEARTBEAT_EVERY_S)
        return liveness.dead

    with caplog.at_level(logging.WARNING, "syncline"):
        assert sl.simulate(wait, ranks=1).results[0] == {2: "exit code 7"}
    assert launcher.failed
    assert "cannot read how rank 1 ended, and ignores it: b'not JSON'" in caplog.text


def test_the_launcher_sees_heartbeats_until_the_world_closes() -> None:
    table = Table()

    def live(world: sl.World) -> list[str]:
        liveness = Liveness(table, table, 0, 1, world.runtime, program="rank 0")
        seen = []
        for _ in range(3):
            world.runtime.sleep(1.2 * HEARTBEAT_EVERY_S)
            seen.append(table.rows[f"{ALIVE}/rank 0"])
        liveness.close()
        return [*seen, table.rows[f"{ALIVE}/rank 0"]]

    seen = sl.simulate(live, ranks=1).results[0]
    assert len(set(seen)) == 4
    assert seen[-1] == "left"


def test_heartbeats_continue_if_pending_work_cannot_be_described(caplog: pytest.LogCaptureFixture) -> None:
    """The description comes from the strategy's code. An error there must not end the heartbeats."""
    table = Table()

    def live(world: sl.World) -> list[str]:
        liveness = Liveness(table, table, 0, 1, world.runtime, program="rank 0")
        liveness.undelivered["0"] = (lambda: str(1 / 0), None)
        world.runtime.sleep(3 * HEARTBEAT_EVERY_S)
        liveness.undelivered.clear()
        before = table.rows[f"{ALIVE}/rank 0"]
        world.runtime.sleep(3 * HEARTBEAT_EVERY_S)
        return [before, table.rows[f"{ALIVE}/rank 0"]]

    before, after = sl.simulate(live, ranks=1).results[0]
    assert before != after
    assert "cannot write its record for the other ranks: ZeroDivisionError" in caplog.text


# A store that hangs.


class Stuck(Table):
    """A store on a network that is cut: nothing comes back until `mended` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.mended = RealRuntime().event()

    def set(self, key: str, value: str) -> None:
        self.mended.wait(TEST_TIMEOUT_S)
        super().set(key, value)


def test_a_store_that_hangs_ends_every_call() -> None:
    """The first call fails at its timeout, the next ones at once. They work again when the store answers."""
    stuck, runtime = Stuck(), RealRuntime()
    store = BoundedStore(stuck, runtime, timeout_s=0.05)
    with pytest.raises(StoreSilentError, match="did not answer within"):
        store.set("key", "value")
    began = runtime.now()
    with pytest.raises(StoreSilentError, match="has not answered for"):
        store.check(["key"])
    assert runtime.now() - began < TEST_TIMEOUT_S / 2
    stuck.mended.set()
    while "key" not in stuck.rows:
        runtime.sleep(0.001)
    until = runtime.now() + TEST_TIMEOUT_S
    while runtime.now() < until:
        try:
            assert store.prefixed("a").add("b", 2) == 2
            break
        except StoreSilentError:
            runtime.sleep(0.001)
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.get("key")


def test_closing_does_not_hang_on_a_store_that_does() -> None:
    stuck, runtime = Stuck(), RealRuntime()
    store = BoundedStore(stuck, runtime, timeout_s=0.05)
    liveness = Liveness(store, store, 0, 2, runtime, program="rank 0")
    began = runtime.now()
    liveness.close()
    assert runtime.now() - began < TEST_TIMEOUT_S / 2
    stuck.mended.set()
    store.close()


@pytest.mark.parametrize("text", ["never", "-1", "0.1", "inf"])
def test_the_variable_of_the_silence_limit_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_LOST_AFTER", text)
    with pytest.raises(sl.errors.SpecError, match=f"SYNCLINE_LOST_AFTER={text}: give a number of seconds"):
        lost_after()


def test_wait_that_begins_after_the_loss_is_known_is_broken_too() -> None:
    table = Table()

    def wait(world: sl.World) -> list[str]:
        liveness = Liveness(table, table, 0, 2, world.runtime, elastic=True)
        table.rows[f"{DEAD}/1"] = json.dumps({"rank": 1, "reason": "it was killed"})
        table.add(DEAD, 1)
        world.runtime.sleep(2 * HEARTBEAT_EVERY_S)
        assert liveness.lost() == {1: "it was killed"}
        broken: list[str] = []
        over = liveness.waiting("allreduce", "team1", (0, 1), break_off=lambda: broken.append("team1"))
        other = liveness.waiting("allreduce", "team2", (0, 2), break_off=lambda: broken.append("team2"))
        world.runtime.sleep(3 * HEARTBEAT_EVERY_S)
        over()
        other()
        liveness.stop()
        return broken

    assert sl.simulate(wait, ranks=1).results == (["team1"],)
