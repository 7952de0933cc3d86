"""NaN in a gradient: every strategy says on which rank, in which parameter, after how many steps, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import syncline as sl
from tests.strategies.cases import backward
from tests.strategies.hogwild_cases import one_host

STRATEGIES = [
    "allreduce",
    "allreduce(delay=1)",
    "bsp",
    "ssp",
    "downpour",
    "master",
    "master(sync=False)",
    "hogwild",
    "local(period=4)",
    "adacomm",
    "diloco",
    "easgd",
    "easgd(sync=False)",
    "gossip",
    "gossip(pairwise=True)",
    "average",
    "ensemble",
]


def training(strategy: str, codec: str | None = None, check_finite: bool = True) -> Callable[[sl.World], None]:
    """Five steps; in the third, the last rank's batch holds NaN."""

    def case(world: sl.World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, strategy, codec, check_finite=check_finite):
            for step in range(5):
                optimizer.zero_grad()
                nan = step == 2 and world.rank == world.size - 1
                backward(model(torch.full((1, 2), float("nan") if nan else 1.0)).square().mean())
                optimizer.step()

    return case


def diverged(case: Callable[[sl.World], None], ranks: int) -> list[sl.errors.DivergedError]:
    run = sl.simulate(case, ranks=ranks, network=one_host(ranks), return_exceptions=True)
    return [each for each in run.results if isinstance(each, sl.errors.DivergedError)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_is_told_with_rank_parameter_step_and_remedy(strategy: str) -> None:
    errors = diverged(training(strategy), 2)
    assert errors
    for error in errors:
        assert (error.rank, error.step) == (1, 2)
        assert error.parameter in ("0.weight", "1.bias")
        for words in ("rank 1", str(error.parameter), "after 2 steps", "lower the learning rate"):
            assert words in str(error)


@pytest.mark.parametrize("strategy", ["allreduce", "bsp", "local", "hogwild", "ensemble"])
def test_nan_is_told_in_a_world_of_one(strategy: str) -> None:
    (error,) = diverged(training(strategy), 1)
    assert (error.rank, error.step) == (0, 2)


@pytest.mark.parametrize(("strategy", "steps"), [("bsp", 2), ("ssp", 2), ("master", 2), ("downpour", 3)])
def test_nan_that_a_codec_cannot_push_is_told_with_the_step(strategy: str, steps: int) -> None:
    """Downpour pushes when the worker's own step is complete."""
    (error,) = diverged(training(strategy, "quantize(8)", check_finite=False), 2)
    assert (error.rank, error.step) == (1, steps)
    assert "quantize(8) cannot carry" in str(error)


def test_sum_that_overflows_is_told_with_the_step() -> None:
    """Each gradient is finite, and their sum in half precision is not."""

    def case(world: sl.World) -> None:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sl.distribute(model, optimizer, codec="topk(0.5)", algorithm="sparse_split")
        for step in range(2):
            optimizer.zero_grad()
            backward((model(torch.ones(1, 64)) * (2e38 if step else 1.0)).sum())
            optimizer.step()

    errors = diverged(case, 2)
    assert [error.step for error in errors] == [1, 1]
    assert "clip" in str(errors[0])


def test_large_gradients_are_not_taken_for_inf() -> None:
    """Their sum is more than float32 can hold."""

    def case(world: sl.World) -> None:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with sl.distribute(model, optimizer, "average", check_finite=True):
            backward((model(torch.ones(1, 64)) * 1e38).sum())
            optimizer.step()

    assert diverged(case, 2) == []


def test_many_parameters_are_not_all_listed() -> None:
    def case(world: sl.World) -> None:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
        sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), check_finite=True)
        backward(model(torch.full((1, 1), float("nan"))).sum())

    error = diverged(case, 2)[0]
    assert "rank 0: 19.weight, 18.weight, 17.weight and 17 more; rank 1: 19.weight" in str(error)
