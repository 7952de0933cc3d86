"""`DistributedOptimizer` of ml_comm_torch and dl_comm.torch: the weights of `sl.distribute`, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import syncline as sl
import syncline.compat.ml_comm.dl_comm.torch as dl
import syncline.compat.ml_comm.ml_comm_torch as cdl
from syncline.errors import IncompatibleError, SpecError
from syncline.events import RunLog
from syncline.testing import hunt
from tests.compat.ml_comm.test_teams import STALENESS, STEPS, read_staleness
from tests.hunting import seeds
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    result: Tensor = (model(batch) - 1).square().mean()
    return result


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int = STEPS) -> Tensor:
    for step in range(count):
        optimizer.zero_grad()
        backward(loss_of(model, step, rank))
        optimizer.step()
    return flat(model)


def by_plugin(world: sl.World, warmup: float, kind: str) -> Tensor:
    cdl.init_mpi()
    model = mlp(seed=cdl.get_rank())
    optimizer = cdl.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), np.int64(STEPS), 1, 2, warmup, 0, 1)
    return steps(model, optimizer, world.rank)


def by_distribute(world: sl.World, strategy: str, kind: str) -> Tensor:
    model = mlp(seed=world.rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sl.distribute(model, optimizer, strategy=strategy)
    return steps(model, optimizer, world.rank)


@pytest.mark.parametrize(
    ("warmup", "strategy", "kind"),
    [
        (1.0, "allreduce", "momentum"),
        (0.1, "allreduce(delay=1, warmup=2)", "momentum"),
        (0.1, "allreduce(delay=1, warmup=2)", "adam"),
        (0.0, "allreduce(delay=1)", "sgd"),
        (-0.45, f"allreduce(delay=1, cooldown=9, steps={STEPS})", "momentum"),
    ],
)
def test_weights_are_those_of_distribute(warmup: float, strategy: str, kind: str) -> None:
    ours = sl.simulate(lambda world: by_plugin(world, warmup, kind), ranks=2).results
    wanted = sl.simulate(lambda world: by_distribute(world, strategy, kind), ranks=2).results[0]
    assert all(torch.equal(each, wanted) for each in ours)


def test_dl_comm_is_synchronous_and_needs_no_init() -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp(seed=dl.get_rank())
        return steps(model, dl.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), nteam=1), world.rank)

    ours = sl.simulate(case, ranks=2).results
    wanted = sl.simulate(lambda world: by_distribute(world, "allreduce", "sgd"), ranks=2).results[0]
    assert all(torch.equal(each, wanted) for each in ours)


@pytest.mark.parametrize("ksteps", STALENESS)
def test_staleness_in_the_run_log(ksteps: int, tmp_path: Path) -> None:
    def case(world: sl.World) -> None:
        log = RunLog(tmp_path / str(world.rank))
        world.events.add(log)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cdl.DistributedOptimizer(optimizer, STEPS, warmup=ksteps / STEPS, verb=0)
        steps(model, optimizer, world.rank)
        log.close()

    sl.simulate(case, ranks=4)
    for rank in range(4):
        assert read_staleness(tmp_path / str(rank), "optimizer 0") == STALENESS[ksteps]


def test_rank_0_decides_the_warm_up_and_every_optimizer_has_its_team() -> None:
    def case(world: sl.World) -> Tensor:
        first, second = mlp(seed=world.rank), mlp(seed=world.rank + 7)
        for model, warmup in ((first, 0.1 if world.rank == 0 else 1.0), (second, 1.0)):
            optimizer = cdl.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), STEPS, 1, 2, warmup, 0)
            steps(model, optimizer, world.rank)
        return flat(first)

    ours = sl.simulate(case, ranks=2).results
    wanted = sl.simulate(lambda world: by_distribute(world, "allreduce(delay=1, warmup=2)", "sgd"), ranks=2).results[0]
    assert all(torch.equal(each, wanted) for each in ours)


@pytest.mark.parametrize("warmup", [1.0, 0.0])
def test_frozen_and_unused_parameters(warmup: float) -> None:
    """The wrapper itself fails on a parameter without a gradient."""

    def case(world: sl.World) -> tuple[list[Tensor], Tensor]:
        used, frozen, unused = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
        sometimes = nn.Linear(2, 1, bias=False)
        frozen.requires_grad_(False)
        everything = nn.ModuleList([used, frozen, unused, sometimes])
        optimizer = torch.optim.SGD(everything.parameters(), lr=0.5)
        cdl.DistributedOptimizer(optimizer, 4, warmup=warmup, verb=0)
        before = [*map(torch.clone, frozen.parameters()), *map(torch.clone, unused.parameters())]
        start = sometimes.weight.detach().clone()
        for _ in range(4):
            optimizer.zero_grad()
            loss = used(frozen(torch.ones(3, 2)).expand(3, 2)).sum()
            if world.rank == 1:  # a parameter that one rank uses
                loss = loss + sometimes(torch.ones(1, 2)).sum()
            backward(loss)
            optimizer.step()
        after = [*frozen.parameters(), *unused.parameters()]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        return [*used.parameters()], start - sometimes.weight.detach()

    results = sl.simulate(case, ranks=2).results
    assert all(torch.equal(first, other) for first, other in zip(*(found[0] for found in results), strict=True))
    applied = 4 if warmup else 3
    assert all(found[1].tolist() == [[applied * 0.25] * 2] for found in results)


@pytest.mark.parametrize("warmup", [1.0, 0.2])
def test_accumulated_gradients(warmup: float) -> None:
    """A step has the mean of what its backward passes have added, and passes are not steps."""

    def case(world: sl.World, passes: int) -> Tensor:
        model = mlp(seed=0)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        cdl.DistributedOptimizer(optimizer, 10, warmup=warmup, verb=0)
        for step in range(10):
            optimizer.zero_grad()
            losses = [loss_of(model, 2 * step + number, world.rank) for number in range(2)]
            for loss in losses if passes == 2 else [losses[0] + losses[1]]:
                backward(loss)
            optimizer.step()
        return flat(model)

    twice = sl.simulate(lambda world: case(world, 2), ranks=2).results
    once = sl.simulate(lambda world: case(world, 1), ranks=2).results
    assert torch.equal(twice[0], twice[1])
    assert torch.allclose(twice[0], once[0], atol=1e-6)


def test_passes_that_begin_after_the_warm_up() -> None:
    def case(world: sl.World, warmup: float) -> None:
        model = mlp(seed=0)
        optimizer = cdl.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), 10, warmup=warmup, verb=0)
        for step in range(10):
            optimizer.zero_grad()
            for _ in range(1 + (step == 6)):
                backward(loss_of(model, step, world.rank))
            optimizer.step()

    for warmup in (0.0, 1.0):
        sl.simulate(lambda world, warmup=warmup: case(world, warmup), ranks=2)  # type: ignore[misc]
    with pytest.raises(IncompatibleError, match=r"step 6 of allreduce\(delay=1, warmup=2\).*Take warmup=0 "):
        sl.simulate(lambda world: case(world, 0.2), ranks=2)


def gan(world: sl.World, wrap: Any) -> Tensor:
    """Steps of a generator and a discriminator. The generator's loss passes through the discriminator."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    first = wrap(generator, torch.optim.SGD(generator.parameters(), lr=0.05), 0)
    second = wrap(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.05), 1)
    for step in range(8):
        draw = torch.Generator().manual_seed(10 * step + world.rank)
        noise, real = torch.randn(4, 2, generator=draw), torch.randn(4, 3, generator=draw)
        second.zero_grad()
        backward(discriminator(generator(noise).detach()).mean() - discriminator(real).mean())
        second.step()
        first.zero_grad()
        backward(-discriminator(generator(noise)).mean())
        first.step()
    return torch.cat([flat(generator), flat(discriminator)])


def by_two_optimizers(world: sl.World, warmups: tuple[float, float] = (0.25, -0.25)) -> Tensor:
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.optim.Optimizer:
        return cdl.DistributedOptimizer(optimizer, 8, 2, 2, warmups[number], 0)

    return gan(world, wrap)


class ByHand:
    """An optimizer that averages its gradients in step(), a step late where the table says so."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stale: list[int]) -> None:
        self.model, self.optimizer, self.stale = model, optimizer, stale
        self.earlier: list[Tensor] | None = None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        means = [sl.allreduce(parameter.grad, op="mean") for parameter in self.model.parameters()]
        stale = self.stale.pop(0)
        applied, self.earlier = (self.earlier, means) if stale else (means, None)
        if applied is None:
            return
        for parameter, mean in zip(self.model.parameters(), applied, strict=True):
            parameter.grad = mean
        self.optimizer.step()


WARMED_UP, COOLED_DOWN = [0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("warmups", "tables"),
    [
        ((0.25, -0.25), (WARMED_UP, COOLED_DOWN)),
        ((-0.25, 0.25), (COOLED_DOWN, WARMED_UP)),
        ((1.0, 0.125), ([0] * 8, [0] + [1] * 7)),
    ],
)
def test_gan_applies_the_gradients_of_each_step(
    warmups: tuple[float, float], tables: tuple[list[int], list[int]]
) -> None:
    """The generator's pass leaves gradients in the discriminator, which no step of it may apply."""

    def by_hand(world: sl.World) -> Tensor:
        return gan(world, lambda model, optimizer, number: ByHand(model, optimizer, list(tables[number])))

    ours = sl.simulate(lambda world: by_two_optimizers(world, warmups), ranks=2).results
    wanted = sl.simulate(by_hand, ranks=2).results[0]
    assert torch.equal(ours[0], ours[1])
    assert torch.allclose(ours[0], wanted, atol=1e-6)


@pytest.mark.hunt
def test_two_optimizers_do_not_mix() -> None:
    wanted = sl.simulate(by_two_optimizers, ranks=2).results[0]

    def check(simulation: sl.Simulation) -> None:
        assert all(torch.equal(found, wanted) for found in simulation.results)

    hunt(by_two_optimizers, ranks=2, seeds=seeds(2, 200), invariant=check)


def test_average_returns_the_mean() -> None:
    def case(world: sl.World) -> tuple[Any, ...]:
        loss = torch.tensor(float(world.rank))
        return cdl.average(float(world.rank)), cdl.average(loss).item(), loss.item()

    assert sl.simulate(case, ranks=3).results == ((1, 1, 0), (1, 1, 1), (1, 1, 2))


def test_lines_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    def case(world: sl.World) -> None:
        model = nn.Linear(6, 1)
        steps(model, cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), STEPS, freq=5), world.rank)

    sl.simulate(case, ranks=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ml_comm: optimizer 0: 2 ranks, synchronous for 2 steps, then pipelined"
    assert [line.split(": ")[2].split(",")[0] for line in lines[1:]] == ["step 5", "step 10", "step 15", "step 20"]
    assert lines[1].endswith("3 of the last 5 pipelined")


def test_refused() -> None:
    def case(world: sl.World) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SpecError, match=r"nstep=0\.5"):
            cdl.DistributedOptimizer(optimizer, 0.5)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match=r"takes a torch\.optim\.Optimizer, not a Linear"):
            dl.DistributedOptimizer(model)  # type: ignore[type-var]
        dl.DistributedOptimizer(optimizer)
        with pytest.raises(IncompatibleError, match="synchronised by another run"):
            dl.DistributedOptimizer(optimizer)
        other = nn.Linear(2 + world.rank, 1)
        with pytest.raises(IncompatibleError, match="different models"):
            dl.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))

    sl.simulate(case, ranks=2)
