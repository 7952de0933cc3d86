"""PyTorch's post-local SGD: DistributedDataParallel first, then local steps with a periodic average of the weights.

    step        0 … start−1        start   start+1  …  start+period  …
    gradients   averaged           local   local       local
    weights     –                  mean    –           mean

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.baselines.ddp import WrappedRun, wrap
from syncline.errors import SpecError
from syncline.reduction import BUCKET_BYTES, Communicator
from syncline.strategies import RunSettings, Strategy, StrategyRun

__all__ = ["PostLocalSGD"]


@dataclass(frozen=True, repr=False)
class PostLocalSGD(Strategy):
    """DistributedDataParallel for `start` steps, then the mean of the weights every `period` steps.

    With `within_host`, ranks of one host still average their gradients at every step, which is torch's default. If all
    ranks are on one host, that is DistributedDataParallel to the end.

    >>> PostLocalSGD(start=50, period=8)
    ddp_post_local(start=50, period=8)
    """

    start: int = 100
    period: int = 4
    within_host: bool = False

    name: ClassVar[str] = "ddp_post_local"

    def __post_init__(self) -> None:
        if not isinstance(self.start, int) or self.start < 0:
            raise SpecError(f"{self.name}(start={self.start!r}): a number of steps, not negative")
        if not isinstance(self.period, int) or self.period < 2:
            raise SpecError(f"{self.name}(period={self.period!r}): at least two steps; with one, use 'ddp'")

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        return _PostLocalRun(self, model, optimizer, communicator, settings)


class _PostLocalRun(WrappedRun):
    strategy: PostLocalSGD
    parts = True
    _hook_state: PostLocalSGDState | None = None
    _averager: _Averager | None = None

    def _connect(self) -> None:
        super()._connect()
        self._averager = _Averager(self)
        self.optimizer = _wrapper()(self.optimizer, self._averager)

    @property
    def local(self) -> bool:
        """True if the latest gradients were not averaged, or only within this host."""
        return self.stats.steps >= self.strategy.start

    def detach(self) -> None:
        if self._hook_state is not None:
            self._hook_state.process_group = self._hook_state.subgroup = None
            self._hook_state = None
        if self._averager is not None:
            del self._averager.process_group
            self._averager = None
        super().detach()

    def _wrap(self) -> DistributedDataParallel:
        # None, not 25: torch makes the first bucket 1 MB only if no size is given.
        cap = None if self.settings.bucket_bytes == BUCKET_BYTES else self.settings.bucket_bytes / 2**20
        wrapped = wrap(self.model, False, cap)
        within = self.strategy.within_host
        # The default subgroup of torch needs CUDA, to count the ranks of a host.
        group = self._host_group() if within else None
        self._hook_state = PostLocalSGDState(dist.group.WORLD, group, self.strategy.start, within)  # type: ignore[no-untyped-call]
        wrapped.register_comm_hook(self._hook_state, post_localSGD_hook)
        return wrapped

    def _host_group(self) -> Any:
        hosts = self.world.hosts
        members = [[rank for rank, host in enumerate(hosts) if host == own] for own in dict.fromkeys(hosts)]
        group, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]
        return group

    def _count(self) -> None:
        if not self.local or (self.strategy.within_host and len(set(self.world.hosts)) < self.world.size):
            super()._count()

    def count_average(self, start: float) -> None:
        """Count an average of the weights that began at `start`."""
        self.stats.waited(start, self.now())
        self.stats.sent(self.gradient_bytes, self.gradient_bytes)


class _Averager(PeriodicModelAverager):
    """Torch's averager, which reports each average to the run."""

    def __init__(self, run: _PostLocalRun) -> None:
        super().__init__(period=run.strategy.period, warmup_steps=run.strategy.start)
        self._run = run

    def average_parameters(self, params: Iterable[Any]) -> None:
        due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        start = self._run.now()
        super().average_parameters(params)
        if due:
            self._run.count_average(start)


def _wrapper() -> Callable[[Optimizer, PeriodicModelAverager], Optimizer]:
    """Torch's optimizer wrapper; its import uses deprecated functions of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torch.distributed.optim.post_localSGD_optimizer")
    wrapper: Callable[[Optimizer, PeriodicModelAverager], Optimizer] = module.PostLocalSGDOptimizer
    return wrapper
