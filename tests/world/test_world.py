"""init(), worlds and teams, in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import syncline as sl
from syncline.environment import Environment
from syncline.transports import SingleTransport
from syncline.world import current_world
from syncline.world import world as world_module


def test_alone() -> None:
    with sl.init() as world:
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert "no launcher" in repr(world)
        assert world.device.type in ("cpu", "cuda")
        world.barrier()
        world.compute(0.0)


def test_a_second_init_returns_the_same_world_until_close() -> None:
    first = sl.init(timeout=60)
    assert sl.init() is first
    assert sl.init("single", timeout=60) is first
    for asked in ({"timeout": 61.0}, {"transport": "zeromq"}, {"check": True}, {"transport": SingleTransport()}):
        (name,) = asked
        with pytest.raises(sl.errors.WorldError, match=rf"has a world already, with {name}=.*close\(\)"):
            sl.init(**asked)
    first.close()
    first.close()
    with pytest.raises(sl.errors.WorldError, match="no world yet"):
        sl.allreduce(torch.zeros(1), op="mean")
    with pytest.raises(sl.errors.WorldError, match="closed"):
        first.group()
    second = sl.init()
    assert second is not first
    second.close()


def test_init_refuses_what_it_does_not_know() -> None:
    with pytest.raises(sl.errors.SpecError, match="did you mean 'torch_dist'"):
        sl.init(transport="torchdist")
    with pytest.raises(sl.errors.WorldError, match="timeout=0"):
        sl.init(timeout=0)


def test_a_transport_of_ones_own() -> None:
    with sl.init(transport=SingleTransport()) as world:
        assert world.size == 1


def test_init_on_a_simulated_rank_gives_that_rank_once() -> None:
    def script(world: sl.World) -> int:
        with sl.init() as mine:
            assert mine is world
            return mine.rank

    assert sl.simulate(script, 3).results == (0, 1, 2)

    def again(world: sl.World) -> tuple[bool, float, int]:
        sl.init().close()
        mine = sl.init(check=True, timeout=3.0)
        return mine.check, mine.transport.timeout, int(sl.allreduce(torch.tensor([1]), op="sum"))

    assert sl.simulate(again, 2).results == ((True, 3.0, 2),) * 2

    def twice(world: sl.World) -> None:
        assert sl.init(timeout=5.0) is sl.init() is world
        sl.init(timeout=6.0)

    with pytest.raises(sl.errors.WorldError, match=r"with timeout=5\.0, and now timeout=6\.0"):
        sl.simulate(twice, 1)


def test_teams_refuse_doubles_and_strangers() -> None:
    with sl.init() as world:
        with pytest.raises(sl.errors.WorldError, match="more than once"):
            world.group([0, 0])
        with pytest.raises(sl.errors.WorldError, match="not in the world"):
            world.group([0, 4])
        with pytest.raises(sl.errors.WorldError, match="empty"):
            world.group([])


def test_a_team_without_me() -> None:
    def others(world: sl.World) -> None:
        team = world.group([1, 2])
        assert team.size == 2
        assert team.member == (world.rank != 0)
        if world.rank == 0:
            with pytest.raises(sl.errors.WorldError, match=r"rank 0 is not in the group of ranks \[1, 2\]"):
                sl.allreduce(torch.zeros(1), op="mean", group=team)

    sl.simulate(others, 3)


def test_two_teams_at_once_do_not_mix() -> None:
    def both(world: sl.World) -> tuple[float, float]:
        first, second = world.group(), world.group()
        a = sl.allreduce(torch.tensor([1.0]), op="sum", algorithm="ring", group=first, async_=True)
        b = sl.allreduce(torch.tensor([10.0]), op="sum", algorithm="ring", group=second, async_=True)
        return b.wait().item(), a.wait().item()

    for seed in range(20):
        assert sl.simulate(both, 4, seed=seed, chaos=True).results == ((40.0, 4.0),) * 4


def test_user_threads_find_the_world_of_the_process() -> None:
    import threading

    found: list[float] = []
    with sl.init():
        thread = threading.Thread(target=lambda: found.append(sl.allreduce(torch.ones(1), op="mean").item()))
        thread.start()
        thread.join(30)
    assert found == [1.0]


def test_hosts_of_a_simulated_network() -> None:
    network = sl.Network(ranks_per_host=2, inside=sl.Link(latency=1e-6, bandwidth=1e10))
    run = sl.simulate(lambda world: (world.host, world.local_rank, world.local_size), 5, network=network)
    assert run.results == (("host0", 0, 2), ("host0", 1, 2), ("host1", 0, 2), ("host1", 1, 2), ("host2", 0, 1))


def test_importing_does_no_work() -> None:
    code = (
        "import sys, syncline, threading\n"
        "assert threading.active_count() == 1\n"
        "assert 'syncline.testing' not in sys.modules and 'syncline.transports.torch_dist' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.runtime.simulator.PROGRESS_EVERY_S", 1e-3)


@pytest.mark.usefixtures("soon")
def test_a_long_simulation_tells_its_progress() -> None:
    seen: list[float] = []

    def work(world: sl.World) -> None:
        while len(seen) < 2:
            world.compute(1.0)

    found = sl.simulate(work, ranks=2, progress=seen.append)
    assert seen == sorted(seen)
    assert 0.0 <= seen[0] <= found.time


@pytest.mark.usefixtures("soon")
def test_an_exception_of_progress_ends_a_simulation() -> None:
    def work(world: sl.World) -> None:
        while True:
            world.compute(1.0)

    def enough(now: float) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        sl.simulate(work, ranks=2, progress=enough)


@pytest.mark.usefixtures("soon")
def test_progress_is_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("syncline.world.simulation.SHOW_EVERY_S", 0.0)
    lines: list[str] = []

    def work(world: sl.World) -> None:
        while not lines:
            world.compute(1.0)
            lines.extend(capsys.readouterr().err.splitlines())

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    sl.simulate(work, ranks=2)
    assert "2 simulated ranks: " in lines[0]
    lines.clear()
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    sl.simulate(lambda world: world.compute(1.0), ranks=2)
    assert capsys.readouterr().err == ""


def introduce(world: sl.World, check: bool = False) -> tuple[list[str], int, bool]:
    environment = Environment(source="a test", rank=world.rank, size=world.size, local_size=1, host="here")
    return world_module.exchange_introductions(world.transport, environment, check)


def test_ranks_of_different_versions_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both versions on both ranks: their message formats may differ."""
    monkeypatch.setattr(world_module, "package_version", lambda: f"1.{current_world().rank}")
    for error in sl.simulate(introduce, 2, return_exceptions=True).results:
        assert isinstance(error, sl.errors.WorldError)
        assert "rank 0 runs Syncline 1.0, rank 1 runs 1.1" in str(error)


def test_one_rank_that_wants_check_is_enough() -> None:
    """One that compares its calls and others that do not would wait for each other."""
    run = sl.simulate(lambda world: introduce(world, check=world.rank == 1), 3)
    assert [check for _, _, check in run.results] == [True] * 3
