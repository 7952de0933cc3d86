"""What the tests of gossip train: weights drawn to a point of each worker's own, and what theory makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import syncline as sl
from syncline.strategies import Run
from syncline.strategies.gossip import Gossip, Graph
from tests.strategies.cases import backward

WIDE = 6


class Drawn(nn.Module):
    """½‖w − c‖²: the gradient is w − c, whatever the optimizer makes of it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(17 + rank)
        self.first = nn.Parameter(torch.zeros(2, 2))
        self.second = nn.Parameter(torch.zeros(WIDE - 4, dtype=torch.float64))
        self.register_buffer("goal", torch.randn(WIDE, generator=draw, dtype=torch.float64), persistent=False)

    def forward(self) -> Tensor:
        goal = self.get_buffer("goal")
        return ((self.first.reshape(-1) - goal[:4]).square().sum() + (self.second - goal[4:]).square().sum()) / 2


def goal(rank: int) -> Tensor:
    """Where a worker's weights are drawn to."""
    return Drawn(rank).get_buffer("goal")


def row(model: nn.Module) -> Tensor:
    """The weights, in double precision."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in model.parameters()])


def begin(
    world: sl.World, strategy: Gossip, rate: float, scattered: bool = True, **options: Any
) -> tuple[Drawn, Optimizer, Run]:
    """A worker's model, which begins where no other does."""
    model = Drawn(world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    own = model.get_buffer("goal").clone()
    run = sl.distribute(model, optimizer, strategy, **options)
    with torch.no_grad():
        model.get_buffer("goal").copy_(own)  # distribute gives everybody rank 0's buffers
        if scattered:
            for parameter in model.parameters():
                parameter.add_(start(world.rank))
    return model, optimizer, run


def start(rank: int) -> float:
    """What a worker's weights all are at first."""
    return float((-2) ** rank)


def take_step(model: nn.Module, optimizer: Optimizer) -> None:
    """Forward, backward, update."""
    optimizer.zero_grad()
    backward(model())
    optimizer.step()


def expected(graph: Graph, form: str, period: int, rate: float, steps: int) -> list[Tensor]:
    """Everybody's weights after each step, one worker a row, by the equations."""
    mix = graph.tensor()
    goals = torch.stack([goal(rank) for rank in range(graph.size)])
    weights = torch.stack([torch.full((WIDE,), start(rank), dtype=torch.float64) for rank in range(graph.size)])
    found: list[Tensor] = []
    due = False  # "beside" mixes what there was before a step; the first such step follows the first period
    for step in range(1, steps + 1):
        stepped = weights - rate * (weights - goals)
        if form == "after":
            weights = mix @ stepped if step % period == 0 else stepped
        else:
            weights = mix @ weights - weights + stepped if due else stepped
            due = step % period == 0
        found.append(weights)
    return found


def distance(weights: Tensor) -> float:
    """√(Σ‖x_i − x̄‖² / p)."""
    return float((weights - weights.mean(dim=0)).square().sum(dim=1).mean().sqrt())
