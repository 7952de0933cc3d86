"""Strategies of the parameter server with uneven data: nobody waits for a step of a worker that waits for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.testing import hunt
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp
from tests.strategies.served_cases import servers

WORKERS, EPOCHS, SAMPLES, BATCH = 3, 2, 25, 2
"""Worker 0 has five batches in an epoch, the others four."""
MAX_SECONDS = 60.0
"""A wait that ends at its timeout takes 300 s."""
SYNCHRONOUS = ("bsp", "ssp(slack=0)", "master", "master(masters=2)")
STRATEGIES = (
    *SYNCHRONOUS,
    "bsp(filters='significant(1e-4)')",
    "ssp(slack=1)",
    "master(fraction=0.6)",
    "master(fraction=0.6, masters=2)",
    "master(sync=False)",
    "master(sync=False, masters=2)",
    "downpour(push=2, fetch=2)",
    "easgd(sync=False, period=2)",
    "easgd(sync=False, period=2, centres=2)",
)
PLACES = ("after", "inside", "save", "save the model", "reload", "load", "after", "")
"""Where all workers wait for each other, by epoch; in the last one only at its end."""
AFTER = ("after",) * EPOCHS


class Training:
    """One model of a worker in training."""

    def __init__(self, strategy: str) -> None:
        self.model = mlp()
        self.optimizer = OPTIMIZERS["sgd"](self.model.parameters())
        self.run = sl.distribute(self.model, self.optimizer, strategy=strategy, algorithm="ring")

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        backward(nn.functional.cross_entropy(self.model(x), y))
        self.optimizer.step()

    def agreed(self) -> Tensor:
        with self.run.agreed():
            return flat(self.model).clone()


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(SAMPLES, 6, generator=draw), torch.randint(0, 3, (SAMPLES,), generator=draw))
    return DataLoader(data, batch_size=BATCH, shuffle=True)


def uneven(strategy: str, places: Sequence[str], folder: Path) -> Callable[[sl.World], list[Tensor]]:
    """A training whose workers wait for each other in one place of each epoch. Returns what they agree on."""

    def work(world: sl.World) -> list[Tensor]:
        training = Training(strategy)
        run, model, found = training.run, training.model, list[Tensor]()
        with run:
            shard = run.shard(loader())
            for epoch, place in enumerate(places):
                for number, (x, y) in enumerate(shard):
                    training.step(x, y)
                    if place == "inside" and number == 2:
                        found.append(training.agreed())
                if place == "after":
                    found.append(training.agreed())
                elif place == "save":
                    sl.save(folder, step=epoch, model=model, optimizer=training.optimizer, run=run)
                elif place == "save the model":
                    sl.save(folder, step=epoch, model=model)
                elif place == "load":
                    sl.load(folder, step=2, model=model, optimizer=training.optimizer, run=run)
                elif place == "reload":
                    model.load_state_dict({name: 0.5 * each for name, each in mlp().state_dict().items()})
        return [*found, flat(model)]

    return work


def check(found: sl.Simulation) -> None:
    """All workers agree, and no wait has ended at its timeout."""
    assert found.time < MAX_SECONDS
    for result in found.results:
        for one, other in zip(result, found.results[0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nobody_waits_for_a_worker_that_waits(strategy: str, tmp_path: Path) -> None:
    for dedicated in (0, WORKERS):
        work = uneven(strategy, PLACES, tmp_path / str(dedicated))
        check(sl.simulate(work, WORKERS, extra=servers(WORKERS, dedicated)))


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_synchronous_steps_are_those_of_allreduce(strategy: str, tmp_path: Path) -> None:
    """Each step has the mean gradient of the workers with data, also the first step after a wait."""
    expected = sl.simulate(uneven("allreduce", AFTER, tmp_path), WORKERS).results[0]

    def same(found: sl.Simulation) -> None:
        check(found)
        for one, other in zip(found.results[0], expected, strict=True):
            assert torch.allclose(one, other, atol=1e-5)

    seeds = range(100 if os.environ.get("SYNCLINE_HUNT") else 2)
    hunt(uneven(strategy, AFTER, tmp_path), WORKERS, seeds, invariant=same)


@pytest.mark.parametrize("strategies", [("bsp", "ssp(slack=1)"), ("downpour", "bsp"), ("master(masters=2)", "bsp")])
def test_several_runs_in_one_process(strategies: tuple[str, str]) -> None:
    """All wait in one run, or have closed it, and the others step in both."""

    def work(world: sl.World) -> list[Tensor]:
        first, second = (Training(strategy) for strategy in strategies)
        shard, found = first.run.shard(loader()), list[Tensor]()
        for _ in range(EPOCHS):
            for x, y in shard:
                first.step(x, y)
                second.step(x, y)
            found.append(first.agreed())
        for x, y in shard:
            first.step(x, y)
            second.step(x, y)
        first.run.close()
        second.run.close()
        return [*found, flat(first.model), flat(second.model)]

    for seed in range(2):
        check(sl.simulate(work, WORKERS, seed=seed, chaos=True))
