"""With every schedule, a model in a pipeline trains as it does in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import syncline as sl
from syncline.testing import Pool
from syncline.world import World
from tests.parallel.models import MODELS
from tests.parallel.training import SCHEDULES, Training, compare, has_stages, train_alone, train_in_pipeline
from tests.strategies.cases import on_gloo

Case = tuple[str, str, dict[str, Any]]
"""A model, a schedule, and more options of the pipeline."""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_train_as_one_process_does(model: str, schedule: str) -> None:
    """17 samples in 4 micro-batches, fewer micro-batches than ranks, accumulation, evaluation after each step."""
    expected = train_alone(model, has_stages(schedule, 4))
    for found in sl.simulate(lambda world: train_in_pipeline(world, model, schedule), 4).results:
        compare(found, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_of_the_export_tracer_train_as_one_process_does(schedule: str) -> None:
    """The graph is made of single operations, and is the same for all sizes of batches."""
    options: dict[str, Any] = {"tracer": "export", "example": MODELS["skips"].batch(4, 0)[0]}
    expected = train_alone("skips", 2)
    for found in sl.simulate(lambda world: train_in_pipeline(world, "skips", schedule, **options), 2).results:
        compare(found, expected)


def train_cases(world: World, cases: Sequence[Case]) -> list[Training]:
    """The results of several cases, one after another."""
    return [train_in_pipeline(world, model, schedule, **options) for model, schedule, options in cases]


def compare_cases(results: Sequence[Sequence[Training]], cases: Sequence[Case]) -> None:
    """Every rank has the results of one process."""
    for trainings in results:
        for found, (model, schedule, _) in zip(trainings, cases, strict=True):
            compare(found, train_alone(model, has_stages(schedule, len(results))))


@pytest.mark.xdist_group("gloo")
def test_two_gloo_processes_train_as_one_process_does(gloo: Pool) -> None:
    cases: list[Case] = [(model, schedule, {}) for schedule in SCHEDULES for model in MODELS]
    cases += [
        ("batch norm", "interleaved(chunks=2)", {"recompute": "always"}),
        ("dropout", "1f1b", {"recompute": "except_last"}),
        ("tied", "gpipe", {"recompute": "always"}),
    ]
    compare_cases(gloo.run(on_gloo, 2, train_cases, cases), cases)


@pytest.mark.xdist_group("zeromq")
def test_zeromq_carries_the_values_of_a_pipeline(zeromq: Pool) -> None:
    cases: list[Case] = [("unet", "1f1b", {}), ("mlp", "zbv", {})]
    compare_cases(zeromq.run(on_gloo, 2, train_cases, cases), cases)
