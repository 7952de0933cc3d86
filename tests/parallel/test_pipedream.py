"""PipeDream: weight versions, vertical synchronisation, and losses that come a step later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.errors import SpecError
from syncline.parallel.partition import StagePartition
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import build_schedule
from syncline.testing import Pool
from syncline.training.pipeline_run import PipelineRun
from syncline.world import World
from tests.strategies.cases import on_gloo

RANKS = 4


def make_model() -> nn.Sequential:
    """Four linear layers, one for each stage."""
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(RANKS)))


def batch(number: int) -> tuple[Tensor, Tensor]:
    """One micro-batch."""
    torch.manual_seed(100 + number)
    return torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)


def train(world: World, schedule: str, steps: int, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights at the end."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = sl.pipeline(
        model,
        optimizer,
        nn.functional.mse_loss,
        stages=[str(n) for n in range(1, world.size)],
        schedule=schedule,
        microbatches=micro_batches,
    )
    losses = []
    for step in range(steps):
        parts = [batch(step * micro_batches + number) for number in range(micro_batches)]
        losses.append(run.step(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).item())
    run.close()
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def replay(total: int, lag_of: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """The equation of the paper: stage s uses the weights of `lag_of[s]` updates ago."""
    model = make_model()
    history = [[each.detach().clone() for each in model.parameters()]]
    losses = []
    for number in range(total):
        weights = [history[max(0, number - lag)][stage].clone().requires_grad_() for stage, lag in enumerate(lag_of)]
        x, y = batch(number)
        for weight in weights:
            x = x @ weight.T
        loss = nn.functional.mse_loss(x, y)
        gradients = torch.autograd.grad(loss, weights)
        losses.append(loss.item())
        history.append([now - 0.05 * gradient for now, gradient in zip(history[-1], gradients, strict=True)])
    return losses, {f"{stage}.weight": each for stage, each in enumerate(history[-1])}


@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize(("steps", "micro_batches"), [(5, 3), (7, 1), (1, 2)])
def test_each_stage_uses_weights_of_the_right_age(vertical: bool, steps: int, micro_batches: int) -> None:
    lags = [RANKS - 1] * RANKS if vertical else [RANKS - 1 - stage for stage in range(RANKS)]
    schedule = f"pipedream(vertical_sync={vertical})"
    results = sl.simulate(lambda world: train(world, schedule, steps, micro_batches), RANKS).results
    check_versions(results, lags, micro_batches)


def check_versions(results: Sequence[tuple[list[float], dict[str, Tensor]]], lags: list[int], per_step: int) -> None:
    """Every rank has the losses and the weights of the equation."""
    losses, expected = replay(len(results[0][0]) * per_step, lags)
    means = [sum(losses[n : n + per_step]) / per_step for n in range(0, len(losses), per_step)]
    for found, weights in results:
        assert math.isnan(found[0])
        assert found[1:] == pytest.approx(means[:-1], rel=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def train_both(world: World, steps: int, micro_batches: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Without vertical synchronisation, and with it."""
    return [train(world, f"pipedream(vertical_sync={vertical})", steps, micro_batches) for vertical in (False, True)]


@pytest.mark.xdist_group("gloo")
def test_gloo_processes_use_weights_of_the_right_age(gloo: Pool) -> None:
    plain, vertical = zip(*gloo.run(on_gloo, RANKS, train_both, 5, 3), strict=True)
    check_versions(plain, [RANKS - 1 - stage for stage in range(RANKS)], 3)
    check_versions(vertical, [RANKS - 1] * RANKS, 3)


def test_one_stage_is_plain_training() -> None:
    _, expected = replay(6, [0] * RANKS)
    _, weights = sl.simulate(lambda world: train_on_one(world, 6), 1).results[0]
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def train_on_one(world: World, steps: int) -> tuple[int, dict[str, Tensor]]:
    """Steps of one micro-batch on one worker."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=1, schedule="pipedream", microbatches=1)
    for step in range(steps):
        run.step(*batch(step))
    run.close()
    return run.stats.steps, {name: each.detach() for name, each in model.named_parameters()}


def test_no_loss_waits_at_an_evaluation_or_at_the_end(tmp_path: Path) -> None:
    """Where sends wait for their receive, as on gloo, the sender of a loss would wait for ever."""

    def attach(world: World) -> PipelineRun:
        model = make_model()
        cuts = [str(number) for number in range(1, RANKS)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=cuts, schedule="pipedream", microbatches=1)

    def train_and_resume(world: World) -> list[float]:
        run = attach(world)
        losses = [run.step(*batch(0)).item(), run.step(*batch(1)).item()]
        run.predict(batch(0)[0])
        losses.append(run.step(*batch(2)).item())
        sl.save(tmp_path, run=run, step=3)
        run.close()
        again = attach(world)
        sl.load(tmp_path, run=again)
        losses += [again.step(*batch(3)).item(), again.step(*batch(4)).item()]
        again.close()
        return losses

    results = sl.simulate(train_and_resume, RANKS, network=sl.Network(eager=0)).results
    assert [math.isnan(loss) for loss in results[0]] == [True, False, False, True, False]
    for found in results[1:]:
        assert found == pytest.approx(results[0], nan_ok=True)


@pytest.mark.parametrize(("replicas", "micro_batches"), [((1, 2), 8), ((2, 3), 9), ((1, 3), 9), ((3, 1), 8)])
def test_replicas_update_equally_often(replicas: tuple[int, int], micro_batches: int) -> None:
    """The default number of micro-batches, and those of a short batch, are divided evenly among replicas."""

    def attach(world: World) -> tuple[int, list[float]]:
        model = make_model()
        run = sl.pipeline(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            nn.functional.mse_loss,
            stages=StagePartition(("2",), replicas),
            schedule="pipedream",
        )
        losses = []
        for step, parts in enumerate((5, 4, 3)):
            samples = [batch(100 * step + part) for part in range(parts)]
            losses.append(run.step(torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])).item())
        run.close()
        return run.config["pipeline"]["micro_batches"], losses

    found = sl.simulate(attach, sum(replicas), network=sl.Network(eager=0)).results
    assert {count for count, _ in found} == {micro_batches}
    assert all(losses[1:] == found[0][1][1:] for _, losses in found)


def test_replicas_leave_out_a_short_batch() -> None:
    """Two pipelines: with 21 samples one of them would have a micro-batch more than the other in the last step."""
    x = torch.randn(21, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def train_epoch(world: World) -> int:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(TensorDataset(x, x), batch_size=4)
        seen = 0
        with sl.pipeline(
            model, optimizer, nn.functional.mse_loss, stages=["2"], schedule="pipedream", microbatches=4
        ) as run:
            for inputs, targets in run.shard(loader):
                run.step(inputs, targets)
                seen += len(inputs)
        return seen

    assert sl.simulate(train_epoch, 4).results == (8, 8, 8, 8)


def test_micro_batches_that_replicas_cannot_share_are_refused() -> None:
    schedule = build_schedule("pipedream(microbatches=3)")
    with pytest.raises(SpecError, match="use a multiple of 2"):
        PipelinePlacement(schedule, (1, 2)).check(3)
