"""Parameters that no strategy trains: whole numbers and masks that travel with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from tests.strategies.cases import backward
from tests.strategies.every import EVERY, play

DTYPES = (torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn)


class Counted(nn.Module):
    """A layer, and parameters of dtypes that have no gradients."""

    def __init__(self, value: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 2)
        for dtype in DTYPES:
            tensor = torch.tensor([value]).to(dtype)
            self.register_parameter(f"of_{str(dtype)[6:]}", nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def values(self) -> list[Any]:
        return [self.get_parameter(f"of_{str(dtype)[6:]}").float().tolist() for dtype in DTYPES]


@pytest.mark.parametrize("strategy", EVERY)
def test_whole_numbers_are_rank_0s_and_stay_so(strategy: str, tmp_path: Path) -> None:
    def work(world: sl.World, resume: bool) -> list[Any]:
        model = Counted(0 if world.rank or resume else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, strategy, algorithm="ring")
        if resume:
            sl.load(tmp_path, run=run)
        for step in range(3):
            optimizer.zero_grad()
            backward(model(torch.full((2, 4), float(step + world.rank))).square().mean())
            run.note_loss(1.0)
            optimizer.step()
        if not resume:
            sl.save(tmp_path, step=3, run=run)
        world.barrier()
        with run.agreed():
            shown = model.values()
        world.barrier()
        run.close()
        return [shown, model.values()]

    wanted = ([[[1.0]] * len(DTYPES)] * 2,) * 2
    assert play(lambda world: work(world, resume=False)) == wanted
    assert play(lambda world: work(world, resume=True)) == wanted
