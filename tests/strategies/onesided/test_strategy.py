"""Networks by one-sided SGD, on simulated workers."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.strategies import Strategy
from syncline.strategies.onesided import OneSided, OneSidedRun
from syncline.strategies.onesided.mailslots import MAX_QUEUED_MESSAGES
from syncline.testing.hunting import hunt, kill_soon
from syncline.testing.strategies import StrategyContract, flat
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.workloads import build
from tests.strategies.cases import backward

SEEDS = range(1000 if os.environ.get("SYNCLINE_HUNT") else 15)
NETWORK = sl.Network(latency=1e-4, bandwidth=1e9)


class TestTheContract(StrategyContract):
    as_one: ClassVar[bool] = False  # a state of the past is another state
    exact_resume: ClassVar[bool] = False  # states on their way are not in a checkpoint
    conserves: ClassVar[bool] = False

    def make(self) -> Strategy:
        return OneSided()


def begin(rate: float = 0.1, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer, OneSidedRun]:
    """One weight, from 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = sl.distribute(model, optimizer, strategy=OneSided(**options))
    assert isinstance(run, OneSidedRun)
    return model, optimizer, run


def push(model: nn.Linear, optimizer: torch.optim.Optimizer, slope: float) -> float:
    """A step against this gradient; the weight afterwards."""
    optimizer.zero_grad()
    backward(slope * model(torch.ones(1, 1)).sum())
    optimizer.step()
    return model.weight.item()


# The catch.


@pytest.mark.parametrize(("remote", "after"), [(1.0, 0.15), (-1.0, 0.1), (None, 0.1)])
def test_the_catch(remote: float | None, after: float) -> None:
    """w = 0, ε = 0.1, Δ = −1; rank 1 has left something, or nothing."""

    def case(world: sl.World) -> float:
        model, optimizer, run = begin(every=10**6)
        if world.rank == 1 and remote is not None:
            run.slots.post(torch.tensor([remote]).numpy(), to=0)
            run.slots.settle()
        world.barrier()
        found = push(model, optimizer, -1.0) if world.rank == 0 else 0.0
        world.barrier()
        if world.rank == 0:
            assert run.accepted == (remote == 1.0)
            assert run.rejected == (remote == -1.0)
        run.close()
        return found

    assert sl.simulate(case, 2, network=NETWORK).results[0] == pytest.approx(after)


def test_pull_takes_the_place_of_the_rate() -> None:
    def case(world: sl.World) -> float:
        model, optimizer, run = begin(every=10**6, pull=1.0)
        if world.rank == 1:
            run.slots.post(torch.ones(1).numpy(), to=0)
            run.slots.settle()
        world.barrier()
        found = push(model, optimizer, -1.0) if world.rank == 0 else 0.0
        run.close()
        return found

    assert sl.simulate(case, 2, network=NETWORK).results[0] == pytest.approx(0.1 + 0.5)


def test_each_group_has_its_own_pull() -> None:
    def case(world: sl.World) -> list[float]:
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        model = nn.Sequential(first, second)
        for layer in (first, second):
            nn.init.zeros_(layer.weight)
        groups = [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        run = sl.distribute(model, optimizer, strategy=OneSided(every=10**6))
        assert isinstance(run, OneSidedRun)
        if world.rank == 1:
            run.slots.post(torch.ones(2).numpy(), to=0)
            run.slots.settle()
        world.barrier()
        if world.rank == 0:
            backward(-first.weight.sum() - second.weight.sum())
            optimizer.step()
        found = flat(model).tolist()
        run.close()
        return found

    assert sl.simulate(case, 2, network=NETWORK).results[0] == pytest.approx([0.15, 0.3])


# How it goes.


def test_a_slow_worker_slows_nobody() -> None:
    def case(world: sl.World) -> tuple[list[int], float]:
        model, optimizer, run = begin()
        while world.runtime.now() < 1.0:
            world.compute(0.01)
            push(model, optimizer, -1.0)
        steps = run.stats.steps
        run.close()
        return [steps], world.runtime.now()

    even = sl.simulate(case, 4, network=NETWORK).results
    slowed = sl.simulate(case, 4, network=NETWORK, faults=[sl.faults.Slow(2, 10.0)]).results
    assert [steps for steps, _ in even] == [[100]] * 4
    assert [steps for steps, _ in slowed] == [[100], [100], [10], [100]]


def test_workers_learn_from_each_other() -> None:
    """Each sees only its own data; the mean of all solves all of them."""

    def case(world: sl.World) -> tuple[float, float | None, int]:
        draw = torch.Generator().manual_seed(world.rank)
        truth = torch.tensor([[1.0, -2.0, 0.5]])
        inputs = torch.randn(200, 3, generator=draw)
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        run = sl.distribute(model, optimizer, strategy=OneSided(pull=0.5))
        assert isinstance(run, OneSidedRun)
        for step in range(60):
            world.compute(0.01)
            rows = inputs[(10 * step) % 200 :][:10]
            optimizer.zero_grad()
            backward((model(rows) - rows @ truth.T).square().mean())
            optimizer.step()
        accepted = run.accepted
        with run.agreed():
            apart = run.stats.consensus
        run.close()
        return float((model.weight.detach() - truth).abs().max()), apart, accepted

    for error, apart, accepted in sl.simulate(case, 3, network=NETWORK).results:
        assert error < 0.02
        assert apart is not None
        assert apart < 0.2
        assert accepted > 0


def test_a_network_that_is_too_slow_drops_states() -> None:
    def case(world: sl.World) -> tuple[int, int]:
        model, optimizer, run = begin()
        for _ in range(2 * MAX_QUEUED_MESSAGES):
            world.compute(1e-3)
            push(model, optimizer, -1.0)
        run.close()
        return run.slots.counts.sent, run.slots.counts.dropped

    for sent, dropped in sl.simulate(case, 2, network=sl.Network(latency=1.0)).results:
        assert dropped > 0
        assert sent + dropped == 2 * MAX_QUEUED_MESSAGES


@pytest.mark.parametrize(("latency", "age"), [(0.05, 1), (0.15, 2)])
def test_staleness_is_the_age_of_what_was_accepted(latency: float, age: int) -> None:
    def case(world: sl.World) -> dict[int, int]:
        model, optimizer, run = begin(rate=1e-3, every=4)
        with torch.no_grad():
            model.weight.fill_(float(world.rank))
        world.compute(10.0 - world.runtime.now())  # both begin at the same moment
        for _ in range(40):
            world.compute(0.1)
            push(model, optimizer, -1.0 if world.rank == 0 else 1.0)
        counts = dict(run.stats.staleness_counts)
        run.close()
        return counts

    for counts in sl.simulate(case, 2, network=sl.Network(latency=latency)).results:
        assert set(counts) == {age}


# The loss of a worker, over many interleavings.


def lonely(world: sl.World) -> tuple[float, list[int]]:
    """Rank 2 is killed in its third step; the others go on, and end with the same model."""
    model, optimizer, run = begin()
    for number in range(6):
        if world.rank == 2 and number == 2:
            kill_soon(world)
        world.compute(1e-3)
        push(model, optimizer, -1.0)
    steps = run.stats.steps
    run.close()
    return model.weight.item(), [steps]


@pytest.mark.hunt
def test_the_others_go_on_without_a_lost_worker() -> None:
    def survived(simulation: sl.Simulation) -> None:
        first, second, _ = simulation.results
        for result in (first, second):
            assert not isinstance(result, BaseException), result
        assert first[1] == second[1] == [6]
        assert 0.0 < first[0] < 1.0, "six steps of 0.1, and a pull towards who is ahead"

    assert hunt(lonely, 3, SEEDS, invariant=survived, return_exceptions=True, timeout=20.0) == len(SEEDS)


def equal(world: sl.World) -> Tensor:
    model, optimizer, run = begin(part=1.0, pull=0.5)
    with torch.no_grad():
        model.weight.fill_(float(world.rank))
    for _ in range(5):
        world.compute(1e-3)
        push(model, optimizer, 0.5 - world.rank)
    run.close()
    return flat(model)


@pytest.mark.hunt
def test_all_end_with_the_same_model_whatever_the_order() -> None:
    def same(simulation: sl.Simulation) -> None:
        first = simulation.results[0]
        assert all(torch.equal(each, first) for each in simulation.results)
        # Nobody is drawn out of the range of what anybody started from or stepped to.
        assert -0.5 <= float(first) <= 3.0

    assert hunt(equal, 3, SEEDS, faults=[sl.faults.Delay(1e-3, probability=0.3)], invariant=same) == len(SEEDS)


# Training, and its board.


def test_the_loop_trains_and_evaluates_on_windows(tmp_path: Any) -> None:
    def case(world: sl.World) -> tuple[float | None, int, str]:
        settings = Settings(strategy=OneSided(pull=0.5), epochs=2, checkpoint_every=0)  # type: ignore[arg-type]
        outcome = train(build("digits"), settings, world=world, folder=str(tmp_path / "run"))
        return outcome.test, outcome.steps, outcome.stopped_by

    for test, steps, reason in sl.simulate(case, 2, network=NETWORK).results:
        assert test is not None
        assert test > 0.5
        assert (steps, reason) == (34, "epochs")


def test_posts_and_a_wish_to_stop_reach_all() -> None:
    def case(world: sl.World) -> tuple[list[tuple[str, float]], int]:
        model, optimizer, run = begin()
        board = run.control_channel()
        for number in range(30 if world.rank == 1 else 2):
            board.post(f"from {world.rank}", [number])
        world.barrier()
        posts = board.read_posts(0)
        world.barrier()
        last = {post.kind: post.values[-1] for post in posts}
        assert len([post for post in posts if post.kind == "from 1"]) == 30
        board.post("again", [world.rank])
        world.barrier()
        assert len([post for post in board.read_posts(posts[-1].number) if post.kind == "again"]) == 3
        steps = 0
        while not board.stop_requested():
            world.compute(0.1)
            push(model, optimizer, -1.0)
            steps += 1
            if world.rank == 2 and steps == 3:
                board.request_stop()
        run.close()
        return sorted(last.items()), steps

    for last, steps in sl.simulate(case, 3, network=NETWORK).results:
        assert last == [("from 0", 1.0), ("from 1", 29.0), ("from 2", 1.0)]
        assert 3 <= steps <= 4


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffers": 0}, r"onesided\(buffers=0\): it must be a whole number, at least 1"),
        ({"every": 0}, r"onesided\(every=0\)"),
        ({"part": 0.0}, r"onesided\(part=0.0\): a number above 0, at most 1"),
        ({"pull": 1.5}, r"onesided\(pull=1.5\): a number above 0, at most 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.errors.SpecError, match=message):
        OneSided(**options)


def test_a_codec_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        sl.init(),
        pytest.raises(sl.errors.IncompatibleError, match=r"nobody is there to decode quantize\(4\): leave the"),
    ):
        sl.distribute(model, optimizer, strategy=OneSided(), codec="quantize(4)")
