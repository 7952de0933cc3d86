"""`DistributedOptimizer(op=Adasum)`: the ranks' steps, combined."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.compat.horovod.compression import Compression
from syncline.compat.horovod.context import Adasum, ProcessSet, init
from syncline.compat.horovod.execution import combine
from syncline.compat.horovod.optimizer import DistributedOptimizer
from syncline.errors import IncompatibleError, UnsupportedError
from syncline.testing import Pool
from tests.compat.horovod.training import loss_of, wrapped
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp, on_gloo


def combined(deltas: list[Tensor]) -> Tensor:
    """Of pairs, then of pairs of pairs."""
    while len(deltas) > 1:
        deltas = [combine(deltas[i], deltas[i + 1]) for i in range(0, len(deltas), 2)]
    return deltas[0]


def reference(kind: str, ranks: int, steps: int, passes: int = 1) -> Tensor:
    """Each rank's optimizer by itself, and their steps combined, in one process."""
    models = [mlp() for _ in range(ranks)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    for step in range(steps):
        before = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for part in range(passes):
                backward(loss_of(model, passes * step + part, rank))
            optimizer.step()
        for number, start in enumerate(before):
            mine = [list(model.parameters())[number] for model in models]
            whole = start + combined([parameter.detach() - start for parameter in mine])
            for parameter in mine:
                parameter.detach().copy_(whole)
    return flat(models[0])


def train(world: sl.World, kind: str = "momentum", passes: int = 1, compression: Any = Compression.none) -> Tensor:
    init()
    model = mlp()
    plain: Any = OPTIMIZERS[kind](model.parameters())
    optimizer = wrapped(model, plain, op=Adasum, backward_passes_per_step=passes, compression=compression)
    assert isinstance(optimizer, type(plain))
    for step in range(3):
        optimizer.zero_grad()
        for part in range(passes):
            backward(loss_of(model, passes * step + part, world.rank))
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize(("kind", "ranks"), [("sgd", 2), ("momentum", 1), ("momentum", 4), ("adam", 2)])
def test_the_steps_are_combined(kind: str, ranks: int) -> None:
    results = sl.simulate(lambda world: train(world, kind), ranks=ranks).results
    assert all(torch.equal(found, results[0]) for found in results)
    torch.testing.assert_close(results[0], reference(kind, ranks, 3))


def test_passes_add_up() -> None:
    for found in sl.simulate(lambda world: train(world, passes=2), ranks=2).results:
        torch.testing.assert_close(found, reference("momentum", 2, 3, passes=2))


def test_in_half_precision() -> None:
    for found in sl.simulate(lambda world: train(world, compression=Compression.fp16), ranks=2).results:
        torch.testing.assert_close(found, reference("momentum", 2, 3), rtol=1e-3, atol=1e-3)


@pytest.mark.xdist_group("gloo")
def test_on_gloo(gloo: Pool) -> None:
    for found in gloo.run(on_gloo, 2, train):
        torch.testing.assert_close(found, reference("momentum", 2, 3))


def test_a_rank_without_a_gradient_adds_nothing() -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1), op=Adasum)
        if world.rank == 0:
            backward(loss_of(model, 0, 0))
        optimizer.step()
        return flat(model)

    model = mlp()
    backward(loss_of(model, 0, 0))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in sl.simulate(case, ranks=2).results:
        torch.testing.assert_close(found, flat(model))


def test_the_order_of_calls() -> None:
    def case(world: sl.World) -> None:
        init()
        model = mlp()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1), op=Adasum)
        backward(loss_of(model, 0, world.rank))
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
            backward(loss_of(model, 0, world.rank))
        with pytest.raises(AssertionError, match="exchanged"), optimizer.skip_synchronize():
            pass
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step(lambda: closure(optimizer, model, world.rank)) is not None
        optimizer.zero_grad()

    sl.simulate(case, ranks=2)


def closure(optimizer: Any, model: nn.Module, rank: int) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, 0, rank)
    backward(loss)
    return loss.detach()


def test_what_is_refused() -> None:
    def case(world: sl.World, how: str) -> None:
        pair = ProcessSet([0, 1])
        init(process_sets=[pair])
        model = mlp()
        options: Any = {"set": {"process_set": pair}, "codec": {"compression": "onebit"}, "three": {}}[how]
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=Adasum, **options)
        optimizer.step()

    for how, kind, said in (
        ("set", UnsupportedError, "global process set"),
        ("codec", IncompatibleError, "onebit"),
        ("three", IncompatibleError, "power of two"),
    ):
        for found in sl.simulate(partial(case, how=how), ranks=3, return_exceptions=True).results:
            assert isinstance(found, kind)
            assert said in str(found)
