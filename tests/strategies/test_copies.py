"""A model in training is copied and pickled as any other: averaged weights and whole-module files work."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from tests.strategies.every import EVERY, play, whole


def train(run: Any, steps: int = 2) -> None:
    for _ in range(steps):
        run.optimizer.zero_grad()
        run.model(torch.ones(2, 3)).sum().backward()
        run.optimizer.step()


@pytest.mark.parametrize("spec", [*EVERY, "bsp(factors=True)", "downpour(warmup=2)"])
def test_a_copy_of_the_model_is_a_plain_model(spec: str) -> None:
    def work(world: sl.World) -> bool:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = sl.distribute(model, optimizer, strategy=spec)
        copies = [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module]
        file = io.BytesIO()
        torch.save(model, file)
        assert b"syncline.strategies" not in file.getvalue()
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        before, steps = whole(copies[0]), run.stats.steps
        for each in copies:  # they train apart, and nobody hears of it
            own = torch.optim.SGD(each.parameters(), lr=0.01)
            own.zero_grad()
            each(torch.ones(2, 3)).sum().backward()
            own.step()
        alone = run.stats.steps == steps and not torch.equal(before, whole(copies[0]))
        world.barrier()
        train(run)
        copy.deepcopy(model)(torch.ones(1, 3))
        with run.agreed():
            copy.deepcopy(model)(torch.ones(1, 3))
        run.close()
        return alone

    assert play(work) == (True, True)
