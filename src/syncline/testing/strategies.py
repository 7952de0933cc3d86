"""The contract of strategies: the behaviour that all synchronisation strategies share, on simulated workers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import syncline as sl
from syncline.errors import PeerLostError
from syncline.strategies import Run, Strategy, build_strategy
from syncline.transports import faults

__all__ = ["StrategyContract"]

STEPS = 12

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def net() -> nn.Sequential:
    """A small network with fixed initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def flat(model: nn.Module) -> Tensor:
    """The parameters of a model as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """The batch of a worker in a step."""
    draw = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(6, 4, generator=draw), torch.randint(0, 2, (6,), generator=draw)


def take_step(model: nn.Module, optimizer: Optimizer, worker: int, step: int) -> None:
    """One step of plain training."""
    x, y = batch(worker, step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def plain_training(optimizer: str) -> Tensor:
    """The parameters after `STEPS` steps without Syncline."""
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        take_step(model, made, 0, step)
    return flat(model)


class StrategyContract:
    """The contract of strategies.

    Inherit, define `make`, and set the attributes that differ:

    ```python
    class TestMyStrategy(StrategyContract):
        exact_resume = False

        def make(self):
            return MyStrategy(period=4)
    ```
    """

    ranks: ClassVar[int] = 3
    options: ClassVar[dict[str, Any]] = {}
    """More arguments of `distribute`: a codec, a collective."""
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "momentum", "adam")
    """The optimizers that it supports."""
    as_one: ClassVar[bool] = True
    """Whether workers with equal data compute the same as one worker."""
    exact_resume: ClassVar[bool] = True
    """Whether a resumed run equals an uninterrupted run, bit for bit."""
    keeps_own: ClassVar[bool] = False
    """Whether each worker keeps its own model after `close()`."""
    conserves: ClassVar[bool] = True
    """Whether synchronisation without gradients conserves the sum of `total` over workers."""
    silent: ClassVar[bool] = False
    """Whether nothing is sent before `close()`."""

    @abstractmethod
    def make(self) -> Strategy:
        """Make the strategy under test."""

    def total(self, run: Run) -> Tensor:
        """The quantity of this worker whose sum over workers is conserved."""
        return flat(run.model)

    def attach(self, optimizer: str = "sgd", rate: float | None = None) -> tuple[nn.Module, Optimizer, Run]:
        """Make a model, its optimizer and its run."""
        model = net()
        made = OPTIMIZERS[optimizer](model.parameters())
        if rate is not None:
            for group in made.param_groups:
                group["lr"] = rate
        return model, made, sl.distribute(model, made, self.make(), **self.options)

    def simulate(self, work: Callable[[sl.World], Any], ranks: int | None = None, **how: Any) -> tuple[Any, ...]:
        """Run a function on simulated workers; return the results."""
        return sl.simulate(work, ranks=ranks or self.ranks, **how).results

    def agreed(self, run: Run) -> Tensor:
        """The parameters of the agreed model."""
        with run.agreed():
            return flat(run.model)

    def test_repr_is_the_spec(self) -> None:
        strategy = self.make()
        assert build_strategy(repr(strategy)) == strategy

    def test_one_worker_equals_plain_training(self) -> None:
        for optimizer in self.optimizers:

            def alone(world: sl.World, optimizer: str = optimizer) -> Tensor:
                model, made, run = self.attach(optimizer)
                for step in range(STEPS):
                    take_step(model, made, 0, step)
                run.close()
                return flat(model)

            assert torch.equal(self.simulate(alone, ranks=1)[0], plain_training(optimizer)), optimizer

    def test_workers_with_equal_data_equal_one_worker(self) -> None:
        if not self.as_one:
            pytest.skip("the strategy does not promise it")

        def work(world: sl.World) -> Tensor:
            model, made, run = self.attach("sgd")
            for step in range(STEPS):
                take_step(model, made, 0, step)
            run.close()
            return flat(model)

        for found in self.simulate(work):
            torch.testing.assert_close(found, plain_training("sgd"), rtol=1e-5, atol=1e-6)

    def test_synchronisation_conserves_the_total(self) -> None:
        if not self.conserves:
            pytest.skip("the strategy does not promise it")

        def work(world: sl.World) -> tuple[Tensor, Tensor]:
            model, made, run = self.attach("sgd", rate=0.0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * (world.rank + 1))
            world.barrier()
            before = self.total(run).double()
            for step in range(STEPS):
                take_step(model, made, world.rank, step)
            world.barrier()
            after = self.total(run).double()
            run.close()
            return before, after

        found = self.simulate(work)
        before, after = (torch.stack([pair[number] for pair in found]).sum(dim=0) for number in (0, 1))
        torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-5)

    def test_close_leaves_the_agreed_model_on_all_workers(self) -> None:
        def work(world: sl.World) -> tuple[Tensor, Tensor, Tensor]:
            model, made, run = self.attach("momentum" if "momentum" in self.optimizers else "sgd")
            for step in range(STEPS + 1):
                take_step(model, made, world.rank, step)
            world.barrier()
            own, shown = flat(model), self.agreed(run)
            assert torch.equal(flat(model), own), "agreed() restores the weights of each worker"
            world.barrier()
            run.close()
            return own, shown, flat(model)

        found = self.simulate(work)
        for own, shown, left in found:
            torch.testing.assert_close(shown, found[0][1], rtol=0, atol=0)
            if self.keeps_own:
                assert torch.equal(left, own)
            else:
                torch.testing.assert_close(left, shown, rtol=0, atol=0)

    def test_resumed_run_equals_uninterrupted_run(self, tmp_path: Path) -> None:
        if not self.exact_resume:
            pytest.skip("the strategy is not deterministic")

        def work(world: sl.World, first: int, last: int, resume: bool, save: bool) -> Tensor:
            model, made, run = self.attach("momentum" if "momentum" in self.optimizers else "sgd")
            if resume:
                assert sl.load(tmp_path, run=run) is not None
            for step in range(first, last):
                take_step(model, made, world.rank, step)
            if save:
                sl.save(tmp_path, step=last, run=run)
            world.barrier()
            run.close()
            return flat(model)

        whole = self.simulate(lambda world: work(world, 0, STEPS, resume=False, save=False))
        self.simulate(lambda world: work(world, 0, 7, resume=False, save=True))
        rest = self.simulate(lambda world: work(world, 7, STEPS, resume=True, save=False))
        for one, other in zip(whole, rest, strict=True):
            assert torch.equal(one, other)

    def test_stats(self) -> None:
        def work(world: sl.World) -> tuple[int, int, int, float | None]:
            model, made, run = self.attach("sgd")
            for step in range(STEPS):
                take_step(model, made, world.rank, step)
            world.barrier()
            stats = run.stats
            found = stats.steps, stats.bytes_wire, stats.staleness, stats.consensus
            run.close()
            return found

        for steps, sent, staleness, consensus in self.simulate(work):
            assert steps == STEPS
            assert (sent == 0) == self.silent
            assert staleness >= 0
            assert consensus is None or consensus >= 0.0

    def test_lost_worker_is_named(self) -> None:
        """A strategy that needs all workers raises an error that names the lost worker."""
        if self.make().asynchronous or self.silent:
            pytest.skip("workers do not wait for each other")

        def work(world: sl.World) -> str:
            model, made, run = self.attach("sgd")
            try:
                for step in range(20 * STEPS):
                    world.compute(0.01)
                    take_step(model, made, world.rank, step)
                run.close()
            except PeerLostError as error:
                return str(error)
            return ""

        killed = self.ranks - 1
        errors = self.simulate(work, faults=[faults.Kill(killed, at=0.5)], return_exceptions=True)
        assert all(f"rank {killed}" in str(word) for word in errors[:killed]), errors
