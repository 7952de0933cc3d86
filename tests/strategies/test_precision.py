"""Half precision, loss scales, and settings that schedules change: what servers and averages make of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError
from tests.strategies.every import EVERY, play, whole

HELD = ("bsp", "ssp(slack=0)", "master", "master(masters=2)")
SERVED = (*HELD, "ssp(slack=2)", "master(sync=False)", "downpour(rule='sgd')")


def one_weight(start: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model


# Averages of weights in half precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec", [spec for spec in EVERY if spec.split("(")[0] in ("local", "adacomm", "diloco", "easgd", "gossip")]
)
def test_equal_weights_in_half_precision_stay_as_they_are(spec: str, dtype: torch.dtype) -> None:
    def work(world: sl.World) -> bool:
        torch.manual_seed(0)
        model = nn.Linear(40, 5).to(dtype)
        before = whole(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, strategy=spec, algorithm="ring")
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 40, dtype=dtype)).sum().backward()
            optimizer.step()
        with run.agreed():
            shown = whole(model)
        run.close()
        return torch.equal(before, shown) and torch.equal(before, whole(model))

    assert all(play(work, ranks=5))


def test_a_centre_of_half_precision_moves_by_small_steps() -> None:
    """0.18 of a difference of two last digits is less than one: a centre in bfloat16 would stand still."""

    def work(world: sl.World) -> Tensor:
        model = one_weight(256.0).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run: Any = sl.distribute(model, optimizer, strategy="easgd(period=1, alpha=0.05)")
        if world.rank == 0:
            with torch.no_grad():
                model.weight.fill_(258.0)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        centre: Tensor = run.centre.root[0].clone()
        run.close()
        return centre

    assert all(float(centre) > 256.5 for centre in play(work))


@pytest.mark.parametrize("spec", ["bsp", "downpour", "master(sync=False)", "easgd(sync=False)", "onesided"])
def test_float64_is_refused_where_weights_are_kept_in_float32(spec: str) -> None:
    def work(world: sl.World) -> None:
        model = one_weight().double()
        sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=spec)

    with pytest.raises(IncompatibleError, match=r"weight is float64.*float32"):
        play(work)


@pytest.mark.parametrize("spec", ["allreduce", "bsp", "gossip(pairwise=True)", "onesided", "hogwild"])
def test_a_buffer_of_double_precision_is_not_rounded(spec: str) -> None:
    def work(world: sl.World) -> float:
        model = one_weight()
        model.register_buffer("seen", torch.full((1,), 1.0 / 3.0, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, strategy=spec):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        return float(model.get_buffer("seen"))

    assert play(work) == (1.0 / 3.0,) * 2


# GradScaler.


def scaled_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, broken: bool) -> None:
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 1), float("inf") if broken else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spec", SERVED)
def test_servers_get_gradients_without_the_loss_scale(spec: str, fused: bool) -> None:
    def work(world: sl.World) -> float:
        model = one_weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        run = sl.distribute(model, optimizer, strategy=spec)
        scaled_step(model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0), broken=False)
        run.close()
        return model.weight.item()

    expected = 0.8 if spec.startswith(("downpour", "master(sync=False")) else 0.9
    assert play(work) == pytest.approx((expected, expected))


@pytest.mark.parametrize("spec", HELD)
def test_a_step_that_a_scaler_leaves_out_pushes_nothing(spec: str) -> None:
    def work(world: sl.World) -> float:
        model = one_weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        run = sl.distribute(model, optimizer, strategy=spec)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled_step(model, optimizer, scaler, broken=world.rank == 1)
        run.close()
        return model.weight.item()

    assert play(work) == pytest.approx((0.9, 0.9))  # the mean is over the worker that has a gradient


@pytest.mark.parametrize(
    "spec", ["local(period=2)", "diloco(period=2)", "easgd(period=2)", "gossip", "adacomm(start=2)"]
)
def test_a_scaler_that_skips_steps_unheard_is_refused(spec: str) -> None:
    def work(world: sl.World, fused: bool) -> float:
        model = one_weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
        run = sl.distribute(model, optimizer, strategy=spec)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            scaled_step(model, optimizer, scaler, broken=step == 1 and world.rank == 1)
        run.close()
        return model.weight.item()

    assert play(lambda world: work(world, fused=True)) == (1.0, 1.0)
    with pytest.raises(IncompatibleError, match=r"GradScaler.*fused=True"):
        play(lambda world: work(world, fused=False))


# Settings that change.


@pytest.mark.parametrize("spec", HELD)
def test_schedules_of_momentum_and_weight_decay_reach_the_servers(spec: str) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["momentum"] = 0.1 * step
            optimizer.param_groups[0]["weight_decay"] = 0.05 * (step % 3)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def work(world: sl.World) -> float:
        model = one_weight()
        optimizer = make(model)
        with sl.distribute(model, optimizer, strategy=spec):
            train(model, optimizer)
        return model.weight.item()

    plain = one_weight()
    train(plain, make(plain))
    assert play(work) == pytest.approx((plain.weight.item(),) * 2, rel=1e-6)


def test_one_cycle_of_rate_and_momentum_at_the_servers() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
        for step in range(8):
            optimizer.zero_grad()
            model(torch.full((1, 1), 1.0 + step)).sum().backward()
            optimizer.step()
            schedule.step()

    make: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    }

    def work(world: sl.World, kind: str) -> float:
        model = one_weight()
        optimizer = make[kind](model)
        with sl.distribute(model, optimizer, strategy="bsp"):
            train(model, optimizer)
        return model.weight.item()

    for kind, maker in make.items():
        plain = one_weight()
        train(plain, maker(plain))
        found = play(partial(work, kind=kind))
        assert found == pytest.approx((plain.weight.item(),) * 2, rel=1e-6)


def test_settings_of_the_momentum_that_asynchrony_leaves() -> None:
    def work(world: sl.World) -> float:
        model = one_weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        run: Any = sl.distribute(model, optimizer, strategy="master(sync=False, correct_momentum=True)")
        optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        world.barrier()
        found = float(dict(run.rules[0].options)["momentum"])
        run.close()
        return found

    assert play(work) == pytest.approx((8 / 9, 8 / 9))


# Batches of different length.


@pytest.mark.parametrize("spec", ["allreduce", *HELD])
def test_a_short_batch_counts_as_what_it_is(spec: str) -> None:
    """Six samples on two workers, two in a batch: the last batch of each has one, and counts whole in its step."""

    def work(world: sl.World) -> float:
        model = one_weight(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 1)), batch_size=2)
        with sl.distribute(model, optimizer, strategy=spec) as run:
            for (x,) in run.shard(loader):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        return model.weight.item()

    assert play(work) == pytest.approx((-2.0, -2.0))


@pytest.mark.parametrize("spec", ["allreduce", *HELD])
def test_workers_count_by_the_samples_that_they_have(spec: str) -> None:
    """Three samples on two workers: the mean is over samples, not over workers."""

    def work(world: sl.World) -> float:
        model = one_weight(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = torch.utils.data.TensorDataset(torch.tensor([[1.0], [4.0], [1.0]]))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        with sl.distribute(model, optimizer, strategy=spec) as run:
            for (x,) in run.shard(loader):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        return model.weight.item()

    assert play(work) == pytest.approx((-2.0, -2.0))


# The synchronous steps of local SGD.


def test_the_first_steps_of_local_clip_what_all_workers_have() -> None:
    """The gradients 3 and −1 have the mean 1: clipping each to 1 first would make it 0."""

    def work(world: sl.World, spec: str) -> float:
        model = one_weight(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with sl.distribute(model, optimizer, strategy=spec):
            model(torch.full((1, 1), -1.0 if world.rank else 3.0)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return model.weight.item()

    for spec in ("allreduce", "local(period=2, after=2)"):
        assert play(partial(work, spec=spec)) == pytest.approx((-1.0, -1.0), abs=1e-5)


def test_a_closure_in_the_synchronous_steps_of_local_is_refused() -> None:
    def work(world: sl.World) -> None:
        model = one_weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, strategy="local(period=2, after=2)")

        def closure() -> Tensor:
            loss: Tensor = model(torch.ones(1, 1)).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)

    with pytest.raises(IncompatibleError, match="closure"):
        play(work)
