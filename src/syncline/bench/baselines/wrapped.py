"""Runs that train through a DistributedDataParallel, and what can be seen of it from outside.

The module tells nothing of its communication. Hooks of ours note when gradients are ready; callbacks at the end of
backward stand before and after its own, in which it waits::

    backward   ····g3····g2····g1│h│          the last gradient; its communication hook begins the last reduction
    callbacks                      │ours│theirs········│ours│
    reductions    ┌────────────────┼───────────────────┐
                                        │◄── exposed ─►│   as with us: what the rank spent waiting
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.baselines.base import ForeignRun, process_group
from syncline.reduction import Communicator
from syncline.strategies import RunSettings, Strategy, StrategyRun
from syncline.world import Pending, allreduce

__all__ = ["JoiningRun", "WrappedRun"]


class WrappedRun(ForeignRun):
    """Training goes through a DistributedDataParallel, which `_wrap` makes in a process group that it finds."""

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self._place = ExitStack()
        self._ready = self._over = 0.0
        """When this backward's last gradient was ready, and when it had nothing left to do but wait."""
        self._queued = False
        self._place.enter_context(self._group())
        self._wrapped: DistributedDataParallel | None = None
        try:
            self._wrapped = self._wrap()
        except BaseException:
            self.release()
            raise
        self.hooks += [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
            for parameter in self.trained
        ]

    def _group(self) -> AbstractContextManager[None]:
        return process_group(self.world)

    @abstractmethod
    def _wrap(self) -> DistributedDataParallel:
        """The module that trains."""

    def _count(self) -> None:
        """Count the bytes of a reduction that has ended."""
        self.stats.sent(self.gradient_bytes, self.gradient_bytes)

    @property
    def replica(self) -> nn.Module:
        """The DistributedDataParallel."""
        return self.model if self._wrapped is None else self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Theirs."""
        return super().no_sync() if self._wrapped is None else self._wrapped.no_sync()

    def detach(self) -> None:
        """Let go of all that holds the group first: a callback of it that outlives Python aborts the process."""
        super().detach()
        if self._wrapped is not None:
            self._wrapped = None
            gc.collect()  # the module is part of a circle
        self._place.close()

    def _gradient_ready(self, parameter: Tensor) -> None:
        self._ready = self.now()
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        """Theirs, which waits, was queued after this one: once more to the end of the line."""
        self._over = self.now()
        Variable._execution_engine.queue_callback(self._reduced)

    def _reduced(self) -> None:
        self._queued = False
        if self._wrapped is not None and self._wrapped.require_backward_grad_sync:
            self._expose()
            self._count()
            self.note_reduction()

    def _expose(self) -> None:
        """Tell how long the rank has waited, at the end of a backward that reduced."""
        self.stats.waited(self._over, self.now())


class JoiningRun(WrappedRun):
    """A rank without data takes part in the others' steps with gradients of zero.

    In an epoch that may end so, ranks tell each other at every step whether they have something. Those who have do
    not wait for the answer: only one without needs it.
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self._careful = False
        self._told: Pending[Tensor] | None = None

    def check_uneven(self) -> None:
        """It can go along."""
        StrategyRun.check_uneven(self)
        self._careful = True

    def settle_uneven(self) -> None:
        self._careful = False
        super().settle_uneven()

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """All ranks count alike; where one may have nothing, say that this one has something."""
        if self._careful and uneven:
            self._tell(1.0)

    def join_idle(self) -> bool:
        if not float(self._tell(0.0).wait()):
            return False
        replica = self._wrapped
        assert replica is not None
        self.model.zero_grad(set_to_none=True)
        replica.module = _Nothing(self.trained)
        try:
            replica(torch.zeros((), device=self.trained[0].device)).backward()
        finally:
            replica.module = self.model
        self.model.zero_grad(set_to_none=True)
        return True

    def _tell(self, something: float) -> Pending[Tensor]:
        """Begin to count those who have something; what was told before is looked at now, for its errors."""
        if self._told is not None:
            self._told.wait()
        self._told = allreduce(torch.tensor([something]), op="sum", group=self.exchange.team, async_=True)
        return self._told


class _Nothing(nn.Module):
    """In the model's place: zero, and a gradient of zero for every parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_of_model = parameters

    def forward(self, zero: Tensor) -> Tensor:
        return torch.stack([(parameter * 0).sum() for parameter in self._parameters_of_model]).sum() + zero
