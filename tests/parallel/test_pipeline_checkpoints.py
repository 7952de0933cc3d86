"""Checkpoints of a pipeline: other numbers of stages continue, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.world import World
from tests.parallel.models import MODELS, loss_of


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
