"""`sl.distribute(parallel="pipeline(2) x allreduce")`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError, SpecError, SynclineError
from syncline.specs import factors
from syncline.strategies import Run
from syncline.training.parallel_spec import read_parallel
from syncline.training.pipeline_run import PipelineRun
from syncline.world import World
from tests.parallel.models import MODELS, loss_of

CASE = MODELS["mlp"]


def weights_after(world: World, begin: Any) -> list[Tensor]:
    """Three steps with the run that `begin(model, optimizer)` makes."""
    model = CASE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = begin(model, optimizer)
    assert isinstance(run, PipelineRun)
    for step in range(3):
        run.step(*CASE.batch(8, 10 * step + world.rank % 2))
    run.close()
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("parallel", ["{} x local(period=2)", "local(period=2) x {}", "{}"])
def test_a_pipeline_by_its_spec_is_the_same_as_by_its_function(parallel: str) -> None:
    spec = parallel.format("pipeline(['4'], schedule='gpipe', microbatches=2, recompute='always')")
    strategy = None if "local" in parallel else "local(period=2)"

    def by_spec(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
        return sl.distribute(model, optimizer, strategy, loss_fn=loss_of, parallel=spec)

    def by_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
        plan: dict[str, Any] = {"stages": ["4"], "schedule": "gpipe", "microbatches": 2, "recompute": "always"}
        return sl.pipeline(model, optimizer, loss_of, strategy="local(period=2)", **plan)

    found = sl.simulate(lambda world: weights_after(world, by_spec), 4).results[0]
    expected = sl.simulate(lambda world: weights_after(world, by_function), 4).results[0]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_without_a_pipeline_it_is_the_strategy() -> None:
    def describe(world: World) -> str:
        model = CASE.model()
        run: Run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), parallel="gossip")
        assert not isinstance(run, PipelineRun)
        return str(run.config["strategy"])

    assert sl.simulate(describe, 2).results == ("gossip", "gossip")


@pytest.mark.parametrize(
    ("words", "kind", "parallel", "options"),
    [
        ("did you mean 'pipeline'", SpecError, "pipline(2)", {}),
        ("did you mean 'allreduce'", SpecError, "pipeline(2) x alreduce", {}),
        ("did you mean 'schedule'", SpecError, "pipeline(2, schedul='gpipe')", {}),
        ("did you mean 'gpipe'", SpecError, "pipeline(2, schedule='gpip')", {}),
        ("invalid syntax", SpecError, "pipeline(2)x allreduce", {}),
        ("never evaluated", SpecError, "pipeline(print(2)) x allreduce", {}),
        ("name codecs by codec=", SpecError, "pipeline(2) x allreduce|topk(0.1)", {}),
        ("has 2 pipelines", SpecError, "pipeline(2) x pipeline(2)", {}),
        ("has 2 strategies", SpecError, "local x allreduce", {}),
        ("leave one out", SpecError, "pipeline(2) x local", {"strategy": "allreduce"}),
        ("give loss_fn=", SpecError, "pipeline(2)", {"loss_fn": None}),
        ("diagnose=True", IncompatibleError, "pipeline(2)", {"diagnose": True}),
        ("at its own pace", IncompatibleError, "pipeline(2) x ssp", {}),
    ],
)
def test_what_is_refused(words: str, kind: type[SynclineError], parallel: str, options: dict[str, Any]) -> None:
    def attempt(world: World) -> str:
        model = CASE.model()
        with pytest.raises(kind) as caught:
            sl.distribute(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                parallel=parallel,
                **{"loss_fn": loss_of, **options},
            )
        return str(caught.value)

    for message in sl.simulate(attempt, 2).results:
        assert words in message


def test_a_strategy_that_is_a_pipeline_is_told_where_pipelines_are() -> None:
    with pytest.raises(SpecError, match=r"call sl\.pipeline"):
        sl.strategies.build_strategy("pipeline(2)")


def test_factors_are_not_divided_within_quotes() -> None:
    assert factors("pipeline(['a x b']) x local") == ["pipeline(['a x b'])", "local"]
    assert read_parallel("pipeline(['a x b'])").pipeline is not None
