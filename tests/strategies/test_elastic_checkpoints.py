"""`sl.save` and `sl.load` in elastic jobs on the simulator, by workers that join them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import syncline as sl
from syncline.server import network_of, serve
from syncline.transports.faults import Join, Kill
from syncline.world import World
from tests.data.cases import Numbers

SAMPLES = 24


def model_of_zeros() -> tuple[torch.nn.Embedding, torch.optim.Optimizer]:
    model = torch.nn.Embedding(SAMPLES, 2)
    torch.nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def train(world: World, folder: Path, strategy: str, epochs: int, resumes: bool) -> tuple[str, float]:
    """Save after each epoch. Returns the last checkpoint's name, and the sum of the weights."""
    model, optimizer = model_of_zeros()
    with sl.distribute(model, optimizer, strategy=strategy, algorithm="auto") as run:
        shard = run.shard(DataLoader(Numbers(SAMPLES), batch_size=2))
        if resumes:
            loaded = sl.load(folder, run=run)
            assert loaded is not None
            assert loaded["seed"] == 7
        saved = sl.save(folder, step=run.stats.steps, run=run, seed=7)
        for _ in range(shard.epoch, epochs):
            for batch in shard:
                world.compute(0.05)
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            saved = sl.save(folder, step=run.stats.steps, run=run, seed=7)
    return saved.name, float(model.weight.detach().sum())


def test_newcomers_run_scripts_that_save_and_load(tmp_path: Path) -> None:
    sl.simulate(lambda world: train(world, tmp_path, "allreduce", 1, resumes=False), 2)
    found = sl.simulate(
        lambda world: train(world, tmp_path, "allreduce", 4, resumes=True), 2, elastic=(1, 3), faults=[Join(at=0.12)]
    )
    assert len(found.results) == 3
    assert len(set(found.results)) == 1, "the newcomer has the weights of the others, and the last save contains it"
    assert (tmp_path / found.results[0][0]).is_dir()


def test_a_worker_and_one_that_has_joined_save_together(tmp_path: Path) -> None:
    def run_alone(world: World) -> str:
        model, optimizer = model_of_zeros()
        with sl.distribute(model, optimizer, strategy="ssp(slack=1)", algorithm="auto") as run:
            for batch in run.shard(DataLoader(Numbers(SAMPLES), batch_size=2)):
                world.compute(0.05)
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            saved = sl.save(tmp_path, step=run.stats.steps, run=run)
            assert sl.save(tmp_path / "model", step=run.stats.steps, model=model).name == saved.name
        return saved.name

    servers = [lambda transport: serve(network_of(transport, 1, 1, elastic=True))]
    found = sl.simulate(run_alone, 1, elastic=(1, 2), faults=[Join(at=0.12)], extra=servers)
    assert found.results[0] == found.results[1]
    loaded = torch.nn.Embedding(SAMPLES, 2)
    sl.load(tmp_path, run=loaded)
    assert bool((loaded.weight < 0).all()), "every sample was trained"
    assert {path.name for path in (tmp_path / found.results[0]).glob("rank-*")} == {"rank-00000", "rank-00001"}


@pytest.mark.parametrize("strategy", ["hogwild", "onesided"])
def test_workers_that_no_worker_can_join_save_after_a_loss(strategy: str, tmp_path: Path) -> None:
    network = sl.Network(ranks_per_host=3, inside=sl.Link(latency=1e-5, bandwidth=1e9))
    found = sl.simulate(
        lambda world: train(world, tmp_path, strategy, 1, resumes=False),
        3,
        elastic=(1, 3),
        faults=[Kill(2, at=0.12)],
        network=network,
    )
    assert found.results[2] is None
    assert found.results[0] == found.results[1]
    folder = tmp_path / found.results[0][0]
    assert {path.name for path in folder.glob("rank-*")} == {"rank-00000", "rank-00001"}
