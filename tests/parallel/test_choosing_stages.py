"""How `pipeline` cuts a model: by a number, by measurement, by names, by a file."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.partition import ModelProfile, StagePartition, balanced, pipedream
from syncline.parallel.schedules import build_schedule
from syncline.world import World
from tests.parallel.models import MODELS, Tied, loss_of


def chosen(ranks: int, make: Any = None, network: sl.Network | None = None, **options: Any) -> dict[str, Any]:
    """Cuts and replicas on all ranks, which must be the same."""

    def attach(world: World) -> dict[str, Any]:
        model = make() if make is not None else MODELS["mlp"].model().float()
        run = sl.pipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, **options)
        found: dict[str, Any] = run.config["pipeline"]
        run.close()
        return found

    results = sl.simulate(attach, ranks, network).results
    assert all(each == results[0] for each in results)
    return dict(results[0])


def test_a_number_of_stages_divides_the_parameters_evenly() -> None:
    found = chosen(4, stages=2)
    assert found["replicas"] == [2, 2]
    parameters = found["parameters"]
    assert max(parameters) < 1.5 * min(parameters)


def test_stages_are_one_for_each_worker_without_an_example() -> None:
    assert chosen(3)["replicas"] == [1, 1, 1]


@pytest.mark.parametrize("stages", [2, "auto"])
def test_stages_are_measured_with_an_example(stages: int | str) -> None:
    found = chosen(2, stages=stages, example=torch.randn(32, 6))
    assert sum(found["replicas"]) == 2


def test_hosts_are_not_joined_by_the_network_inside_them() -> None:
    """Weights have 64 times the bytes of activations: copies of a stage stay on one host."""
    inside = sl.Link(latency=0.0, bandwidth=1e15)
    network = sl.Network(bandwidth=1e4, ranks_per_host=2, inside=inside)

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    found = chosen(4, make, network, stages="auto", example=torch.randn(1, 64))
    assert found["replicas"] == [2, 2]
    assert chosen(2, make, network, stages="auto", example=torch.randn(1, 64))["replicas"] == [2]


def test_the_first_module_can_be_a_stage_of_its_own() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 6), nn.Linear(6, 6))

    assert chosen(2, make, stages=2)["cuts"] == ["1"]


def test_a_model_with_tied_weights_is_cut() -> None:
    assert len(chosen(3, Tied, stages=3)["cuts"]) == 2


def test_a_partition_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    StagePartition(("4",), (2, 1)).write(path)
    found = chosen(3, stages=path)
    assert (found["cuts"], found["replicas"]) == (["4"], [2, 1])
    assert chosen(3, stages=str(path)) == found


def test_cuts_of_a_partition_serve_other_numbers_of_workers() -> None:
    assert chosen(4, stages=StagePartition(("4",), (1, 1)))["replicas"] == [2, 2]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "interleaved(chunks=2)", "zbv"])
@pytest.mark.parametrize(
    "stages",
    [
        4,
        ["2", "4", "6"],
        StagePartition(("4",), (3, 1)),
        lambda profile: StagePartition(("2", "4"), (1, 1, 2)),
        "auto",
    ],
)
def test_one_worker_trains_the_plain_model(stages: Any, schedule: str) -> None:
    """Whatever the stages for several workers are."""
    case = MODELS["mlp"]
    model, plain = case.model(), case.model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def train(world: World) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        example = case.batch(4, 0)[0] if callable(stages) else None
        with sl.pipeline(
            model, optimizer, loss_of, stages=stages, schedule=schedule, microbatches=1, example=example
        ) as run:
            run.step(*case.batch(8, 0))
        return dict(run.config["pipeline"])

    (found,) = sl.simulate(train, 1).results
    assert found["replicas"] == [1]
    assert len(found["cuts"]) + 1 == build_schedule(schedule).stages_per_rank
    torch.autograd.backward(loss_of(plain(case.batch(8, 0)[0]), case.batch(8, 0)[1]))
    optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_one_worker_refuses_cuts_that_several_could_not_make() -> None:
    with pytest.raises(SpecError, match="did you mean"):
        chosen(1, stages=["22"])


@pytest.mark.parametrize(
    ("stages", "ranks", "words"),
    [
        (3, 4, "must be a multiple of"),
        (StagePartition(("4",), (3, 1)), 3, "change its replicas"),
        ("no-such-file.json", 2, "no-such-file.json"),
        (1.5, 2, "a number of stages"),
        (9, 9, "more than the model can be split into"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: Any, ranks: int, words: str) -> None:
    with pytest.raises((SpecError, IncompatibleError), match=words):
        chosen(ranks, make_chain if stages == 9 else None, stages=stages)


@pytest.mark.parametrize("limit", [None, 1900.0])
def test_a_function_chooses_the_stages_by_the_measured_costs(limit: float | None) -> None:
    """With a network that costs nothing PipeDream takes one stage, unless that needs too much memory."""

    def choose(profile: ModelProfile) -> StagePartition:
        return pipedream(profile, (2, 1), (1e15, 1e15), overlap=True, memory_bytes=limit)

    found = chosen(2, make_chain, stages=choose, example=torch.randn(1, 6))
    assert found["replicas"] == ([2] if limit is None else [1, 1])


@pytest.mark.parametrize(
    ("choose", "options", "words"),
    [
        (
            partial(pipedream, workers=2, bandwidth=1e9, overlap=True, memory_bytes=10.0),
            {},
            "needs at most memory_bytes=10 B",
        ),
        (lambda profile: StagePartition(("3",), (2, 1)), {}, "change its replicas"),
        (lambda profile: 2, {}, "must return a StagePartition, not int"),
        (lambda profile: os.environ["MISSING"], {}, "KeyError: 'MISSING'"),
        (partial(balanced, stages=2), {"example": None}, "example= is missing"),
        (partial(balanced, stages=3), {}, "the number of workers must be a multiple of 3"),
    ],
)
def test_functions_that_choose_wrong_stages_are_refused(choose: Any, options: dict[str, Any], words: str) -> None:
    """On every rank, with the sentence of rank 0."""

    def attempt(world: World) -> str:
        model = make_chain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SpecError) as caught:
            sl.pipeline(model, optimizer, loss_of, **{"stages": choose, "example": torch.randn(2, 6), **options})
        return str(caught.value)

    for message in sl.simulate(attempt, 2).results:
        assert words in message


def make_chain() -> nn.Module:
    """Six layers."""
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))


def test_the_export_tracer_splits_too() -> None:
    found = chosen(2, stages=["4"], tracer="export", example=torch.randn(8, 6), microbatches=2)
    assert found["cuts"] == ["4"]
