"""Stale on purpose: which gradient a step applies, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.strategies import strategy_run
from tests.strategies.cases import backward, flat, mlp


def applied(world: sl.World, strategy: str, steps: int, **options: Any) -> list[float | None]:
    """The gradient that each step applies, where the gradient of step t is t + 1 on the mean of the ranks."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = sl.distribute(model, optimizer, strategy=strategy, algorithm="ring", **options)
    found: list[float | None] = []
    for step in range(steps):
        optimizer.zero_grad()
        share = 2.0 * world.rank / max(1, world.size - 1) if world.size > 1 else 1.0
        backward(model(torch.tensor([[(step + 1) * share]])).sum())
        gradient = model.weight.grad
        found.append(None if gradient is None else round(float(gradient), 4))
        optimizer.step()
        assert run.stats.staleness in (0, run.strategy.delay)  # type: ignore[attr-defined]
    run.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        ("allreduce", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("allreduce(delay=1)", [None, 1, 2, 3, 4, 5, 6, 7]),
        ("allreduce(delay=3)", [None, None, None, 1, 2, 3, 4, 5]),
        ("allreduce(delay=1, warmup=3)", [1, 2, 3, None, 4, 5, 6, 7]),
        ("allreduce(delay=1, cooldown=2, steps=8)", [None, 1, 2, 3, 4, 5, 7, 8]),
        ("allreduce(delay=2, warmup=2, cooldown=2, steps=8)", [1, 2, None, None, 3, 4, 7, 8]),
        ("allreduce(delay=1, warmup=8)", [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_what_a_step_applies(ranks: int, strategy: str, wanted: list[float | None]) -> None:
    for found in sl.simulate(lambda world: applied(world, strategy, 8), ranks=ranks).results:
        assert found == wanted


def test_communication_hides_behind_a_whole_step() -> None:
    network = sl.Network(latency=0.0, bandwidth=1e4)  # 4 kB take about 0.4 s

    def case(world: sl.World, strategy: str) -> float:
        model = nn.Linear(1000, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")
        start = 0.0
        for step in range(12):
            if step == 2:
                start = world.runtime.now()
            optimizer.zero_grad()
            world.compute(1.0)
            backward(model(torch.ones(1, 1000)).sum())
            optimizer.step()
        return (world.runtime.now() - start) / 10

    synchronous = sl.simulate(lambda world: case(world, "allreduce"), ranks=2, network=network).results[0]
    delayed = sl.simulate(lambda world: case(world, "allreduce(delay=1)"), ranks=2, network=network).results[0]
    assert synchronous > 1.35
    assert delayed == pytest.approx(1.0, abs=0.01)


def test_parameters_stay_the_same_everywhere() -> None:
    def case(world: sl.World) -> torch.Tensor:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sl.distribute(model, optimizer, strategy="allreduce(delay=2, warmup=3)", algorithm="ring", bucket_bytes=64)
        draw = torch.Generator().manual_seed(world.rank)
        for _ in range(15):
            optimizer.zero_grad()
            backward(model(torch.randn(4, 6, generator=draw)).square().mean())
            optimizer.step()
        return flat(model)

    results = sl.simulate(case, ranks=3).results
    assert all(torch.equal(results[0], other) for other in results)


def test_gradients_in_flight_are_part_of_the_state() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))
            backward(model(x).square().mean())
            optimizer.step()

    def case(world: sl.World, interrupted: bool) -> torch.Tensor:
        def fresh() -> tuple[nn.Module, torch.optim.Optimizer, sl.Run]:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return model, optimizer, sl.distribute(model, optimizer, strategy="allreduce(delay=2)", algorithm="ring")

        model, optimizer, run = fresh()
        steps(model, optimizer, world.rank, range(5))
        if interrupted:
            state, weights, kept = (
                strategy_run(run).state_dict(),
                model.state_dict(),
                optimizer.state_dict(),
            )
            model, optimizer, run = fresh()
            model.load_state_dict(weights)
            optimizer.load_state_dict(kept)
            strategy_run(run).load_state_dict(state)
        steps(model, optimizer, world.rank, range(5, 10))
        return flat(model)

    whole = sl.simulate(lambda world: case(world, False), ranks=2).results
    resumed = sl.simulate(lambda world: case(world, True), ranks=2).results
    assert all(torch.equal(whole[0], other) for other in (*whole, *resumed))


def test_cooldown_wants_to_know_the_number_of_steps() -> None:
    spec = "allreduce(delay=1, cooldown=1)"
    with pytest.raises(sl.errors.IncompatibleError, match=r"cooldown needs to know the number of steps.*run\.expect"):
        sl.simulate(lambda world: applied(world, spec, 3), ranks=2)

    def told(world: sl.World) -> None:
        model = nn.Linear(1, 1)
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=spec, algorithm="ring")
        run.expect(3)
        backward(model(torch.ones(1, 1)).sum())

    sl.simulate(told, ranks=2)


def test_a_closure_cannot_wait() -> None:
    def case(world: sl.World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, strategy="allreduce(delay=1)")
        optimizer.step(lambda: 0.0)

    with pytest.raises(sl.errors.IncompatibleError, match="closure"):
        sl.simulate(case, ranks=1)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("warmup", [0, 2])
def test_a_grad_scaler_is_refused(warmup: int, fused: bool, unscaled: bool) -> None:
    def case(world: sl.World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        run = sl.distribute(model, optimizer, strategy=f"allreduce(delay=1, warmup={warmup})", algorithm="ring")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        backward(scaler.scale(model(torch.ones(1, 1)).sum()))
        if unscaled:
            scaler.unscale_(optimizer)
        with pytest.raises(sl.errors.IncompatibleError, match="cannot be used with a GradScaler"):
            scaler.step(optimizer)
        run.close()
        backward(scaler.scale(model(torch.ones(1, 1)).sum()))
        scaler.update(8.0)
        scaler.step(optimizer)  # without the run it is an optimizer like any other

    sl.simulate(case, ranks=2)


def test_a_disabled_grad_scaler_goes_with_a_delay() -> None:
    def case(world: sl.World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, strategy="allreduce(delay=1)", algorithm="ring")
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(3):
            optimizer.zero_grad()
            backward(scaler.scale(model(torch.ones(1, 1)).sum()))
            scaler.step(optimizer)
            scaler.update()

    sl.simulate(case, ranks=2)


@pytest.mark.parametrize(
    "spec", ["allreduce(delay=-1)", "allreduce(warmup=3)", "allreduce(delay=1.5)", "allreduce(delay=1, steps=0)"]
)
def test_bad_arguments(spec: str) -> None:
    with pytest.raises(sl.errors.SpecError, match="allreduce"):
        sl.simulate(lambda world: applied(world, spec, 1), ranks=1)
