"""SSP's bound: what every read has in it, who may be how far ahead, and who waits for whom."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

import syncline as sl
from syncline.errors import PeerLostError, SpecError
from syncline.strategies import strategy_run
from syncline.strategies.parameter_server import ParameterServerRun
from syncline.testing import hunt
from syncline.transports.faults import Kill, Slow
from tests.strategies.served_cases import Tags, apart, results, servers, step_tag

SEEDS = 1000 if os.environ.get("SYNCLINE_HUNT") else 4
WORKERS, STEPS = 4, 6


def tagged(slack: int, journal: set[tuple[int, int]], steps: int = STEPS, whole: bool = True) -> Callable[..., float]:
    """Every read is checked against what must be in it and what may be; the journal is this test's own."""

    def work(world: sl.World) -> float:
        model = Tags(world.size, steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=world.size)
        run = sl.distribute(model, optimizer, strategy=f"ssp(slack={slack})", algorithm="ring")
        draw = random.Random(world.rank)
        for clock in range(steps):
            read = model.read() if whole else {(int(w), int(c)) for w, c in model.seen.detach().nonzero()}
            assert read <= journal, f"{read - journal} were never pushed"
            alive = range(world.size) if whole else [world.rank]
            due = {(worker, old) for worker in alive for old in range(clock - slack)}
            assert due <= read, f"a read at clock {clock} with slack {slack} lacks {due - read}"
            own = {(world.rank, old) for old in range(clock)}
            assert own <= read, f"a read at clock {clock} lacks this worker's own {own - read}"
            assert run.stats.staleness <= slack
            world.compute(draw.choice([0.1, 0.2, 2.0]))
            journal.add((world.rank, clock))
            step_tag(model, optimizer, world.rank, clock)
        run.close()
        return float(world.runtime.now())

    return work


@pytest.mark.hunt
@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("faults", [(), (Slow(1, 4.0),)])
def test_no_read_breaks_the_bound(slack: int, faults: tuple[Slow, ...]) -> None:
    for seed in range(SEEDS):
        hunt(tagged(slack, set()), WORKERS, [seed], faults=faults)


@pytest.mark.hunt
def test_the_bound_holds_with_dedicated_servers() -> None:
    for seed in range(SEEDS):
        results(tagged(2, set()), WORKERS, dedicated=2, seed=seed, chaos=True)


@pytest.mark.hunt
def test_no_worker_waits_for_a_killed_one() -> None:
    """Not in chaos mode, where a kill may strike before there is a space."""
    for seed in range(SEEDS):
        journal: set[tuple[int, int]] = set()
        faults = (Kill(seed % WORKERS, at=random.Random(seed).uniform(0.1, 5.0)), Slow((seed + 1) % WORKERS, 3.0))
        found = sl.simulate(
            tagged(1, journal, whole=False),
            WORKERS,
            faults=faults,
            seed=seed,
            extra=servers(WORKERS, 2),
        )
        assert found.killed == (seed % WORKERS,)
        assert all(isinstance(found.results[rank], float) for rank in range(WORKERS) if rank not in found.killed)
        assert {(rank, STEPS - 1) for rank in range(WORKERS) if rank not in found.killed} <= journal


@pytest.mark.parametrize("slack", [1, 2, 4])
def test_a_fast_worker_finishes_slack_and_one_steps_then_waits(slack: int) -> None:
    def work(world: sl.World) -> object:
        model = Tags(world.size, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=world.size)
        run = sl.distribute(model, optimizer, strategy=f"ssp(slack={slack})", algorithm="ring")
        served = strategy_run(run)
        assert isinstance(served, ParameterServerRun)
        seen = None
        if world.rank == 1:
            world.compute(100.0)
            seen = served.client.steps()  # a step counts at the servers before its read is answered
        for step in range(10):
            world.compute(1.0)
            step_tag(model, optimizer, world.rank, step)
        run.close()
        return seen

    assert sl.simulate(work, ranks=2).results[1] == [slack + 1, 0]


def test_slack_helps_if_slowness_moves_between_workers() -> None:
    """A different worker is slow each time: who is ahead goes on meanwhile."""

    def pace(rank: int, step: int) -> float:
        return 4.0 if rank == (step // 2) % 4 else 1.0

    network = sl.Network(latency=1e-6, bandwidth=1e10)
    times = {
        spec: sl.simulate(apart("sgd", spec, 32, pace), 4, network=network).time for spec in ("bsp", "ssp(slack=3)")
    }
    assert times["ssp(slack=3)"] < 0.6 * times["bsp"]


def test_staleness_is_counted() -> None:
    def work(world: sl.World) -> dict[int, int]:
        model = Tags(world.size, 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=world.size)
        run = sl.distribute(model, optimizer, strategy="ssp(slack=2)", algorithm="ring")
        for step in range(12):
            world.compute(1.0 + 3.0 * world.rank)
            step_tag(model, optimizer, world.rank, step)
        run.close()
        return run.stats.staleness_counts

    fast, slow = sl.simulate(work, ranks=2).results
    assert sum(fast.values()) == sum(slow.values()) == 12
    assert max(fast) == 2
    assert set(slow) == {0}


def test_a_timeout_names_the_clocks() -> None:
    def work(world: sl.World) -> None:
        model = Tags(world.size, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sl.distribute(model, optimizer, strategy="ssp(slack=1)", algorithm="ring")
        world.compute(1000.0 * world.rank)
        for step in range(10):
            step_tag(model, optimizer, world.rank, step)

    with pytest.raises(PeerLostError, match=r"at clock 2 and reads when all are at 1, .* the slowest was at 0"):
        sl.simulate(work, ranks=2, timeout=30.0)


@pytest.mark.parametrize("slack", [-1, 1.5, True, "'much'"])
def test_a_slack_is_a_number_of_steps(slack: object) -> None:
    with pytest.raises(SpecError, match="slack"):
        sl.strategies.build_strategy(f"ssp(slack={slack})")
