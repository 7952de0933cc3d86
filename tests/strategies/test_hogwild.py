"""One copy of the weights, many writers: nothing lost on the simulator, and what real processes make of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.control import ControlChannel
from syncline.reduction import Communicator
from syncline.strategies import RunSettings, strategy_run
from syncline.testing import Pool, hunt
from syncline.transports.faults import Kill, Slow
from tests.launch.runs import Runs, wait_for
from tests.strategies.cases import backward, data, flat, mlp
from tests.strategies.hogwild_cases import Tagged, ask_for_different_sizes, learn_digits, one_host, share_and_let_go

SEEDS = 1000 if os.environ.get("SYNCLINE_HUNT") else 20
WORKERS, STEPS = 4, 5


def begin(model: nn.Module, rate: float = 0.1, **options: Any) -> tuple[torch.optim.Optimizer, Any, ControlChannel]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = sl.distribute(model, optimizer, strategy="hogwild", algorithm="ring", **options)
    board = strategy_run(run).control_channel()
    assert board is not None
    return optimizer, run, board


def simulate(fn: Callable[[sl.World], Any], ranks: int, **options: Any) -> tuple[Any, ...]:
    return sl.simulate(fn, ranks, network=one_host(ranks), **options).results


# Nothing is lost, and every read is explained.


def tagged_steps(journal: list[tuple[int, int]]) -> Callable[[sl.World], nn.Parameter]:
    """Each step writes its own tag; the journal is this test's own."""

    def work(world: sl.World) -> nn.Parameter:
        model = Tagged(WORKERS, STEPS)
        optimizer, run, board = begin(model, rate=1.0)
        draw, latest = random.Random(world.rank), 0
        for step in range(STEPS):
            optimizer.zero_grad()
            world.compute(draw.random())
            read = {(int(worker), int(step)) for worker, step in model.seen.detach().nonzero()}
            assert read == set(journal), "a read shows every step that has ended, and no other"
            loss = model(world.rank, step)
            world.compute(draw.random())  # others step between this one's forward and its backward
            backward(loss)
            world.compute(draw.random())
            others = len(journal) - latest
            optimizer.step()
            journal.append((world.rank, step))
            latest = len(journal)
            assert run.stats.staleness == others
            assert run.stats.steps == board.steps()[world.rank] == step + 1
        return model.seen

    return work


def check_applied(simulation: sl.Simulation, journal: list[tuple[int, int]]) -> None:
    """The memory holds each step of the journal once, and nothing else."""
    weights = next(result for result in simulation.results if isinstance(result, nn.Parameter)).detach()
    wanted = torch.zeros(WORKERS, STEPS)
    for worker, step in journal:
        wanted[worker, step] += 1
    assert torch.equal(weights, wanted), f"{weights} is not {wanted}"
    for worker in set(range(WORKERS)) - set(simulation.killed):
        assert bool((weights[worker] == 1).all()), f"worker {worker} has not ended: {weights[worker]}"
    journal.clear()  # the next seed begins


@pytest.mark.hunt
@pytest.mark.parametrize("faults", [(), (Slow(1, 4.0),)])
def test_every_step_is_applied_once(faults: tuple[Slow, ...]) -> None:
    journal: list[tuple[int, int]] = []
    network, seeds = one_host(WORKERS), range(SEEDS)
    work = tagged_steps(journal)
    hunt(work, WORKERS, seeds, network=network, faults=faults, invariant=lambda found: check_applied(found, journal))


@pytest.mark.hunt
def test_a_killed_workers_steps_stay() -> None:
    """Not in chaos mode, where a kill may strike before there is anything shared."""
    journal: list[tuple[int, int]] = []
    for seed in range(SEEDS):
        victim, moment = seed % WORKERS, random.Random(seed).uniform(0.1, 6.0)
        faults = (Kill(victim, at=moment), Slow((seed + 1) % WORKERS, 3.0))
        found = sl.simulate(tagged_steps(journal), WORKERS, network=one_host(WORKERS), faults=faults, seed=seed)
        check_applied(found, journal)


def test_a_world_of_one_trains_as_plain_torch() -> None:
    def train(shared: bool) -> torch.Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = sl.distribute(model, optimizer, strategy="hogwild") if shared else None
        for x, y in torch.utils.data.DataLoader(data(), batch_size=8):
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if run is not None:
            assert strategy_run(run).asynchronous
            run.close()
        return flat(model)

    with sl.init():
        assert torch.equal(train(shared=True), train(shared=False))


# What is shared, and what is not.


def test_weights_are_shared_buffers_are_rank_0s() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
            self.tied = self.wide
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor = self.norm(x).sum() * self.wide.sum()
            return summed

    def case(world: sl.World) -> tuple[Any, ...]:
        model = Mixed()
        names = list(model.state_dict())
        optimizer, run, board = begin(model)
        assert list(model.state_dict()) == names
        assert model.tied is model.wide
        for _ in range(world.rank + 1):
            optimizer.zero_grad()
            backward(model(torch.randn(4, 3) + world.rank))
            optimizer.step()
        world.barrier()
        assert model.norm.num_batches_tracked is not None
        own = model.norm.num_batches_tracked.item()
        with run.agreed():
            agreed = model.norm.num_batches_tracked.item()
            mean = model.norm.running_mean.clone() if model.norm.running_mean is not None else torch.empty(0)
            assert run.state_dict()["local"]["buffers"]["norm.num_batches_tracked"].item() == own
        assert model.norm.num_batches_tracked.item() == own
        other = Mixed()
        board.load_weights(other)
        assert torch.equal(flat(other), flat(model))
        assert other.norm.running_mean is not None
        assert torch.equal(other.norm.running_mean, mean)
        return own, agreed, mean.tolist(), flat(model).tolist()

    first, second, third = simulate(case, 3)
    assert [result[0] for result in (first, second, third)] == [1, 2, 3], "each worker's statistics are its own"
    assert [result[1] for result in (first, second, third)] == [1, 1, 1], "rank 0's count"
    assert first[2:] == second[2:] == third[2:]


def test_a_closed_run_leaves_private_weights() -> None:
    def case(world: sl.World) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer, run, board = begin(model, rate=1.0)
        run.close()
        for _ in range(world.rank):
            optimizer.zero_grad()
            backward(-model(torch.ones(1, 1)).sum())
            optimizer.step()
        world.barrier()
        assert board.steps() == [0, 0, 0], "a closed run counts no more"
        return model.weight.item()

    assert simulate(case, 3) == (0.0, 1.0, 2.0)


def test_a_worker_that_fails_takes_private_weights_along() -> None:
    def case(world: sl.World) -> float:
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        _, run, _ = begin(model)
        if world.rank == 1:
            with pytest.raises(ValueError, match="mine"), run:
                raise ValueError("mine")
            nn.init.ones_(model.weight)
        world.compute(1.0)
        return model.weight.item()

    assert simulate(case, 2) == (0.0, 1.0)


def test_a_resumed_run_counts_on_with_each_workers_own_steps() -> None:
    def case(world: sl.World) -> list[int]:
        model = nn.Linear(2, 1)
        optimizer, run, board = begin(model)
        for _ in range(2 + world.rank):
            optimizer.step()
        world.barrier()
        state = run.state_dict()
        again = nn.Linear(2, 1)
        optimizer, resumed, board = begin(again)
        resumed.load_state_dict(state)
        world.barrier()
        assert resumed.stats.steps == 2 + world.rank
        optimizer.step()
        assert resumed.stats.staleness == 0, "the steps before the checkpoint are not stale ones"
        world.compute(0.1)  # the step counts are published at intervals
        return board.steps()

    assert simulate(case, 3) == ([3, 4, 5],) * 3


def test_anybody_can_stop_all() -> None:
    def case(world: sl.World) -> int:
        optimizer, run, board = begin(nn.Linear(1, 1))
        while not board.stop_requested():
            world.compute(1.0)
            optimizer.step()
            if world.rank == 2 and run.stats.steps == 3:
                board.request_stop()
        board.finish()
        return int(run.stats.steps)

    assert all(3 <= steps <= 4 for steps in simulate(case, 3))


# Refusals.


def test_several_hosts_are_refused_by_name() -> None:
    def case(world: sl.World) -> None:
        begin(nn.Linear(1, 1))

    two = sl.Network(ranks_per_host=2, inside=sl.Link(latency=1e-6, bandwidth=1e9))
    with pytest.raises(
        sl.errors.IncompatibleError, match=r"the 4 workers are on 2 hosts \(host0, host1\): run them on one"
    ):
        sl.simulate(case, 4, network=two)


def test_a_codec_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.init(), pytest.raises(sl.errors.IncompatibleError, match=r"quantize\(4\).*leave the codec out"):
        sl.distribute(model, optimizer, strategy="hogwild", codec="quantize(4)")


def test_a_model_that_is_not_on_the_cpu_is_refused() -> None:
    model = nn.Linear(1, 1, device="meta")  # as if on a GPU; distribute itself refuses a model without memory
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        sl.init() as world,
        pytest.raises(sl.errors.IncompatibleError, match="weight is on meta: keep the model on the CPU"),
    ):
        sl.strategies.Hogwild().attach(model, optimizer, Communicator(world, "auto"), RunSettings())


def test_nonfinite_gradients_do_not_reach_the_others() -> None:
    def case(world: sl.World) -> str:
        model = nn.Linear(1, 1)
        optimizer, _, _ = begin(model, check_finite=True)
        backward(model(torch.full((1, 1), float("inf") if world.rank == 1 else 1.0)).sum())
        try:
            optimizer.step()
        except sl.errors.DivergedError as error:
            return str(error)
        finally:
            world.barrier()
        return "finite" if bool(torch.isfinite(flat(model)).all()) else "not finite"

    good, bad = simulate(case, 2)
    assert good == "finite"
    assert "gradient of weight on rank 1" in bad


# Real processes.


@pytest.mark.xdist_group("gloo")
def test_two_processes_learn_digits_on_one_copy(gloo: Pool) -> None:
    results = gloo.run(learn_digits, 2, 12)
    for before, after, steps, sent in results:
        assert before < 0.4
        assert after > 0.88
        assert steps == [12 * 17, 12 * 17]
        assert sent == 0
    assert results[0][1] == results[1][1], "both see the same weights"


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("size", [2, 5])
def test_shared_memory_has_no_name_and_is_let_go(gloo: Pool, size: int) -> None:
    for during, after in gloo.run(share_and_let_go, size):
        assert during == "/memfd:syncline-shared (deleted)"
        assert after == ""


@pytest.mark.xdist_group("zeromq")
def test_shared_memory_on_zeromq(zeromq: Pool) -> None:
    assert zeromq.run(share_and_let_go, 3) == [["/memfd:syncline-shared (deleted)", ""]] * 3


@pytest.mark.xdist_group("gloo")
def test_different_sizes_are_refused_on_all_ranks(gloo: Pool) -> None:
    for told in gloo.run(ask_for_different_sizes, 3):
        assert told.startswith("UnsupportedError: rank 1 does not see the memory of rank 0 (")


KILLED = """
import signal, torch, syncline as sl
from torch.nn import functional as F
from syncline.runtime import RealRuntime
with sl.init() as world:
    torch.manual_seed(0)
    x, truth = torch.randn(256, 4), torch.randn(4, 1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = sl.distribute(model, optimizer, strategy="hogwild")
    board = run.control_channel()
    for step in range(400):
        if rank == 0 and step == 20:
            board.post("ends", [])  # publishes the step count too
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and step == 20:
            until("killed")
        optimizer.zero_grad()
        F.mse_loss(model(x), x @ truth).backward()
        optimizer.step()
    post("end", f"{float((model.weight.T - truth).abs().max()):.6f} {board.steps()}")
    run.close()
"""


def test_a_killed_worker_does_not_stop_the_other(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", "--on-failure", "continue", runs.script(KILLED))
    wait_for(lambda: "SIGKILL" in run.all_err or run.process.exitcode is not None, "rank 0 is killed")
    runs.post("killed")
    error, steps = runs.read("end").split(" ", 1)
    run.finish()
    assert float(error) < 0.01
    assert steps == "[20, 400]"
    runs.assert_nothing_left()
