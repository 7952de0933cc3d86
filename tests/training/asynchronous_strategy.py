"""An asynchronous strategy of a few lines: SGD on weights in this process, and a control channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.control import ControlChannel, MemoryStore
from syncline.reduction import Communicator
from syncline.runtime import RealRuntime, Runtime
from syncline.strategies import AsynchronousRun, RunSettings, Strategy, StrategyRun
from syncline.world import World


@dataclass
class Common:
    """The state that all simulated ranks share."""

    workers: int
    steps: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.steps = [0] * self.workers


class MemoryChannel(ControlChannel):
    """The control channel of one rank, or of an observer. Step counts are those of the common state.

    Every call takes the latency, so that calls of other ranks come in between.
    """

    def __init__(self, common: Common, world: World | None = None, latency: float = 0.0) -> None:
        runtime: Runtime = RealRuntime() if world is None else world.runtime
        store = MemoryStore(common.values, (lambda: runtime.sleep(latency)) if latency else None)
        super().__init__(
            store,
            runtime,
            "plain",
            common.workers,
            None if world is None else world.rank,
            load_weights=self._load,
            on_finish=lambda: common.finished.add(-1 if world is None else world.rank),
        )
        self.common = common

    def steps(self) -> list[int]:
        super().steps()  # takes its time
        return list(self.common.steps)

    def _load(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(self.common.weights[name])


@dataclass(frozen=True, repr=False)
class PlainAsynchronous(Strategy):
    """Each worker applies its gradient to the common weights as soon as it is ready, and copies the weights."""

    name: ClassVar[str] = "plain_asynchronous"
    common: Common | None = field(default=None, compare=False)
    latency: float = 0.0
    share: float = 1.0
    """The factor of a gradient."""

    def __repr__(self) -> str:
        return self.name

    @property
    def asynchronous(self) -> bool:
        return True

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        assert self.common is not None
        return PlainAsynchronousRun(self, model, optimizer, communicator, settings)


class PlainAsynchronousRun(AsynchronousRun):
    strategy: PlainAsynchronous

    def __init__(
        self,
        strategy: PlainAsynchronous,
        model: nn.Module,
        optimizer: Optimizer,
        communicator: Communicator,
        settings: RunSettings,
    ) -> None:
        super().__init__(strategy, model, optimizer, communicator, settings)
        assert strategy.common is not None
        self.common = strategy.common
        self._channel = MemoryChannel(self.common, communicator.world, strategy.latency)
        self._seen = 0
        if communicator.rank == 0:
            self._give()
        self.hooks += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _give(self) -> None:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.common.weights[name] = tensor.detach().clone()

    def _before(self, *_: Any) -> None:
        """The optimizer steps on the current common weights, with a gradient of older weights."""
        total = sum(self.common.steps)
        self.stats.read_at(max(0, total - self._seen))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.common.weights[name])
                if parameter.grad is not None:
                    parameter.grad.mul_(self.strategy.share)

    def _after(self, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.common.weights[name].copy_(parameter)
            if self.communicator.rank == 0:
                for name, buffer in self.model.named_buffers():
                    self.common.weights[name].copy_(buffer)
        self.stats.steps += 1
        self.stats.sent(8, 8)
        self.common.steps[self.communicator.rank] += 1
        self._seen = sum(self.common.steps)

    def join_idle(self) -> bool:
        raise AssertionError("an asynchronous run has no common rounds")

    def shared_state(self) -> dict[str, Any]:
        return {"weights": {name: tensor.clone() for name, tensor in self.common.weights.items()}}

    def load_shared_state(self, state: Any) -> None:
        for name, tensor in state["weights"].items():
            self.common.weights[name] = tensor.clone()
        self.common.steps[self.communicator.rank] = self.stats.steps
