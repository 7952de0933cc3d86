"""What the tests of bsp, ssp and downpour train, on simulated workers with servers among or beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.server import network_of, serve
from syncline.transports import Transport
from syncline.world.simulation import ExtraProcess
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp


def servers(workers: int, count: int, evaluators: int = 0) -> list[ExtraProcess | Callable[[Transport], Any]]:
    """Dedicated servers, for `simulate(extra=…)`."""
    return [lambda channel: serve(network_of(channel, workers, count, evaluators))] * count


def batch(rank: int, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, 6, generator=draw), torch.randint(0, 3, (rows,), generator=draw)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def together(optimizer: str, workers: int, steps: int) -> Tensor:
    """One process that adds up the workers' gradients in their order: what synchronous training is to be."""
    model = mlp()
    own = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        sums: list[Tensor] = []
        for rank in range(workers):
            model.zero_grad()
            backward(loss_of(model, rank, step))
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            sums = [total.add(each) for total, each in zip(sums, gradients, strict=True)] if sums else gradients
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total.mul(1.0 / workers)
        own.step()
    return flat(model)


def apart(
    optimizer: str, strategy: str, steps: int, pace: Callable[[int, int], float] = lambda rank, step: 0.0
) -> Callable[[sl.World], Tensor]:
    """The same by a strategy; `pace(rank, step)` are the seconds that a step computes."""

    def work(world: sl.World) -> Tensor:
        model = mlp(seed=world.rank)  # rank 0's is the one that counts
        own = OPTIMIZERS[optimizer](model.parameters())
        with sl.distribute(model, own, strategy=strategy, algorithm="ring"):
            for step in range(steps):
                own.zero_grad()
                world.compute(pace(world.rank, step))
                backward(loss_of(model, world.rank, step))
                own.step()
        return flat(model)

    return work


class Tags(nn.Module):
    """One weight for each (worker, step). A step's loss is its own weight: an applied update leaves its mark there."""

    def __init__(self, workers: int, steps: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(workers, steps))

    def forward(self, worker: int, step: int) -> Tensor:
        return self.seen[worker, step]

    def read(self) -> set[tuple[int, int]]:
        """The updates that these weights have in them, each exactly once."""
        assert set(self.seen.detach().view(-1).tolist()) <= {0.0, -1.0}, f"an update came twice: {self.seen}"
        return {(int(worker), int(step)) for worker, step in self.seen.detach().nonzero()}


def step_tag(model: Tags, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model(worker, step))
    optimizer.step()


def results(fn: Callable[[sl.World], Any], ranks: int, dedicated: int = 0, **options: Any) -> tuple[Any, ...]:
    """Of a simulation, with so many servers beside the workers; none: each worker is one."""
    aside: Sequence[Any] = servers(ranks, dedicated) if dedicated else ()
    return sl.simulate(fn, ranks, extra=aside, **options).results
