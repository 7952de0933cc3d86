"""The workers of a stage are synchronised as whole models are, with every strategy and with codecs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.parallel.partition import StagePartition
from syncline.testing import Pool
from syncline.world import World
from tests.parallel.models import MODELS, ModelCase, loss_of
from tests.strategies.cases import on_gloo

CASE = MODELS["mlp"]
CODEC = "topk(0.3)|quantize(4)"
STEPS = 4
Weights = dict[str, Tensor]


def shares(case: ModelCase, replica: int, step: int, replicas: int) -> tuple[Tensor, Tensor]:
    """The batch of one of several replicas."""
    x, y = case.batch(6 * replicas, step)
    return x[replica::replicas], y[replica::replicas]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of these tests."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_teams(world: World, replicas: tuple[int, int], **options: Any) -> Weights:
    """Two stages, each with its number of workers."""
    model = CASE.model()
    run = sl.pipeline(model, sgd(model), loss_of, stages=StagePartition(("4",), replicas), microbatches=3, **options)
    for step in range(STEPS):
        run.step(*shares(CASE, world.rank % replicas[0], step, replicas[0]))
    run.close()
    return {name: each.detach() for name, each in model.named_parameters()}


def train_parts(world: World, together: bool, **options: Any) -> Weights:
    """Two parts of a model without a pipeline, each synchronised by itself, as each team does it.

    `together`: only one worker has the second part. So every worker here computes it with the mean gradient.
    """
    layers = list(CASE.model().named_children())
    front, back = nn.Sequential(OrderedDict(layers[:4])), nn.Sequential(OrderedDict(layers[4:]))
    optimizers = [sgd(front), sgd(back)]
    runs = [sl.distribute(front, optimizers[0], **options)]
    if not together:
        runs.append(sl.distribute(back, optimizers[1], **options))
    for step in range(STEPS):
        x, y = shares(CASE, world.rank, step, world.size)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss_of(back(front(x)), y))
        if together:
            for each in back.parameters():
                each.grad = sl.allreduce(each.grad, op="mean")
        for optimizer in optimizers:
            optimizer.step()
    for run in runs:
        run.close()
    return {name: each.detach() for part in (front, back) for name, each in part.named_parameters()}


def compare(found: Sequence[Weights], expected: Sequence[Weights]) -> None:
    """Every worker has the weights of every worker of the other training."""
    for weights in found:
        for other in expected:
            assert list(weights) == list(other)
            for name, value in other.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)


def expected_of(replicas: tuple[int, int], **options: Any) -> Sequence[Weights]:
    """The weights without a pipeline."""
    together = replicas[0] != replicas[1]
    return sl.simulate(lambda world: train_parts(world, together, **options), replicas[0]).results


@pytest.mark.parametrize(
    ("replicas", "strategy", "codec"),
    [
        *(((2, 2), strategy, codec) for strategy in ("allreduce", "local(period=2)") for codec in (None, CODEC)),
        *(((3, 1), strategy, codec) for strategy in ("allreduce", "local(period=2)") for codec in (None, CODEC)),
        ((15, 1), "allreduce", CODEC),
        ((15, 1), "local(period=2)", None),
    ],
)
def test_teams_train_as_workers_with_these_parts_of_the_model(
    replicas: tuple[int, int], strategy: str, codec: str | None
) -> None:
    """A team of one worker beside larger ones encodes nothing."""
    options: dict[str, Any] = {"strategy": strategy, "codec": codec}
    found = sl.simulate(lambda world: train_teams(world, replicas, **options), sum(replicas)).results
    compare(found, expected_of(replicas, **options))


@pytest.mark.parametrize("strategy", ["diloco(period=2)", "easgd(period=2)", "gossip"])
def test_other_strategies_synchronise_teams(strategy: str) -> None:
    found = sl.simulate(lambda world: train_teams(world, (2, 2), strategy=strategy), 4).results
    compare(found, expected_of((2, 2), strategy=strategy))


def test_the_second_team_may_be_the_larger_one() -> None:
    """One worker reads the batches, and three train the second stage on every third micro-batch."""
    found = sl.simulate(lambda world: train_teams(world, (1, 3)), 4).results
    compare(found, sl.simulate(lambda world: train_parts(world, False), 1).results)


def train_all(world: World, cases: Sequence[tuple[tuple[int, int], dict[str, Any]]]) -> list[Weights]:
    """The weights of several cases, one after another."""
    return [train_teams(world, replicas, **options) for replicas, options in cases]


@pytest.mark.xdist_group("gloo")
def test_four_gloo_processes_are_two_teams(gloo: Pool) -> None:
    cases: list[tuple[tuple[int, int], dict[str, Any]]] = [
        ((2, 2), {"codec": CODEC}),
        ((2, 2), {"strategy": "local(period=2)"}),
        ((3, 1), {"codec": CODEC}),
    ]
    results = gloo.run(on_gloo, 4, train_all, cases)
    for place, (replicas, options) in enumerate(cases):
        compare([each[place] for each in results], expected_of(replicas, **options))
