"""A `DistributedOptimizer` that agrees by a strategy of ours: the run is made as `sl.distribute` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.codecs import Codec
from syncline.compat.horovod.context import Context
from syncline.compat.horovod.functions import broadcast_object
from syncline.compat.horovod.parameters import PassesError, after_gradient
from syncline.strategies import Run, Strategy
from syncline.training.distribute import distribute

__all__ = ["Guest", "StandIn"]


class StandIn(nn.Module):
    """A module that has an optimizer's parameters, under the names that the script gave them.

    >>> [name for name, _ in StandIn({"body.weight": Parameter(torch.ones(1))}).named_parameters()]
    ['body.weight']
    """

    def __init__(self, named: Mapping[str, Parameter]) -> None:
        super().__init__()
        self._parameters.update(named)  # not by register_parameter, which takes no name with a dot


class Guest:
    """The run of a strategy, as an optimizer's methods see it."""

    def __init__(
        self,
        held: Context,
        optimizer: Optimizer,
        named: Mapping[str, Parameter],
        *,
        strategy: str | Strategy,
        codec: Codec | None,
        passes: int,
    ) -> None:
        self.context = held
        self.passes = passes
        self._pausing = ExitStack()
        self._task = -1
        self._counts: dict[int, int] = {}
        # Before the run's own hooks, which must find the pass paused or not.
        self._hooks = [
            after_gradient(parameter, self._arrived) for parameter in named.values() if parameter.requires_grad
        ]
        first = broadcast_object(list(named))  # rank 0's order; names that differ are refused by what follows
        ordered = {name: named[name] for name in (first if set(first) == set(named) else named)}
        self.run: Run = distribute(StandIn(ordered), optimizer, strategy=strategy, codec=codec)
        held.optimizers.append(self)

    def synchronize(self) -> None:
        """Nothing: the strategy has done what it does when backward returns, or does it in `step()`."""

    def zero(self) -> None:
        """Gradients are dropped."""
        self._counts.clear()

    def stepping(self, now: bool) -> None:
        """Before a step: a strategy that reduces gradients must have reduced them."""
        lacking = bool(self._counts) and max(self._counts.values()) < self.passes
        if now and lacking and self.run.strategy.name == "allreduce":
            raise PassesError(
                f"optimizer.step() after {max(self._counts.values())} of backward_passes_per_step={self.passes} "
                f"backward passes: {self.run.strategy!r} has not reduced the gradients yet; make the passes full, or "
                "leave strategy out"
            )

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._counts.clear()

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """As it is: the run sees to it."""
        return closure

    def join_rounds(self) -> None:
        """Take part in the others' steps with nothing to add until nobody has something."""
        while not self.run.loose and self.run.empty_round():
            pass

    def close(self) -> None:
        """Take the hooks off. Every rank closes."""
        self._pausing.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not self.run.world.closed:
            self.run.close()
        if self in self.context.optimizers:
            self.context.optimizers.remove(self)

    def _arrived(self, parameter: Tensor) -> None:
        task, count = torch._C._current_graph_task_id(), self._counts.get(id(parameter), 0) + 1
        self._counts[id(parameter)] = count
        if task == self._task:
            return
        self._task = task
        self._pausing.close()
        if count < self.passes:
            self._pausing.enter_context(self.run.no_sync())
