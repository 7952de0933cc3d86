"""Which parameters a strategy synchronises: unused, added later, thawed, shared with another run or a wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError
from tests.strategies.every import EVERY, play
from tests.strategies.hogwild_cases import one_host

SERVED = ("bsp", "ssp(slack=0)", "ssp(slack=2)", "master", "master(masters=2)", "master(sync=False)", "downpour")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "decay": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
}


class Two(nn.Module):
    """Two layers, of which a step may use one; and one between them that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.idle, self.second = (nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        out: Tensor = self.first(x).sum()
        return out + self.second(x).sum() if both else out


def take(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> None:
    optimizer.zero_grad()
    model(*args).backward()
    optimizer.step()


# Parameters without a gradient.


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("spec", EVERY)
def test_a_parameter_that_nobody_uses_does_not_move(spec: str, kind: str) -> None:
    if "momentum" in spec and kind == "decay":
        pytest.skip("the strategy's momentum refuses the optimizer's")

    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        model = Two()
        optimizer = OPTIMIZERS[kind](model.parameters())
        run = sl.distribute(model, optimizer, strategy=spec)
        for _ in range(3):
            take(model, optimizer, torch.ones(1, 3))
        run.close()
        return model.idle.weight.detach().clone(), model.first.weight.detach().clone()

    before = Two()
    for idle, first in play(work):
        torch.testing.assert_close(idle, before.idle.weight.detach(), rtol=0, atol=1e-7)
        assert not torch.equal(first, before.first.weight.detach())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("spec", ["bsp", "ssp(slack=0)", "master", "master(masters=2)"])
def test_a_layer_used_now_and_then_steps_as_without_servers(spec: str, kind: str) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(6):
            take(model, optimizer, torch.full((1, 3), 1.0 + step), step % 3 == 1)

    def work(world: sl.World) -> list[Tensor]:
        model = Two()
        optimizer = OPTIMIZERS[kind](model.parameters())
        with sl.distribute(model, optimizer, strategy=spec):
            train(model, optimizer)
        return [each.detach().clone() for each in model.parameters()]

    plain = Two()
    train(plain, OPTIMIZERS[kind](plain.parameters()))
    for found in play(work):
        for ours, theirs in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec", ["bsp", "master", "master(masters=2)"])
def test_a_worker_without_a_gradient_adds_nothing_to_the_mean(spec: str) -> None:
    def work(world: sl.World) -> tuple[float, float]:
        model = Two()
        before = float(model.second.weight.detach().sum())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with sl.distribute(model, optimizer, strategy=spec):
            take(model, optimizer, torch.ones(1, 3), world.rank == 0)
        return before, float(model.second.weight.detach().sum())

    for before, after in play(work):
        assert before - after == pytest.approx(0.5 * 6)  # six weights, and half of the workers


# Parameters that come later.


@pytest.mark.parametrize("spec", EVERY)
def test_a_parameter_that_the_model_did_not_have_is_refused(spec: str) -> None:
    def work(world: sl.World) -> None:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, strategy=spec)
        model.added = nn.Linear(3, 1)
        optimizer.add_param_group({"params": model.added.parameters()})
        take(model, optimizer, torch.ones(1, 3))

    with pytest.raises(IncompatibleError, match=r"group 1.*or close the run"):
        play(work)


@pytest.mark.parametrize("spec", EVERY)
def test_a_group_of_parameters_that_the_optimizer_did_not_have(spec: str) -> None:
    """Of the model's own: synchronised where the strategy goes by the model, refused where it goes by the optimizer."""

    def work(world: sl.World) -> Tensor:
        model = Two()
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, strategy=spec)
        optimizer.add_param_group({"params": model.second.parameters()})
        for _ in range(4):
            take(model, optimizer, torch.full((1, 3), 1.0 + world.rank), True)
        run.close()
        return model.second.weight.detach().clone()

    found = sl.simulate(work, ranks=2, network=one_host(2), return_exceptions=True).results
    if any(isinstance(each, BaseException) for each in found):
        assert all(isinstance(each, IncompatibleError) and "second.weight" in str(each) for each in found)
        assert spec.split("(")[0] in ("bsp", "ssp", "master", "downpour", "onesided", "easgd")
    else:
        assert spec == "ensemble" or torch.equal(*found)
        assert not torch.equal(found[0], Two().second.weight.detach())


@pytest.mark.parametrize("spec", [spec for spec in EVERY if spec not in ("allreduce", "allreduce(delay=1)")])
def test_a_parameter_thawed_after_distribute_is_refused(spec: str) -> None:
    def work(world: sl.World) -> None:
        model = Two()
        model.second.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, strategy=spec)
        take(model, optimizer, torch.ones(1, 3))
        model.second.requires_grad_(True)
        take(model, optimizer, torch.ones(1, 3), True)

    if spec == "hogwild":
        play(work)  # every parameter lies in the memory of all
    else:
        with pytest.raises(IncompatibleError, match=r"second.weight.*was not when sl.distribute"):
            play(work)


# Who else synchronises them.


def test_a_model_is_distributed_once() -> None:
    with sl.init():
        model = nn.Linear(2, 1)
        first, second = (torch.optim.SGD([each], lr=0.1) for each in model.parameters())
        run = sl.distribute(model, first)
        with pytest.raises(IncompatibleError, match=r"weight .*another run.*\[first, second\]"):
            sl.distribute(model, second)
        with pytest.raises(IncompatibleError, match="weight"):
            sl.distribute(nn.Sequential(model), second)
        run.close()
        sl.distribute(model, second)


def test_a_refused_strategy_leaves_nothing_behind() -> None:
    """A second try with another strategy is as if there had been no first."""
    with sl.init():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(IncompatibleError, match="LBFGS"):
            sl.distribute(model, optimizer, strategy="bsp")
        assert sl.distribute(model, optimizer).stats.steps == 0


def test_two_optimizers_of_one_model() -> None:
    def work(world: sl.World) -> tuple[float, float, int]:
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizers = [torch.optim.SGD([model.weight], lr=1.0), torch.optim.SGD([model.bias], lr=0.5)]
        with sl.distribute(model, optimizers) as run:
            model(torch.full((1, 1), float(world.rank))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return model.weight.item(), model.bias.item(), run.stats.steps

    assert play(work) == ((-0.5, -0.5, 1),) * 2


def test_a_checkpoint_has_the_state_of_both_optimizers(tmp_path: Any) -> None:
    def work(world: sl.World, resume: bool) -> list[float]:
        model = nn.Linear(1, 1)
        optimizers = [torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in model.parameters()]
        with sl.distribute(model, optimizers) as run:
            if resume:
                sl.load(tmp_path, run=run)
            else:
                model(torch.ones(1, 1)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                sl.save(tmp_path, step=1, run=run)
        return [float(each.state[each.param_groups[0]["params"][0]]["momentum_buffer"]) for each in optimizers]

    play(lambda world: work(world, resume=False))
    assert play(lambda world: work(world, resume=True)) == ([1.0, 1.0],) * 2


def test_several_optimizers_are_refused_by_other_strategies() -> None:
    with sl.init():
        model = nn.Linear(1, 1)
        optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
        with pytest.raises(IncompatibleError, match="2: give one with several parameter groups"):
            sl.distribute(model, optimizers, strategy="local")


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.Sequential(nn.DataParallel(model))])
def test_a_wrapper_of_torch_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with sl.init():
        model = wrap(nn.Linear(1, 1))
        with pytest.raises(IncompatibleError, match=r"is a DataParallel.*plain module"):
            sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_wrapper_put_around_the_model_later_is_refused() -> None:
    """As a framework does that finds the launcher's variables."""
    with sl.init(process_group=True):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer)
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(model))
        wrapped(torch.ones(1, 1)).sum().backward()
        with pytest.raises(IncompatibleError, match=r"wrapped in a DistributedDataParallel.*hide=True"):
            optimizer.step()


def test_the_module_inside_a_wrapper_is_refused() -> None:
    with sl.init(process_group=True):
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with pytest.raises(IncompatibleError, match="wrapped in a DistributedDataParallel"):
            sl.distribute(wrapped.module, optimizer)
