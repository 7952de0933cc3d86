"""The end of a run: one final model on every worker, for every strategy, however the script ends."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError, PeerLostError
from tests.strategies.every import EVERY, play, whole

ONE_MODEL = [spec for spec in EVERY if spec != "ensemble"]


def net() -> nn.Module:
    """With a batch norm, whose statistics and counter differ between workers."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def train(world: sl.World, run: Any, steps: int, first: int = 0) -> None:
    """Workers of different speed, on different data."""
    for step in range(first, first + steps):
        world.compute(0.01 * (1 + world.rank))
        draw = torch.Generator().manual_seed(100 * world.rank + step)
        run.optimizer.zero_grad()
        run.model(torch.randn(4, 3, generator=draw)).square().sum().backward()
        run.optimizer.step()


def begin(spec: str, rate: float = 0.01) -> Any:
    model = net()
    return sl.distribute(model, torch.optim.SGD(model.parameters(), lr=rate), strategy=spec)


@pytest.mark.parametrize("spec", ONE_MODEL)
def test_close_leaves_one_model_on_every_worker(spec: str) -> None:
    def work(world: sl.World) -> Tensor:
        run = begin(spec)
        train(world, run, 5 + world.rank if run.asynchronous else 5)
        run.close()
        return whole(run.model)

    first, *others = play(work, ranks=3)
    assert all(torch.equal(first, other) for other in others)
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize("spec", EVERY)
def test_agreed_shows_one_model_and_gives_back_each_workers_own(spec: str) -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor, Tensor]:
        run = begin(spec)
        train(world, run, 5)
        before = whole(run.model)
        with run.agreed():
            shown = whole(run.model)
        after = whole(run.model)
        train(world, run, 2, first=5)
        run.close()
        return before, shown, after

    found = play(work, ranks=3)
    assert all(torch.equal(shown, found[0][1]) for _, shown, _ in found)
    if spec not in ("hogwild", "gossip(pairwise=True)"):  # there others change a worker's weights at any time
        assert all(torch.equal(before, after) for before, _, after in found)


@pytest.mark.parametrize("spec", ONE_MODEL)
def test_agreed_shows_the_batch_norms_of_the_first_steps(spec: str) -> None:
    def work(world: sl.World) -> float:
        run = begin(spec)
        train(world, run, 2)
        with run.agreed():
            shown = float(run.model[1].running_var.sum())
        run.close()
        return shown

    shown = play(work)
    assert shown[0] == shown[1] != 4.0  # what batch norms begin with


@pytest.mark.parametrize("spec", ["bsp", "downpour", "ssp(slack=3)", "gossip(pairwise=True)", "onesided", "local"])
def test_leaving_the_world_closes_its_runs(spec: str) -> None:
    def work(world: sl.World) -> Tensor:
        with sl.init():
            run = begin(spec)
            train(world, run, 3 + world.rank)
        return whole(run.model)

    first, second = play(work)
    assert torch.equal(first, second)


@pytest.mark.parametrize("spec", ["ssp(slack=3)", "downpour", "gossip(pairwise=True)"])
def test_sys_exit_in_a_with_block_ends_the_run_as_its_end_does(spec: str) -> None:
    """The others need this worker's process: its part of the weights, or its last word."""

    def work(world: sl.World) -> Tensor:
        with contextlib.suppress(SystemExit), begin(spec) as run:
            train(world, run, 6 - 4 * world.rank)
            raise SystemExit(0)
        return whole(run.model)

    first, second = play(work)
    assert torch.equal(first, second)


def test_a_worker_that_left_without_closing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left = set[int]()
    monkeypatch.setattr(sl.World, "gone_reason", lambda self, rank: "it has left" if rank in left else "")

    def work(world: sl.World) -> float:
        run = begin("ssp(slack=3)")
        train(world, run, 2)
        if world.rank == 1:  # as the servers see one that leaves
            run.control_channel().finish()
            left.add(1)
            world.compute(1000.0)  # its part of the weights stays
            return 0.0
        with pytest.raises(PeerLostError, match="rank 1 has ended without closing its run") as caught:
            run.close()
        assert caught.value.peer == 1
        assert "clock" not in str(caught.value)
        return world.runtime.now()

    found = sl.simulate(work, ranks=2, return_exceptions=True).results
    assert isinstance(found[0], float), found[0]
    assert found[0] < 10.0


def test_an_early_close_is_named_when_others_enter_agreed() -> None:
    def work(world: sl.World) -> None:
        run = begin("downpour")
        train(world, run, 1)
        if world.rank == 0:
            with run.agreed():
                pass
        run.close()

    found = sl.simulate(work, ranks=2, return_exceptions=True).results
    assert isinstance(found[0], IncompatibleError)
    assert "rank 1 has closed its run" in str(found[0])
    assert isinstance(found[1], PeerLostError)


@pytest.mark.parametrize("spec", ["diloco(period=100)", "local(period=16)", "easgd(period=9)", "gossip(period=9)"])
def test_training_that_never_communicates_says_so(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    def work(world: sl.World) -> Tensor:
        run = begin(spec)
        run.expect(5)
        train(world, run, 5)
        run.close()
        return whole(run.model)

    with caplog.at_level(logging.WARNING, "syncline"):
        first, second = play(work)
    told = [record.getMessage() for record in caplog.records if "for the first time" in record.getMessage()]
    assert len(told) == 2  # before the first step, and at the end
    assert "is going to take 5" in told[0]
    assert "has taken 5" in told[1]
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "spec", ["easgd(period=9)", "easgd(period=1, centres=2, root_every=4)", "easgd(period=9, sync=False)"]
)
def test_training_that_never_communicates_is_not_lost(spec: str) -> None:
    def work(world: sl.World) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with sl.distribute(model, optimizer, strategy=spec) as run:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            with run.agreed():
                shown = model.weight.item()
        return shown, model.weight.item()

    first, *others = play(work, ranks=4)
    assert all(other == first for other in others)
    assert -3.0 <= first[1] < -1.0
    assert first[0] == first[1] or "sync=False" in spec


def test_average_and_ensemble_are_silent_by_design(caplog: pytest.LogCaptureFixture) -> None:
    def work(world: sl.World) -> None:
        for spec in ("average", "ensemble"):
            run = begin(spec)
            train(world, run, 2)
            run.close()

    with caplog.at_level(logging.WARNING, "syncline"):
        play(work)
    assert not caplog.records
