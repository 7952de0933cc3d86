"""Uses in which gradients could go wrong without a word."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.strategies import strategy_run
from tests.strategies.cases import backward, mlp


def attach(model: nn.Module, **options: Any) -> tuple[sl.Run, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sl.distribute(model, optimizer, **{"algorithm": "ring", **options}), optimizer


class Places(nn.Module):
    """The gradient of `places` is a view of the one that `linear` still needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, bias=False)
        self.places = nn.Parameter(torch.zeros(5, 4))
        with torch.no_grad():
            self.linear.weight.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + self.places.unsqueeze(0)
        return result


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 30])
def test_a_gradient_that_shares_its_memory(bucket_bytes: int) -> None:
    def case(world: sl.World) -> Tensor:
        model = Places()
        attach(model, bucket_bytes=bucket_bytes)
        for _ in range(2):
            model.zero_grad()
            backward(model(torch.ones(1, 5, 3) * (world.rank + 1)).square().sum())
        assert model.linear.weight.grad is not None
        return model.linear.weight.grad.clone()

    alone = Places()
    for rank in range(2):
        backward(alone(torch.ones(1, 5, 3) * (rank + 1)).square().sum() / 2)
    for found in sl.simulate(case, ranks=2).results:
        torch.testing.assert_close(found, alone.linear.weight.grad)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
@pytest.mark.parametrize("strategy", ["allreduce", "allreduce(delay=1)", "allreduce(delay=2, warmup=1)"])
def test_uneven_data_step_by_step(strategy: str, bucket_bytes: int) -> None:
    def case(world: sl.World) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        run, optimizer = attach(model, strategy=strategy, bucket_bytes=bucket_bytes)
        seen = []
        batches = [torch.full((1, 1), float(i + world.rank)) for i in range(3 + world.rank % 2)]
        for _ in range(3):
            for x in run.shard(batches, split=False):
                optimizer.zero_grad()
                backward((model(x) - 1).square().sum() * 0.01)
                optimizer.step()
                seen.append(round(float(model.weight.detach()), 6))
            seen.append(round(float(model.weight.detach()), 6))
        return [seen[i] for i in range(len(seen)) if world.rank % 2 == 0 or i % 5 != 3]

    results = sl.simulate(case, ranks=3).results
    assert results[0] == results[1] == results[2]


def test_not_finite_outside_the_buckets_too() -> None:
    def case(world: sl.World) -> None:
        model = nn.Embedding(5, 2, sparse=True)
        attach(model, check_finite=True)
        backward((model(torch.tensor([world.rank])) * (float("nan") if world.rank else 1.0)).sum())

    with pytest.raises(sl.errors.DivergedError, match="rank 1: weight"):
        sl.simulate(case, ranks=2)


def test_a_channels_last_weight_that_thaws() -> None:
    def case(world: sl.World) -> Tensor:
        model: nn.Conv2d = nn.Conv2d(3, 2, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        other = nn.Sequential(nn.Conv2d(3, 3, 1), model)
        nn.init.ones_(model.weight)
        model.weight.requires_grad_(False)
        attach(other)
        for step in range(3):
            model.weight.requires_grad_(step > 0)
            other.zero_grad()
            backward(other(torch.ones(1, 3, 4, 4) * (world.rank + 1)).sum())
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    first, second = sl.simulate(case, ranks=2).results
    assert torch.equal(first, second)


def test_saving_gradients_in_flight_keeps_the_models_own() -> None:
    def case(world: sl.World) -> bool:
        model = nn.Embedding(5, 2, sparse=True)
        run, optimizer = attach(model, strategy="allreduce(delay=1)")
        for step in range(3):
            optimizer.zero_grad()
            backward(model(torch.tensor([step])).sum())
        before = model.weight.grad
        strategy_run(run).state_dict()
        return model.weight.grad is before

    assert sl.simulate(case, ranks=2).results == (True, True)


def test_a_compiled_model_takes_the_state_of_a_plain_one() -> None:
    class Wrapped(nn.Module):  # names as torch.compile makes them
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self._orig_mod(x)
            return result

    def case(world: sl.World) -> bool:
        plain, wrapped = mlp(), Wrapped(mlp())
        first, _ = attach(plain, strategy="allreduce(delay=1)")
        second, _ = attach(wrapped, strategy="allreduce(delay=1)")
        for _ in range(2):
            plain.zero_grad()
            backward(plain(torch.ones(2, 6)).sum())
        strategy_run(second).load_state_dict(strategy_run(first).state_dict())
        found = strategy_run(second).state_dict()["shared"]["state"]
        kept = strategy_run(first).state_dict()["shared"]["state"]
        return list(found["waiting"][0]) == list(kept["waiting"][0]) != []

    assert sl.simulate(case, ranks=2).results == (True, True)


def test_uneven_data_with_unshared_schedules_is_refused() -> None:
    batches = [torch.ones(1, 1)] * 4

    def rates(world: sl.World, strategy: str) -> None:
        model = nn.Linear(1, 1)
        run, optimizer = attach(model, strategy=strategy)
        steps = 0
        for _ in range(3):
            for x in run.shard(batches[world.rank :], split=False, name="own"):
                optimizer.zero_grad()
                backward(model(x).sum())
                optimizer.step()
                steps += 1
                optimizer.param_groups[0]["lr"] = 0.5**steps  # a schedule that nobody knows

    for strategy in ("allreduce", "local(period=2)", "gossip"):
        with pytest.raises(sl.errors.IncompatibleError, match="schedulers="):
            sl.simulate(partial(rates, strategy=strategy), ranks=2)

    def two(world: sl.World) -> None:
        run, _ = attach(nn.Linear(1, 1))
        attach(nn.Linear(1, 1))
        list(run.shard(batches, split=False))

    with pytest.raises(sl.errors.IncompatibleError, match="2 runs"):
        sl.simulate(two, ranks=2)

    def closure(world: sl.World) -> None:
        run, optimizer = attach(nn.Linear(1, 1))
        for _ in run.shard(batches, split=False):
            optimizer.step(lambda: 0.0)

    with pytest.raises(sl.errors.IncompatibleError, match="closure"):
        sl.simulate(closure, ranks=2)


def test_a_grad_scaler_follows_too() -> None:
    def case(world: sl.World) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        run = sl.distribute(model, optimizer, schedulers=[scaler], algorithm="ring")
        for _ in range(4):
            for x in run.shard([torch.ones(1, 1)] * (3 - world.rank), split=False, name="own"):
                optimizer.zero_grad()
                backward(scaler.scale(model(x).square().sum()))
                scaler.step(optimizer)
                scaler.update()
        return scaler.get_scale(), float(model.weight.detach())

    first, second = sl.simulate(case, ranks=2).results
    assert first == second
