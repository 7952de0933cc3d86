"""Trainings in which workers keep weights of their own, small enough to be followed by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import syncline as sl
from syncline.strategies import Run, Strategy
from tests.strategies.cases import OPTIMIZERS, backward, flat

Look = Callable[[Run, int], Any]


def net(norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        middle = [nn.BatchNorm1d(8)] if norm else []
        return nn.Sequential(nn.Linear(5, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(6, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)


def take(model: nn.Module, optimizer: Optimizer, worker: int, step: int) -> float:
    """One step; its loss."""
    x, y = batch(worker, step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    backward(loss)
    optimizer.step()
    return float(loss.detach())


def train(
    world: sl.World,
    strategy: str | Strategy,
    steps: int = 12,
    *,
    first: int = 0,
    optimizer: str = "sgd",
    norm: bool = False,
    load: Path | None = None,
    save: Path | None = None,
    look: Look = lambda run, step: flat(run.model),
    alike: bool = False,
    **options: Any,
) -> list[Any]:
    """What `look` sees after each step, then the parameters after `close()`."""
    model = net(norm)
    made = OPTIMIZERS[optimizer](model.parameters())
    run = sl.distribute(model, made, strategy, **options)
    if load is not None:
        assert sl.load(load, run=run) is not None
    seen = []
    for step in range(first, steps):
        take(model, made, 0 if alike else world.rank, step)
        seen.append(look(run, step))
    if save is not None:
        sl.save(save, step=steps, run=run)
    run.close()
    return [*seen, flat(model)]


def everywhere(strategy: str | Strategy, ranks: int = 3, **how: Any) -> tuple[list[Any], ...]:
    """`train` on simulated workers."""
    return sl.simulate(lambda world: train(world, strategy, **how), ranks=ranks).results


class Scale(nn.Module):
    """One row of weights that every worker pushes by a number of its own: w ← w + η · push."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(size))

    def forward(self, push: Tensor) -> Tensor:
        return -(push * self.row).sum()


def push(model: Scale, optimizer: Optimizer, by: float) -> None:
    """A step by which the weights grow by a whole number: sums stay exact."""
    optimizer.zero_grad()
    backward(model(torch.full_like(model.row, by)))
    optimizer.step()


def check_resumes(folder: Path, strategy: str | Strategy, steps: int, ranks: int = 3, **how: Any) -> None:
    """Stopped after each of its steps and resumed, it ends with the same bits."""
    whole = everywhere(strategy, ranks, steps=steps, **how)
    for stop in range(1, steps):
        place = folder / str(stop)
        everywhere(strategy, ranks, steps=stop, save=place, **how)
        rest = everywhere(strategy, ranks, steps=steps, first=stop, load=place, **how)
        for one, other in zip(whole, rest, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[stop:], other, strict=True)), f"stopped after {stop}"
