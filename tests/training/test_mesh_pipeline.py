"""Pipelines whose layers are divided train as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.parallel.partition import StagePartition
from syncline.world import World
from tests.training.mesh_models import (
    assert_equal,
    batch_of,
    criterion,
    make_model,
    make_optimizer,
    optimizer_state,
    own_batch,
    train,
    train_alone,
)

TENSOR = sl.parallel.tensor(size=2)
CUTS = {"transformer": ["blocks.1"], "experts": ["head"], "cnn": ["4"], "language": ["moe"], "tied language": ["moe"]}
FOUR_STAGES = ["blocks.0", "blocks.1", "head"]


def train_pipeline(
    world: World,
    name: str,
    parallel: Any = (),
    steps: Sequence[int] = range(4),
    *,
    stages: Any = None,
    optimizer: str = "sgd",
    load: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Some steps with `sl.pipeline`; the whole model afterwards."""
    model = make_model(name)
    trainer = make_optimizer(model, optimizer)
    options = {"microbatches": 2, "clip_norm": 0.5, **options}
    run = sl.pipeline(model, trainer, criterion(model), stages=stages or CUTS[name], parallel=parallel, **options)
    if load is not None:
        sl.load(load, run=run)
    for step in steps:
        run.step(*own_batch(world, step))
    if save is not None:
        sl.save(save, step=max(steps) + 1, run=run)
    run.close()
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "parallel", "schedule", "workers"),
    [
        ("transformer", TENSOR, "1f1b", 8),
        ("transformer", "tensor(2)", "gpipe", 4),
        ("transformer", TENSOR, "interleaved(chunks=2)", 4),
        ("transformer", TENSOR, "zero_bubble", 4),
        ("transformer", TENSOR, "zbv", 8),
        ("experts", sl.parallel.experts(2), "zero_bubble", 8),
        ("language", [sl.parallel.experts(2), TENSOR], "1f1b", 8),
        ("tied language", TENSOR, "zero_bubble", 4),
        ("cnn", sl.parallel.weird_trick("c", size=2), "1f1b", 4),
        ("cnn", [sl.parallel.spatial("1", size=2), sl.parallel.weird_trick("a", size=2)], "1f1b", 8),
    ],
)
def test_a_pipeline_of_divided_layers_trains_as_one_process_does(
    name: str, parallel: Any, schedule: str, workers: int
) -> None:
    stages = FOUR_STAGES if schedule.startswith(("interleaved", "zbv")) else None
    expected = train_alone(name)
    found = sl.simulate(
        lambda world: train_pipeline(world, name, parallel, schedule=schedule, stages=stages), ranks=workers
    )
    for state in found.results:
        assert_equal(state, expected)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "always"), ("zero_bubble", "never")])
def test_stages_add_the_balance_loss_of_their_experts(schedule: str, recompute: str) -> None:
    """The reference adds the losses of the micro-batches by hand."""
    model = make_model("balanced")
    optimizer = make_optimizer(model)
    for step in range(2):
        optimizer.zero_grad()
        for x, y in zip(*(each.chunk(2) for each in batch_of(step)), strict=True):
            loss = functional.cross_entropy(model(x), y)
            torch.autograd.backward((loss + sl.parallel.expert_loss(model)) / 2)
        optimizer.step()
    expected = dict(model.state_dict())
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "clip_norm": None}
    for parallel in ((), sl.parallel.experts(1)):
        found = sl.simulate(
            lambda world, parallel=parallel: train_pipeline(  # type: ignore[misc]
                world, "balanced", parallel, range(2), stages=["moe"], **options
            ),
            ranks=2,
        )
        for state in found.results:
            assert_equal(state, expected)


def test_pipedream_uses_the_same_versions_of_the_weights() -> None:
    def work(world: World, parallel: Any) -> dict[str, Tensor]:
        return train_pipeline(world, "transformer", parallel, schedule="pipedream", clip_norm=None)

    expected = sl.simulate(lambda world: work(world, ()), ranks=2).results[0]
    for state in sl.simulate(lambda world: work(world, TENSOR), ranks=4).results:
        assert_equal(state, expected)


def test_a_text_names_the_mesh() -> None:
    def work(world: World) -> tuple[str, dict[str, Tensor]]:
        model = make_model("transformer")
        run: Any = sl.distribute(
            model,
            make_optimizer(model),
            parallel="pipeline(2, microbatches=2) x tensor(2)",
            strategy="local(period=2)",
            codec="quantize(8)",
            loss_fn=functional.cross_entropy,
        )
        for step in range(4):
            run.step(*own_batch(world, step))
        run.close()
        return str(world.mesh), dict(model.state_dict())

    results = sl.simulate(work, ranks=8).results
    for mesh, state in results:
        assert mesh == "mesh of 8 ranks: pipeline 2 x data 2 x tensor 2"
        assert all(torch.equal(state[key], results[0][1][key]) for key in state)


def whole_state(
    world: World, folder: Path, parallel: Any, stages: Any, save: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole model and AdamW's state as they are saved after two steps, or loaded."""
    model = make_model("transformer")
    optimizer = make_optimizer(model, "adamw")
    if stages is None:
        run: Any = sl.distribute(model, optimizer, parallel=parallel)
    else:
        run = sl.pipeline(model, optimizer, functional.cross_entropy, stages=stages, parallel=parallel or ())
    if save:
        for step in range(2):
            x, y = own_batch(world, step)
            if stages is None:
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
            else:
                run.step(x, y)
        sl.save(folder, step=2, run=run)
    else:
        sl.load(folder, run=run)
    run.close()
    state = optimizer_state(model, optimizer)
    return {key: value.clone() for key, value in model.state_dict().items()}, state


MESHES: dict[str, tuple[int, Any, Any]] = {
    "pipeline 2 x tensor 2": (4, TENSOR, CUTS["transformer"]),
    "data 2": (2, None, None),
    "data 2 x tensor 2": (4, TENSOR, None),
    "one worker": (1, None, None),
    "tensor 4": (4, sl.parallel.tensor(size=4), None),
    "pipeline 4": (4, None, FOUR_STAGES),
}


@pytest.mark.parametrize("saved_by", ["pipeline 2 x tensor 2", "data 2", "data 2 x tensor 2"])
def test_a_checkpoint_of_any_mesh_loads_into_any_other(saved_by: str, tmp_path: Path) -> None:
    ranks, parallel, stages = MESHES[saved_by]
    expected, *_ = sl.simulate(
        lambda world: whole_state(world, tmp_path, parallel, stages, save=True), ranks=ranks
    ).results
    names = list(dict(make_model("transformer").named_parameters()))
    assert {f"{name} {key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")} == set(expected[1])
    for name, (ranks, parallel, stages) in MESHES.items():
        loaded = sl.simulate(
            lambda world, parallel=parallel, stages=stages: whole_state(  # type: ignore[misc]
                world, tmp_path, parallel, stages
            ),
            ranks=ranks,
        ).results
        for state in loaded:
            for found, saved in zip(state, expected, strict=True):
                assert found.keys() == saved.keys(), name
                assert all(torch.equal(found[key], saved[key]) for key in saved), name


def test_training_continues_on_another_mesh(tmp_path: Path) -> None:
    expected = train_alone("transformer")
    sl.simulate(lambda world: train_pipeline(world, "transformer", TENSOR, range(2), save=tmp_path), ranks=4)
    on_workers = sl.simulate(lambda world: train(world, "transformer", None, range(2, 4), load=tmp_path), ranks=2)
    in_layers = sl.simulate(lambda world: train(world, "transformer", TENSOR, range(2, 4), load=tmp_path), ranks=4)
    for state in (*on_workers.results, *in_layers.results):
        assert_equal(state, expected)


@pytest.mark.parametrize(("strategy", "codec"), [("local(period=2)", None), ("allreduce", "topk(0.5)|quantize(8)")])
def test_strategies_and_codecs_act_as_without_a_pipeline(strategy: str, codec: str | None) -> None:
    options: dict[str, Any] = {"strategy": strategy, "codec": codec}
    expected = sl.simulate(lambda world: train(world, "transformer", TENSOR, clip=None, **options), ranks=4).results[0]
    found = sl.simulate(
        lambda world: train_pipeline(world, "transformer", TENSOR, clip_norm=None, **options), ranks=8
    ).results
    for state in found:
        assert all(torch.equal(state[key], found[0][key]) for key in state)
        if codec is None:
            assert_equal(state, expected)


def test_what_a_pipeline_cannot_divide_is_refused() -> None:
    def work(world: World) -> None:
        model = make_model("cnn")
        head = sl.parallel.weird_trick("a", size=2)
        with pytest.raises(IncompatibleError, match=r"the cut 4\.2 lies inside 4, whose layers"):
            sl.pipeline(model, make_optimizer(model), functional.cross_entropy, stages=["4.2"], parallel=head)
        model = make_model("transformer")
        options: dict[str, Any] = {"parallel": TENSOR}
        partition = StagePartition(("blocks.1",), (3, 1))
        with pytest.raises(IncompatibleError, match="cannot divide layers"):
            sl.pipeline(model, make_optimizer(model), functional.cross_entropy, stages=partition, **options)

    sl.simulate(work, ranks=4)
