"""What a script may do with a model, once under DistributedDataParallel and once under `sl.distribute`.

Each case trains on two gloo processes and returns what is compared: gradients, weights, buffers or plain values. Its
title is the row of the table in docs/ddp.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import syncline as sl
from tests.strategies.cases import backward

STEPS = 3


class Side:
    """One of the two ways to train: torch's, or ours."""

    def __init__(self, world: sl.World, ours: bool) -> None:
        self.rank = world.rank
        self.ours = ours
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        self.optimizer: Optimizer
        self.runs: list[sl.Run] = []

    def attach(
        self,
        model: nn.Module,
        optimizer: Any = None,
        ddp: dict[str, Any] | None = None,
        syncline: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """The module that trains: the model itself, or torch's wrapper."""
        held = [parameter for parameter in model.parameters() if parameter.requires_grad] or [*model.parameters()]
        self.optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9) if optimizer is None else optimizer
        if self.ours:
            run = sl.distribute(model, self.optimizer, algorithm="native", **options, **(syncline or {}))
            self.runs.append(run)
            self.no_sync = run.no_sync
            return model
        wrapped = DistributedDataParallel(model, **options, **(ddp or {}))
        self.no_sync = wrapped.no_sync
        return wrapped

    def batch(self, step: int = 0, *shape: int) -> Tensor:
        """This rank's own."""
        rng = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(*(shape or (5, 4)), generator=rng)

    def steps(self, module: Any, loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean()) -> None:
        """Train a little."""
        for step in range(STEPS):
            self.optimizer.zero_grad()
            backward(loss(module(self.batch(step))))
            self.optimizer.step()

    def passes(self, module: Any, *arguments: Any, zero: bool = True) -> list[Any]:
        """The gradients of some backward passes."""
        found = []
        for step in range(STEPS):
            if zero:
                self.optimizer.zero_grad()
            backward(module(self.batch(step), *arguments).square().mean())
            found.append(gradients(getattr(module, "module", module)))
        return found


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    run: Callable[[Side], Any]
    alike: bool
    """Whether our ranks end with the same bits."""
    hangs: bool
    """Whether DistributedDataParallel would wait for ever: it is not run."""
    ranks: int


CASES: dict[str, Case] = {}


def case(
    title: str, alike: bool = True, hangs: bool = False, ranks: int = 2
) -> Callable[[Callable[[Side], Any]], None]:
    """The function below is the case of this row."""

    def add(run: Callable[[Side], Any]) -> None:
        assert title not in CASES, title
        CASES[title] = Case(run, alike, hangs, ranks)

    return add


def net(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), *(middle or (nn.Tanh(),)), nn.Linear(6, 3))


def gradients(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def after_gradient(parameter: Tensor, hook: Callable[[Any], None]) -> torch.utils.hooks.RemovableHandle:
    """Call the hook when a gradient was added to the parameter's."""
    register: Callable[..., torch.utils.hooks.RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(hook)


def applied(function: Any, *arguments: Tensor) -> Tensor:
    """What an autograd Function gives."""
    result: Tensor = function.apply(*arguments)
    return result
