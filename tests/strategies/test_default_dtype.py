"""torch.set_default_dtype changes what tensors a script makes, and none of ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from tests.strategies.cases import backward
from tests.strategies.every import EVERY, play

CODECS = ("quantize(8)", "topk(0.5)|quantize(4)", "threshold(0.01)", "randomk(0.5)", "powersgd(1)", "onebit", "ternary")


def train(strategy: str, codec: str | None, default: torch.dtype) -> tuple[Tensor, ...]:
    def work(world: sl.World) -> Tensor:
        model = nn.Linear(4, 2, dtype=torch.float32)
        nn.init.constant_(model.weight, 0.3)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, strategy, codec=codec, algorithm="auto" if codec else "ring")
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + world.rank)
            x = torch.randn(3, 4, generator=draw, dtype=torch.float32)
            optimizer.zero_grad()
            backward(model(x).square().mean())
            run.note_loss(1.0)
            optimizer.step()
        world.barrier()
        with run.agreed():
            shown = model.weight.detach().clone()
        world.barrier()
        run.close()
        return shown

    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        return play(work)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        *((strategy, None) for strategy in EVERY),
        *(("allreduce", codec) for codec in CODECS),
        *((strategy, "topk(0.5)") for strategy in ("bsp", "gossip")),
    ],
)
def test_it_changes_no_weight(strategy: str, codec: str | None) -> None:
    usual, half = (train(strategy, codec, default) for default in (torch.float32, torch.bfloat16))
    assert all(torch.equal(one, other) for one, other in zip(usual, half, strict=True))
