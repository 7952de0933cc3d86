"""Elastic jobs with asynchronous strategies on the simulator: workers are killed and join, and the others go on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import syncline as sl
from syncline.errors import UnsupportedError
from syncline.server import network_of, serve, server_network
from syncline.strategies.base import strategy_run
from syncline.strategies.parameter_server import ParameterServerRun
from syncline.testing import hunt_cases
from syncline.transports.faults import Fault, Join
from syncline.transports.simulated import kill_rank
from syncline.world import Simulation, World
from tests.data.cases import Numbers
from tests.hunting import seeds

WORKERS, SERVERS, EPOCHS = 3, 2, 2
STRATEGIES = {
    "ssp": "ssp(slack=1)",
    "bsp": "bsp",
    "downpour": "downpour(push=2, fetch=3, rule='sgd(1.0)')",
    "master": "master(sync=False)",
    "easgd": "easgd(sync=False, period=2)",
}


@dataclass
class Journal:
    """What all workers of a simulation have done, in virtual order."""

    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By epoch and sample: the steps that have ended with it."""
    read: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By epoch and sample: the batches that were read with it."""
    clocks: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a worker has at its end."""

    weights: Tensor
    rate: float
    agreed: tuple[Tensor, ...]


def member_of(world: World) -> int:
    assert world.elastic is not None
    return world.elastic.limits.member


def train(world: World, strategy: str, samples: int, victims: Mapping[int, int], journal: Journal) -> Result:
    """Sample i changes row i of the model alone, by −1 times the scale of the push."""
    member, steps = member_of(world), 0
    model = torch.nn.Embedding(samples, 2)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    agreed = []
    with sl.distribute(model, optimizer, strategy=strategy, algorithm="auto") as run:
        inner = strategy_run(run)
        assert isinstance(inner, ParameterServerRun)
        shard = run.shard(DataLoader(Numbers(samples), batch_size=2, shuffle=True))
        for epoch in range(shard.epoch, EPOCHS):
            for batch in shard:
                journal.read.update((epoch, int(each)) for each in batch)
                if victims.get(member) == steps:
                    kill_rank(world.transport)
                steps += 1
                world.compute(0.01 * (1 + member % 2))
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                journal.trained.update((epoch, int(each)) for each in batch)
                journal.clocks.setdefault(member, []).append(inner.client.clock)
            with run.agreed():
                agreed.append(model.weight.detach().clone())
            scheduler.step()
    return Result(model.weight.detach().clone(), float(optimizer.param_groups[0]["lr"]), tuple(agreed))


def simulated(
    strategy: str, samples: int, victims: Mapping[int, int], joins: Sequence[Fault], seed: int
) -> tuple[Simulation, Journal]:
    """With half of the seeds, each shard lives on both servers."""
    journal, replicas = Journal(), 1 + seed // 2 % 2

    def train_with_replicas(world: World) -> Result:
        server_network(world, replicas)
        return train(world, strategy, samples, victims, journal)

    found = sl.simulate(
        train_with_replicas,
        WORKERS,
        elastic=(1, WORKERS + 2),
        extra=[lambda transport: serve(network_of(transport, WORKERS, SERVERS, replicas=replicas, elastic=True))]
        * SERVERS,
        faults=joins,
        seed=seed,
        chaos=seed % 2 == 1,
        return_exceptions=True,
    )
    return found, journal


def outcome(found: Simulation) -> list[Result]:
    """The results of the workers that ended well. A newcomer may come too late."""
    late = ("the job has ended", "not admitted")
    for result in found.results:
        if isinstance(result, BaseException) and not any(words in str(result) for words in late):
            raise result
    return [result for result in found.results if isinstance(result, Result)]


def survive(strategy: str) -> Callable[[int], None]:
    """A case for each seed: up to two of three workers are killed, up to two join."""

    def check(seed: int) -> None:
        draw = random.Random(seed)
        victims = {member: draw.randrange(8) for member in draw.sample(range(WORKERS), draw.randint(0, 2))}
        samples = draw.choice([16, 25, 36])
        joins = [Join(at=draw.uniform(0, 0.15)) for _ in range(draw.randint(0, 2))]
        found, journal = simulated(strategy, samples, victims, joins, seed)
        results = outcome(found)
        assert len([each for each in found.results[:WORKERS] if each is not None]) >= WORKERS - len(victims)
        for result in results:
            assert torch.equal(result.weights, results[0].weights)
            assert result.rate == 0.5**EPOCHS
        full = [each for each in found.results[:WORKERS] if isinstance(each, Result)]
        for at_end in zip(*(each.agreed for each in full), strict=True):
            assert all(torch.equal(each, at_end[0]) for each in at_end)
        for epoch in range(EPOCHS):
            for sample in range(samples):
                assert journal.trained[epoch, sample] >= 1, (epoch, sample, victims, joins)
                assert journal.read[epoch, sample] <= 1 + len(found.killed), (epoch, sample, victims, joins)
        for clocks in journal.clocks.values():
            assert clocks == sorted(clocks)
        if "easgd" not in strategy:  # local steps since the last exchange are lost with their worker
            assert all((each.weights < 0).all() for each in results), "every sample has changed the servers' weights"

    return check


@pytest.mark.hunt
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", STRATEGIES)
def test_workers_leave_and_join(name: str) -> None:
    hunt_cases(survive(STRATEGIES[name]), seeds(6 if name == "ssp" else 2), f"survive({STRATEGIES[name]!r})({{seed}})")


@pytest.mark.parametrize("joins", [[], [Join(at=0.12)]])
def test_workers_wait_in_no_other_run_of_the_process(joins: Sequence[Fault]) -> None:
    """Workers claim different numbers of batches: none waits at the end of an epoch for a step in the second run."""

    def train_two(world: World) -> float:
        models = [torch.nn.Embedding(16, 2) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        with (
            sl.distribute(models[0], optimizers[0], strategy="ssp(slack=1)", algorithm="auto") as run,
            sl.distribute(models[1], optimizers[1], strategy="ssp(slack=1)", algorithm="auto"),
        ):
            for batch in run.shard(DataLoader(Numbers(16), batch_size=2)):
                world.compute(0.05 * (1 + 3 * member_of(world)))
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
        return world.runtime.now()

    servers = [lambda transport: serve(network_of(transport, 2, 1, elastic=True))]
    found = sl.simulate(train_two, 2, elastic=(1, 3), extra=servers, faults=joins, return_exceptions=True)
    assert all(ended < 10 for ended in found.results[:2]), "no wait has ended by its timeout"
    for newcomer in found.results[2:]:
        assert isinstance(newcomer, UnsupportedError)
        assert "2 runs train" in str(newcomer)
    assert len(found.results) == 2 + len(joins)
