"""Small trainings in the manner of Horovod's scripts, and the same by `sl.distribute`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import syncline as sl
from syncline.compat.horovod.compression import Compression
from syncline.compat.horovod.context import init
from syncline.compat.horovod.objects import broadcast_optimizer_state, broadcast_parameters
from syncline.compat.horovod.optimizer import DistributedOptimizer
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp

STEPS = 6


def batch(step: int, rank: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    result: Tensor = (model(batch(step, rank)) - 1).square().mean()
    return result


def wrapped(model: nn.Module, optimizer: Optimizer, **options: Any) -> Any:
    return DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def by_horovod(world: sl.World, kind: str = "momentum", compression: Any = Compression.none, **options: Any) -> Tensor:
    """As Horovod's scripts train; the parameters after it."""
    init()
    model = mlp(seed=world.rank)
    optimizer: Any = OPTIMIZERS[kind](model.parameters())
    optimizer = wrapped(model, optimizer, compression=compression, **options)
    broadcast_parameters(model.state_dict(), root_rank=0)
    broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, step, world.rank))
        optimizer.step()
    return flat(model)


def by_distribute(world: sl.World, kind: str = "momentum", codec: Any = None, **options: Any) -> Tensor:
    """The same in our own words."""
    model = mlp(seed=world.rank)
    optimizer: Any = OPTIMIZERS[kind](model.parameters())
    sl.distribute(model, optimizer, codec=codec, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, step, world.rank))
        optimizer.step()
    return flat(model)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.to_dense().clone()
        for name, parameter in model.named_parameters()
    }


def expected(ranks: int, make: Any, loss: Any, total: bool = False) -> dict[str, Any]:
    """The mean, or the sum, of all ranks' gradients, taken in one process."""
    model = make()
    for rank in range(ranks):
        found = loss(model, rank)
        if found is not None:
            backward(found if total else found / ranks)
    return gradients(model)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient is None) == (wanted[name] is None), f"{name}: {gradient} and {wanted[name]}"
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted[name], msg=f"{name}: {gradient} is not {wanted[name]}")
