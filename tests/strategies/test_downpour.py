"""Downpour: every gradient is in exactly one push, whatever is under way, and nobody waits for anybody."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.errors import SpecError
from syncline.testing import hunt
from syncline.transports.faults import Delay, Kill, Slow
from tests.strategies.cases import backward
from tests.strategies.served_cases import Tags, apart, results, servers, step_tag

SEEDS = 1000 if os.environ.get("SYNCLINE_HUNT") else 4
WORKERS, STEPS = 3, 7
SUM = "rule='sgd(lr=1.0)'"
"""At the servers: minus the sum of what was pushed."""


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


def distributed(model: nn.Module, strategy: str, rate: float = 1.0) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return optimizer, sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")


def agreed(run: Any) -> torch.Tensor:
    with run.agreed():
        found: torch.Tensor = next(run.model.parameters()).detach().clone()
    return found


def test_adagrad_at_the_server() -> None:
    """γ=1, pushes of 3 then 4: steps of 3/√9 and 4/√25."""

    def work(world: sl.World) -> list[float]:
        model = One()
        optimizer, run = distributed(model, "downpour(lr=1.0, prefetch=False)", rate=0.5)
        steps, before = [], 0.0
        for gradient in (3.0, 4.0):
            optimizer.zero_grad()
            backward(model(gradient))
            optimizer.step()
            steps.append(before - model.weight.item())
            before = model.weight.item()
        run.close()
        return steps

    assert sl.simulate(work, ranks=1).results[0] == pytest.approx([1.0, 0.8])


def totals(spec: str, steps: int = STEPS, whole: bool = True) -> Callable[[sl.World], Any]:
    """Tags, each applied once when everybody has finished."""

    def work(world: sl.World) -> Any:
        model = Tags(world.size, steps)
        optimizer, run = distributed(model, spec)
        control, draw = run.control_channel(), random.Random(world.rank)
        for step in range(steps):
            world.compute(draw.choice([0.01, 0.1, 1.0]))
            step_tag(model, optimizer, world.rank, step)
        control.finish()
        taken = control.steps()[world.rank]
        if whole:
            world.barrier()
            assert torch.equal(agreed(run), torch.full((world.size, steps), -1.0)), agreed(run)
        run.close()
        return taken

    return work


@pytest.mark.hunt
@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (3, 2), (2, 5), (4, 1)])
@pytest.mark.parametrize("prefetch", [False, True])
def test_what_is_applied_is_the_sum_of_all_gradients(push: int, fetch: int, prefetch: bool) -> None:
    spec = f"downpour(push={push}, fetch={fetch}, {SUM}, prefetch={prefetch})"
    for seed in range(SEEDS):
        invariant = lambda found: _all(found.results, STEPS)  # noqa: E731
        hunt(totals(spec), WORKERS, [seed], faults=(Slow(1, 4.0),), invariant=invariant)


def _all(found: tuple[Any, ...], wanted: int) -> None:
    assert found == (wanted,) * len(found), f"steps as the board knows them: {found}"


def test_nothing_is_lost_while_a_push_is_in_flight() -> None:
    """A push takes longer than a step; its row travels by itself, and the next gradients must not come into it."""

    def work(world: sl.World) -> torch.Tensor:
        model = nn.Linear(20_000, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer, run = distributed(model, f"downpour(push=1, fetch=50, {SUM}, prefetch=False)")
        under_way = []
        for step in range(8):
            world.compute(0.1)
            optimizer.zero_grad()
            backward(model(torch.full((1, 20_000), step + 1.0)).sum())
            optimizer.step()
            under_way.append(not all(future.done() for future in run.pushed))
        assert any(under_way)
        run.control_channel().finish()
        world.barrier()
        found = agreed(run)
        run.close()
        return found

    for found in results(work, 2, dedicated=1, network=sl.Network(latency=1e-3, bandwidth=1e6)):
        assert torch.equal(found, torch.full_like(found, -2.0 * 36))


def test_a_push_in_flight_is_in_a_checkpoint() -> None:
    """A state is told while the latest push is on a slow link: it is at the servers, or unsent, and not lost."""

    def work(world: sl.World) -> tuple[bool, torch.Tensor, torch.Tensor]:
        model = nn.Linear(20_000, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer, run = distributed(model, f"downpour(push=2, fetch=50, {SUM}, prefetch=False)")
        for _ in range(4 if world.rank else 5):
            optimizer.zero_grad()
            backward(model(torch.ones(1, 20_000)).sum())
            optimizer.step()
        world.barrier()
        under_way = not all(future.done() for future in run.pushed)
        state = run.state_dict()
        world.barrier()  # as saving does
        run.close()
        shared, local = state["shared"]["state"], state["local"]["strategy"]
        return under_way, shared["weights"]["weight"], local["unsent"]["weight"]

    slow = Delay(5.0, source=1, to=2)
    found = results(work, 2, dedicated=1, faults=(slow,))
    assert any(under_way for under_way, _, _ in found)
    for _, weights, _ in found:
        assert torch.equal(sum((unsent for _, _, unsent in found), -weights), torch.full_like(weights, 9.0))


def six_steps(strategy: str) -> tuple[list[float], float]:
    """One worker, whose local rate is 100 times the servers': its weights tell what came when; and theirs at last."""

    def work(world: sl.World) -> tuple[list[float], float]:
        model = One()
        optimizer, run = distributed(model, strategy, rate=100.0)
        seen = []
        for _ in range(6):
            optimizer.zero_grad()
            backward(model(1.0))
            optimizer.step()
            seen.append(model.weight.item())
        last = agreed(run).item()
        run.close()
        return seen, last

    found: tuple[list[float], float] = sl.simulate(work, ranks=1).results[0]
    return found


def test_pushes_and_fetches_come_when_they_are_due() -> None:
    seen, _ = six_steps(f"downpour(push=2, fetch=3, {SUM}, prefetch=False)")
    #          local   local   fetched: one push of 2      …      fetched: three pushes of 2
    assert seen == [-100.0, -200.0, -2.0, -102.0, -202.0, -6.0]


def test_a_prefetch_is_one_step_older() -> None:
    seen, last = six_steps(f"downpour(push=1, fetch=3, {SUM})")
    assert [*seen, last] == [-100.0, -200.0, -2.0, -102.0, -202.0, -5.0, -6.0]


def test_a_prefetch_overlaps_with_the_step() -> None:
    network = sl.Network(latency=0.1, bandwidth=1e9)
    times = {
        prefetch: sl.simulate(
            apart("sgd", f"downpour(push=2, fetch=2, prefetch={prefetch})", 20, lambda rank, step: 1.0),
            2,
            network=network,
        ).time
        for prefetch in (False, True)
    }
    assert times[True] < times[False] - 9 * 0.2  # a round trip for each fetch but the first


def test_no_worker_waits_for_a_slow_one() -> None:
    def work(world: sl.World) -> float:
        model = Tags(world.size, 20)
        optimizer, run = distributed(model, f"downpour({SUM})")
        for step in range(20):
            world.compute(1.0 if world.rank else 10.0)
            step_tag(model, optimizer, world.rank, step)
        ended = world.runtime.now()
        run.close()
        return float(ended)

    slow, *fast = sl.simulate(work, ranks=3).results
    assert slow >= 200.0
    assert all(ended < 25.0 for ended in fast)


@pytest.mark.parametrize("push", [1, 2])
def test_worker_0_warms_up_alone(push: int) -> None:
    """The others' first gradients are taken at weights that have the warm-up in them."""

    def work(world: sl.World) -> set[tuple[int, int]]:
        model = Tags(world.size, 8)
        optimizer, run = distributed(model, f"downpour(push={push}, warmup=4, {SUM})")
        model.eval()
        model(world.rank, 0)  # looking at it does not wait
        model.train()
        for step in range(8):
            world.compute(1.0)
            optimizer.zero_grad()
            loss = model(world.rank, step)
            if step == 0:
                first = {(int(worker), int(step)) for worker, step in model.seen.detach().nonzero()}
            backward(loss)
            optimizer.step()
        run.close()
        return first

    results = sl.simulate(work, ranks=3).results
    assert results[0] == set()
    for seen in results[1:]:
        assert {(0, step) for step in range(4)} <= seen
        assert {worker for worker, _ in seen} == {0}


def test_waiting_workers_continue_if_worker_0_ends_early() -> None:
    def work(world: sl.World) -> int:
        model = Tags(world.size, 4)
        optimizer, run = distributed(model, f"downpour(push=2, warmup=100, {SUM})")
        for step in range(3 if world.rank == 0 else 4):
            step_tag(model, optimizer, world.rank, step)
        run.close()
        return int(run.stats.steps)

    assert sl.simulate(work, ranks=3).results == (3, 4, 4)


@pytest.mark.hunt
def test_the_others_continue_without_a_killed_worker() -> None:
    for seed in range(SEEDS):
        victim = seed % WORKERS
        faults = (Kill(victim, at=random.Random(seed).uniform(0.05, 3.0)),)
        found = sl.simulate(
            totals(f"downpour(push=2, fetch=3, {SUM})", whole=False),
            WORKERS,
            faults=faults,
            seed=seed,
            extra=servers(WORKERS, 2),
        )
        assert [found.results[rank] for rank in range(WORKERS) if rank not in found.killed] == [STEPS] * (
            WORKERS - len(found.killed)
        )


def test_the_servers_rate_follows_the_schedule() -> None:
    """lr is the servers' own, and falls with the optimizer's."""

    def work(world: sl.World) -> float:
        model = One()
        optimizer, run = distributed(model, "downpour(rule='sgd', lr=1.0, prefetch=False)", rate=0.25)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(1.0))
            optimizer.step()
            scheduler.step()
        run.close()
        return model.weight.item()

    assert sl.simulate(work, ranks=1).results[0] == -1.75  # 1 + 1/2 + 1/4


def test_a_run_continues_from_its_state() -> None:
    """The replica and what it has not pushed yet are each worker's own."""

    def train(model: Tags, run: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            step_tag(model, optimizer, run.world.rank, step)

    def work(world: sl.World) -> tuple[torch.Tensor, torch.Tensor]:
        spec = f"downpour(push=4, fetch=8, {SUM})"
        model = Tags(world.size, 8)
        optimizer, run = distributed(model, spec)
        train(model, run, optimizer, range(6))
        world.barrier()
        state = run.state_dict()
        world.barrier()
        run.close()
        fresh = Tags(world.size, 8)
        optimizer, run = distributed(fresh, spec)
        run.load_state_dict(state)
        own = fresh.seen.detach().clone()
        train(fresh, run, optimizer, range(6, 8))
        run.control_channel().finish()
        world.barrier()
        found = agreed(run)
        run.close()
        return own, found

    for rank, (own, found) in enumerate(results(work, 2)):
        assert own[rank].tolist() == [-1.0] * 6 + [0.0] * 2, "the replica, with all of its own steps"
        assert torch.equal(found, torch.full((2, 8), -1.0)), "each gradient once"


@pytest.mark.parametrize(
    "arguments", ["push=0", "fetch=0", "push=True", "warmup=-1", "lr=0", "lr='x'", "prefetch=1", "rule='nonsense'"]
)
def test_contradictory_arguments_are_refused(arguments: str) -> None:
    with pytest.raises(SpecError):
        sl.strategies.build_strategy(f"downpour({arguments})")
