"""What the tests of elastic averaging train: one number, and a reference that is one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.strategies.easgd import EASGD
from tests.strategies.cases import backward


class Bowl(nn.Module):
    """f(x) = x² / 2, from where one likes; its gradient is x."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((1,), start))

    def forward(self) -> Tensor:
        return self.x.square().sum() / 2


def distributed(model: nn.Module, strategy: EASGD, rate: float, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    usual = {"algorithm": "ring" if options.get("codec") is None else "gather"}
    return optimizer, sl.distribute(model, optimizer, strategy=strategy, **{**usual, **options})


def step(model: Bowl, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model())
    optimizer.step()


def shown(run: Any) -> Tensor:
    """The centre."""
    with run.agreed():
        return torch.cat([parameter.detach().reshape(-1) for parameter in run.model.parameters()]).clone()


def bowls(
    strategy: EASGD, starts: Sequence[float], rate: float, steps: int, **options: Any
) -> Callable[[sl.World], tuple[float, float]]:
    """Each worker from its own start, the centre at 0: its x and the centre after so many steps."""

    def work(world: sl.World) -> tuple[float, float]:
        model = Bowl()
        optimizer, run = distributed(model, strategy, rate, **options)
        with torch.no_grad():
            model.x.fill_(starts[world.rank])
        world.barrier()
        for _ in range(steps):
            step(model, optimizer)
        world.barrier()
        found = model.x.item(), shown(run).item()
        run.close()
        return found

    return work


def reference(
    starts: Sequence[float],
    gradient: Callable[[int, int, float], float],
    *,
    steps: int,
    period: int,
    alpha: float,
    rate: float,
    momentum: float = 0.0,
) -> tuple[list[float], float]:
    """Synchronous elastic averaging by hand, in double precision: every worker's x, and the centre.

    `gradient(worker, step, x)` is taken at the x before the exchange, where the momentum leads.
    """
    own, centre = list(starts), 0.0
    speeds = [0.0] * len(own)
    for number in range(steps):
        before = list(own)
        for worker, x in enumerate(before):
            slope = gradient(worker, number, x + momentum * speeds[worker])
            speeds[worker] = momentum * speeds[worker] - rate * slope
            own[worker] += speeds[worker]
        if (number + 1) % period == 0:
            for worker, x in enumerate(before):
                own[worker] -= alpha * (x - centre)
            centre += alpha * sum(x - centre for x in before)
    return own, centre
