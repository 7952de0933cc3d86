"""Training in a pipeline equals training in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.parallel.partition import StagePartition
from syncline.testing import Pool
from syncline.world import World
from tests.parallel.models import MODELS, ModelCase, loss_of
from tests.strategies.cases import on_gloo

SCHEDULES = ("gpipe", "1f1b", "interleaved(chunks=2)", "zero_bubble", "zbv")
SAMPLES = (17, 16, 3)
"""17 samples are no multiple of 4 micro-batches, and 3 are fewer than the stages."""


def train_alone(case: ModelCase, samples: tuple[int, ...] = SAMPLES) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the weights after them, without a pipeline."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, count in enumerate(samples):
        x, y = case.batch(count, step)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def train_in_pipeline(
    world: World, case: ModelCase, schedule: str, samples: tuple[int, ...] = SAMPLES
) -> tuple[list[float], dict[str, Tensor]]:
    """The same with the stages on all ranks."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chunks = 2 if schedule.startswith(("interleaved", "zbv")) else 1
    stages = world.size * chunks
    cuts = {2: case.cuts[1:2], 4: case.cuts}.get(stages, stages)
    run = sl.pipeline(model, optimizer, loss_of, stages=cuts, schedule=schedule, microbatches=4)
    losses = []
    for step, count in enumerate(samples):
        losses.append(run.step(*case.batch(count, step)).item())
        model.eval()
        run.predict(case.batch(5, 99)[0])  # evaluation between steps changes nothing
        model.train()
    run.close()
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def compare(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    """Losses are float32, weights float64."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert list(found[1]) == list(expected[1])
    for name, weights in expected[1].items():
        torch.testing.assert_close(found[1][name], weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["mlp", "skips", "unet", "tied"])
def test_a_pipeline_trains_as_one_process_does(model: str, schedule: str) -> None:
    case = MODELS[model]
    expected = train_alone(case)
    ranks = 2 if schedule.startswith(("interleaved", "zbv")) else 4
    for result in sl.simulate(lambda world: train_in_pipeline(world, case, schedule), ranks).results:
        compare(result, expected)


def shares(case: ModelCase, replica: int, step: int) -> tuple[Tensor, Tensor]:
    """The batch of one of two replicas."""
    x, y = case.batch(12, step)
    return x[replica::2], y[replica::2]


def train_replicas(world: World, strategy: str, codec: str | None, pipelined: bool) -> dict[str, Tensor]:
    """Two replicas train a model, each in one process or in a pipeline of two."""
    case = MODELS["mlp"]
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if pipelined:
        run = sl.pipeline(model, optimizer, loss_of, stages=["4"], microbatches=3, strategy=strategy, codec=codec)
        for step in range(6):
            run.step(*shares(case, world.rank % 2, step))
        run.close()
    else:
        plain = sl.distribute(model, optimizer, strategy=strategy, codec=codec)
        for step in range(6):
            x, y = shares(case, world.rank, step)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model(x), y))
            optimizer.step()
        plain.close()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=3)", "diloco(period=2)", "easgd(period=2)", "gossip"])
def test_replicas_of_a_pipeline_are_synchronised_as_whole_models(strategy: str) -> None:
    expected = sl.simulate(lambda world: train_replicas(world, strategy, None, False), 2).results
    found = sl.simulate(lambda world: train_replicas(world, strategy, None, True), 4).results
    for weights in found:
        for name, value in expected[0].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=2)"])
def test_replicas_of_a_pipeline_take_codecs(strategy: str) -> None:
    start = {name: each.detach() for name, each in MODELS["mlp"].model().named_parameters()}
    found = sl.simulate(lambda world: train_replicas(world, strategy, "topk(0.3)|quantize(4)", True), 4).results
    for weights in found:
        assert all(torch.equal(weights[name], found[0][name]) for name in weights)
        assert any(not torch.equal(weights[name], start[name]) for name in weights)


def test_unequal_replicas_equal_one_process() -> None:
    """Two workers have the first stage, one the second. Each of the two reads its own batch."""
    case = MODELS["mlp"]

    def train(world: World) -> dict[str, Tensor]:
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        partition = StagePartition(("4",), (2, 1))
        run = sl.pipeline(model, optimizer, loss_of, stages=partition, microbatches=2)
        for step in range(4):
            run.step(*shares(case, world.rank % 2, step))
        run.close()
        return {name: each.detach() for name, each in model.named_parameters()}

    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = case.batch(12, step)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model(x), y))
        optimizer.step()
    for weights in sl.simulate(train, 3).results:
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_accumulate_and_are_clipped_over_all_stages(schedule: str) -> None:
    case = MODELS["tied"]

    def train(world: World) -> dict[str, Tensor]:
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = sl.pipeline(model, optimizer, loss_of, stages=case.cuts, schedule=schedule, microbatches=4)
        for step in range(3):
            run.backward(*case.batch(9, step))
            run.backward(*case.batch(4, step + 10))
            norm = run.clip_grad_norm_(0.05)
            run.update()
            assert norm > 0.05
        run.close()
        return {name: each.detach() for name, each in model.named_parameters()}

    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for batch in (case.batch(9, step), case.batch(4, step + 10)):
            torch.autograd.backward(loss_of(model(batch[0]), batch[1]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    for weights in sl.simulate(train, 2 if schedule.startswith(("interleaved", "zbv")) else 4).results:
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-6, atol=1e-7)


def test_state_that_a_checkpoint_of_other_stages_does_not_have_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(world: World, cut: str, load: bool) -> None:
        model = MODELS["mlp"].model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.pipeline(model, optimizer, loss_of, stages=[cut], strategy="local(period=2)", microbatches=2) as run:
            if load:
                sl.load(tmp_path, run=run)
            else:
                run.step(*MODELS["mlp"].batch(4, 0))
                sl.save(tmp_path, run=run, step=1)

    sl.simulate(lambda world: train(world, "4", False), 4)
    sl.simulate(lambda world: train(world, "4", True), 4)
    assert "starts fresh" not in caplog.text
    sl.simulate(lambda world: train(world, "2", True), 4)
    assert "the state of local(period=2) starts fresh" in caplog.text


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_of_two_stages_resumes_on_any_number(ranks: int, tmp_path: Path) -> None:
    """The weights have the same bits as those of an uninterrupted run of two stages."""
    case = MODELS["mlp"]
    cuts: dict[int, tuple[str, ...]] = {1: (), 2: ("4",), 4: case.cuts}

    def train(world: World, first: int, last: int, load: bool) -> dict[str, Tensor]:
        model = case.model().float()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run = sl.pipeline(
            model, optimizer, loss_of, stages=cuts[world.size], microbatches=4, clip_norm=0.5, schedule="1f1b"
        )
        if load:
            assert sl.load(tmp_path, run=run) == {"step": 3}
        for step in range(first, last):
            x, y = case.batch(8, step)
            run.step(x.float(), y)
        if not load and last == 3:
            sl.save(tmp_path, step=3, run=run)
        run.close()
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    expected = sl.simulate(lambda world: train(world, 0, 6, False), 2).results[0]
    sl.simulate(lambda world: train(world, 0, 3, False), 2)
    for weights in sl.simulate(lambda world: train(world, 3, 6, True), ranks).results:
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


def train_cases(world: World, cases: Sequence[tuple[str, str]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """The results of several cases, one after another."""
    return [train_in_pipeline(world, MODELS[model], schedule) for model, schedule in cases]


@pytest.mark.xdist_group("gloo")
def test_two_gloo_processes_train_as_one_process_does(gloo: Pool) -> None:
    cases = [(model, schedule) for schedule in SCHEDULES for model in ("mlp", "skips", "unet", "tied")]
    for results in gloo.run(on_gloo, 2, train_cases, cases):
        for result, (model, _) in zip(results, cases, strict=True):
            compare(result, train_alone(MODELS[model]))


@pytest.mark.xdist_group("zeromq")
def test_zeromq_carries_the_values_of_a_pipeline(zeromq: Pool) -> None:
    cases = [("unet", "1f1b"), ("mlp", "zbv")]
    for results in zeromq.run(on_gloo, 2, train_cases, cases):
        for result, (model, _) in zip(results, cases, strict=True):
            compare(result, train_alone(MODELS[model]))
