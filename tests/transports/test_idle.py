"""Waits without a timeout, and lost ranks that end them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import pytest
import torch

import syncline as sl
from syncline.transports import SingleTransport, Transport
from syncline.transports.zeromq import node
from tests.transports.zeromq_worlds import Here

TEST_TIMEOUT_S = 60.0


def serve(transport: Transport) -> None:
    """Answer every request, until the channel closes."""
    while True:
        buffer = torch.zeros(1)
        handle = transport.recv(buffer, None, 1)
        handle.wait(timeout=math.inf)
        transport.send(buffer + 1, handle.source, 2)


def ask(transport: Transport, server: int, value: float) -> float:
    answer = torch.zeros(1)
    handle = transport.recv(answer, server, 2)
    transport.send(torch.tensor([value]), server, 1)
    handle.wait()
    return float(answer)


def test_an_idle_server_waits_longer_than_any_timeout() -> None:
    def work(world: sl.World) -> float:
        channel = world.transport.split(range(world.size))
        assert channel is not None
        world.runtime.spawn(serve, channel, name="server")
        world.compute(1000.0)
        return ask(channel, (world.rank + 1) % world.size, 10.0 * world.rank)

    run = sl.simulate(work, 3, timeout=5.0)
    assert run.results == (1.0, 11.0, 21.0)


@pytest.mark.parametrize("chaos", [False, True])
def test_a_deadlock_is_found_despite_an_idle_task(chaos: bool) -> None:
    def work(world: sl.World) -> None:
        channel = world.transport.split(range(world.size))
        assert channel is not None
        world.runtime.spawn(serve, channel, name="server")
        if world.rank == 0:
            world.transport.recv(torch.zeros(1), 1, 7).wait()

    with pytest.raises(sl.errors.DeadlockError, match=r"rank 0 \(main\) waits .* from rank 1 \(tag 7"):
        sl.simulate(work, 2, chaos=chaos)


def test_a_wait_with_a_timeout_ends_next_to_an_idle_one() -> None:
    def work(world: sl.World) -> None:
        channel = world.transport.split(range(world.size))
        assert channel is not None
        world.runtime.spawn(serve, channel, name="server")
        if world.rank == 0:
            world.transport.recv(torch.zeros(1), None, 7).wait()
        world.compute(1.0)

    run = sl.simulate(work, 2, faults=[sl.faults.Kill(1, at=0.5)], timeout=30.0, return_exceptions=True)
    assert isinstance(run.results[0], sl.errors.PeerLostError)
    assert run.time == pytest.approx(30.0)


def test_an_idle_wait_for_one_that_dies_ends() -> None:
    def work(world: sl.World) -> float:
        if world.rank == 1:
            world.compute(5.0)
            return 0.0
        with pytest.raises(sl.errors.PeerLostError, match="rank 1") as lost:
            world.transport.recv(torch.zeros(1), 1).wait(timeout=math.inf)
        assert lost.value.peer == 1
        return world.runtime.now()

    run = sl.simulate(work, 2, faults=[sl.faults.Kill(1, at=3.0)])
    assert run.results[0] == pytest.approx(3.0)


def test_the_simulator_knows_who_is_gone() -> None:
    def work(world: sl.World) -> dict[int, str]:
        part = world.transport.split([0, 1])
        assert world.lost == {}
        world.compute(1.0)
        if world.rank == 3:
            raise ValueError("boom")
        world.compute(1.0)
        assert part is None or part.lost() == {}  # neither is a member
        return world.lost

    run = sl.simulate(work, 4, faults=[sl.faults.Kill(2, at=0.5)], return_exceptions=True)
    assert run.results[0] == {2: "it was killed at t=0.5 s", 3: "it ended with an exception at t=1 s"}
    assert run.results[1] == run.results[0]


def test_closing_a_simulated_world_ends_waits_and_init_reopens_it() -> None:
    def work(world: sl.World) -> list[str]:
        ended: list[str] = []

        def wait() -> None:
            try:
                world.transport.recv(torch.zeros(1), None, 9).wait(timeout=math.inf)
            except sl.errors.WorldError as error:
                ended.append(str(error))

        with sl.init():
            task = world.runtime.spawn(wait, name="idle")
            world.compute(1.0)
        task.join()
        with sl.init():
            sl.allreduce(torch.ones(2), op="mean")
        return ended

    for ended in sl.simulate(work, 2).results:
        assert ended == ["this rank has closed the channel: no message arrives for tag 9 any more"]


def test_a_closed_world_of_one_refuses_operations() -> None:
    transport = SingleTransport()
    transport.close()
    with pytest.raises(sl.errors.WorldError, match="closed the channel"):
        transport.recv(torch.zeros(1)).wait(timeout=math.inf)


def wait_until(true: Callable[[], object]) -> None:
    until = time.monotonic() + TEST_TIMEOUT_S
    while not true():
        assert time.monotonic() < until, "it has not come about"
        time.sleep(0.01)


def test_an_idle_wait_logs_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On real threads: only the wait with a timeout logs a warning."""
    monkeypatch.setattr(node, "WARN_AFTER_S", 0.05)
    with Here(2) as here, caplog.at_level(logging.WARNING, logger="syncline"):
        first, second = here.ranks
        runtime = second.runtime
        idle = runtime.spawn(second.recv(torch.zeros(1), 0, 1).wait, math.inf)
        timed = runtime.spawn(second.recv(torch.zeros(1), 0, 2).wait, 100.0)
        wait_until(lambda: "tag 2" in caplog.text)
        first.send(torch.ones(1), 1, 2).wait()
        assert timed.join(TEST_TIMEOUT_S)
        first.send(torch.ones(1), 1, 1).wait()
        assert idle.join(TEST_TIMEOUT_S)
    assert "tag 1" not in caplog.text
