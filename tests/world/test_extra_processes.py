"""Members beside the ranks of a simulation, and what a world keeps."""

from __future__ import annotations

import math

import pytest
import torch

import syncline as sl
from syncline.transports import Transport
from syncline.world.simulation import ExtraProcess


def echo(transport: Transport) -> None:
    while True:
        buffer = torch.zeros(1)
        handle = transport.recv(buffer, None, 1)
        handle.wait(timeout=math.inf)
        transport.send(buffer * 10 + transport.rank, handle.source, 2)


def ask(world: sl.World, member: int) -> float:
    answer = torch.zeros(1)
    handle = world.job_channel.recv(answer, member, 2)
    world.job_channel.send(torch.tensor([float(world.rank)]), member, 1)
    handle.wait()
    return float(answer)


def ask_for_ever(world: sl.World, member: int) -> None:
    while True:
        ask(world, member)
        world.compute(0.1)


def test_ranks_reach_extra_processes_and_count_only_ranks() -> None:
    def work(world: sl.World) -> tuple[int, float, float, float]:
        total = sl.allreduce(torch.ones(1), op="sum")
        return world.size, float(total), ask(world, 3), ask(world, 4)

    run = sl.simulate(work, 3, extra=[echo, echo])
    assert run.results == tuple((3, 3.0, 10.0 * rank + 3, 10.0 * rank + 4) for rank in range(3))


def test_the_job_channel_is_the_world_without_extra_processes() -> None:
    def work(world: sl.World) -> bool:
        with pytest.warns(DeprecationWarning, match="job_channel"):
            assert world.wide is None
        return world.job_channel is world.transport

    assert sl.simulate(work, 2).results == (True, True)


def test_roles_of_those_beside_are_known() -> None:
    def work(world: sl.World) -> tuple[str, ...]:
        return world.transport.extra_roles

    assert sl.simulate(work, 1, extra=[echo, ExtraProcess(echo, "evaluator")]).results == (("server", "evaluator"),)


def test_an_extra_process_may_be_killed_and_slowed() -> None:
    def work(world: sl.World) -> tuple[float, dict[int, str], dict[int, str]]:
        ask(world, 2)
        with pytest.raises(sl.errors.PeerLostError, match="rank 2"):
            ask_for_ever(world, 2)
        return world.runtime.now(), world.lost, world.job_channel.lost()

    run = sl.simulate(work, 2, faults=[sl.faults.Kill(2, at=1.0)], extra=[echo])
    assert run.killed == (2,)
    for now, lost, wide_lost in run.results:
        assert now >= 1.0
        assert lost == {}  # no rank of the world is
        assert wide_lost == {2: "it was killed at t=1 s"}

    def timed(world: sl.World) -> None:
        for _ in range(10):
            ask(world, 1)

    network = sl.Network(latency=0.0, bandwidth=1000.0)
    quick = sl.simulate(timed, 1, network=network, extra=[echo]).time
    slow = sl.simulate(timed, 1, network=network, extra=[echo], faults=[sl.faults.Slow(1, 10.0)]).time
    assert slow > 2 * quick


def test_the_exception_of_an_extra_process_is_raised() -> None:
    def broken(transport: Transport) -> None:
        transport.recv(torch.zeros(1), 0, 1).wait()
        raise ValueError("the server broke")

    with pytest.raises(ValueError, match="the server broke") as caught:
        sl.simulate(lambda world: ask(world, 1), 1, extra=[broken])
    assert "rank 1 (extra)" in "".join(getattr(caught.value, "__notes__", []))


def test_the_simulation_ends_with_the_ranks() -> None:
    def busy(transport: Transport) -> None:
        transport.runtime.sleep(1e9)

    assert sl.simulate(lambda world: world.compute(2.0), 2, extra=[busy]).time == 2.0


def test_a_deadlock_names_those_beside_too() -> None:
    def silent(transport: Transport) -> None:
        transport.recv(torch.zeros(1), None, 1).wait(timeout=math.inf)
        transport.recv(torch.zeros(1), 0, 99).wait(timeout=math.inf)

    with pytest.raises(sl.errors.DeadlockError, match=r"rank 1 \(extra\) waits .* from rank 0 \(tag 99") as caught:
        sl.simulate(lambda world: ask(world, 1), 1, extra=[silent])
    assert "rank 0 (main) waits" in str(caught.value)


def test_the_same_seed_gives_the_same_run_with_extra_processes() -> None:
    def work(world: sl.World) -> list[float]:
        return [ask(world, 2 + number % 2) + float(torch.rand(1)) for number in range(5)]

    runs = [sl.simulate(work, 2, extra=[echo, echo], seed=5, chaos=True) for _ in range(2)]
    assert runs[0].results == runs[1].results
    assert runs[0].messages == runs[1].messages


class Kept:
    def __init__(self, closed: list[str], name: str, problem: Exception | None = None) -> None:
        self._closed, self._name, self._problem = closed, name, problem

    def close(self) -> None:
        self._closed.append(self._name)
        if self._problem is not None:
            raise self._problem


def test_a_world_keeps_one_object_per_key_and_closes_in_reverse(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []
    with sl.init() as world:
        first = world.keep("first", lambda: Kept(closed, "first"))
        world.keep("second", lambda: Kept(closed, "second", sl.errors.WorldError("stuck")))
        assert world.keep("first", lambda: Kept(closed, "again")) is first
        assert closed == []
    assert closed == ["second", "first"]
    assert "second did not close: stuck" in caplog.text
    with pytest.raises(sl.errors.WorldError, match="closed"):
        world.keep("third", lambda: Kept(closed, "third"))


def test_resources_are_closed_before_the_transport() -> None:
    def work(world: sl.World) -> list[str]:
        closed: list[str] = []
        with sl.init():
            world.keep("one", lambda: Kept(closed, "kept"))
            world.transport.close = lambda: closed.append("transport")  # type: ignore[method-assign]
        return closed

    assert sl.simulate(work, 1).results == (["kept", "transport"],)
