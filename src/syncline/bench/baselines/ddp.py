"""PyTorch's DistributedDataParallel, alone and with those of its communication hooks that work.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data-Parallel Training", 2020.
PowerSGD: Vogels et al. 2019.
"""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.baselines.wrapped import JoiningRun
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.reduction import BUCKET_BYTES, Communicator
from syncline.reduction.pays import dense_seconds
from syncline.specs import nearest
from syncline.strategies import RunSettings, Strategy, StrategyRun

__all__ = ["DDP", "buffers_option", "ddp", "wrap"]

HOOKS = ("allreduce", "fp16", "powersgd")
"""Those that work on gloo and the CPU; "allreduce" is what it does without a hook, by way of Python."""
LEAVING = 5.0
"""Seconds that the callbacks of a run that has ended may still take."""
BROKEN = {
    "bf16": "torch's bf16 hook refuses to be registered without NCCL or XCCL; hook='fp16' halves the bytes too",
    "powersgd_batched": "torch 2.13's batched_powerSGD_hook fails an assertion of its own (it hands one matrix to a "
    "function that wants a batch of them); take hook='powersgd'",
    "quantize_tensor": "torch's quantization_pertensor_hook raises IndexError on gloo; ours: strategy 'allreduce' with "
    "codec 'quantize(8)'",
    "quantize_channel": "torch's quantization_perchannel_hook raises IndexError on gloo; ours: strategy 'allreduce' "
    "with codec 'quantize(8)'",
}


@dataclass(frozen=True, repr=False)
class DDP(Strategy):
    """DistributedDataParallel, gradients as views of its buckets.

    `hook` says how gradients travel: None as they are, "fp16" halved, "powersgd" as products of two thin matrices of
    `rank` columns, after `start` steps without. `broadcast_buffers` gives all ranks rank 0's batch norms before every
    forward; without, they stay local, as with us.

    >>> DDP(hook="powersgd", rank=2)
    ddp(hook='powersgd', rank=2)
    """

    hook: str | None = None
    rank: int = 1
    start: int = 10
    broadcast_buffers: bool = False

    name: ClassVar[str] = "ddp"

    def __post_init__(self) -> None:
        if self.hook in BROKEN:
            raise UnsupportedError(f"ddp(hook={self.hook!r}): {BROKEN[self.hook]}")
        if self.hook is not None and self.hook not in HOOKS:
            raise SpecError(f"ddp(hook={self.hook!r}): no such hook; {nearest(str(self.hook), [*HOOKS, *BROKEN])}")
        if self.hook != "powersgd" and (self.rank, self.start) != (DDP.rank, DDP.start):
            raise SpecError(f"{self!r}: rank and start are PowerSGD's; add hook='powersgd' or leave them out")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise SpecError(f"ddp(rank={self.rank!r}): a number of columns, at least one")
        if not isinstance(self.start, int) or self.start < 2:
            raise SpecError(f"ddp(start={self.start!r}): torch's PowerSGD begins after two steps at the earliest")

    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        return _DDPRun(self, model, optimizer, exchange, settings)


class _LowRank(PowerSGDState):
    """Torch's, which has slots; this one can be watched."""

    __slots__ = ("__weakref__",)


class _DDPRun(JoiningRun):
    strategy: DDP

    def __init__(
        self, strategy: DDP, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        self._low_rank: _LowRank | None = None
        self._counted = 0
        super().__init__(strategy, model, optimizer, exchange, settings)
        self.begin_together()
        self._buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())

    @property
    def config(self) -> dict[str, Any]:
        """The hook, and where torch's own choice of buckets was changed for it."""
        buckets = "one, or PowerSGD aborts on gloo" if self.strategy.hook == "powersgd" else "torch's"
        return {**super().config, "hook": self.strategy.hook, "buckets": buckets}

    def predict(self) -> dict[str, float] | None:
        """What its bytes take by the engine's own all-reduce; of PowerSGD there is no model."""
        if self.strategy.hook == "powersgd":
            return None
        nbytes = sum((2 if self.strategy.hook == "fp16" else p.element_size()) * p.numel() for p in self.trained)
        seconds = dense_seconds(self.exchange, [nbytes]) if self.exchange.size > 1 else 0.0
        return {"communication": seconds, "codec": 0.0, "buckets": 1.0}

    def detach(self) -> None:
        """PowerSGD's callbacks hold the group, in the group's own threads: the last to let go must not be one of them.

        A thread cannot wait for its own end, so torch would abort the process. They hold the state too, which shows
        when they are gone.
        """
        group = None if self._low_rank is None else self._low_rank.process_group
        watched = None if self._low_rank is None else weakref.ref(self._low_rank)
        self._low_rank = self._wrapped = None
        gc.collect()
        until = self.now() + LEAVING
        while watched is not None and watched() is not None and self.now() < until:
            self.world.runtime.sleep(0.001)
        super().detach()
        del group

    def _wrap(self) -> DistributedDataParallel:
        strategy = self.strategy
        cap = None if self.settings.bucket_bytes == BUCKET_BYTES else self.settings.bucket_bytes / 2**20
        if strategy.hook == "powersgd":
            cap = self._one_bucket()
        wrapped = wrap(self.model, strategy.broadcast_buffers, cap, self.settings.find_unused_parameters)
        if strategy.hook == "allreduce":
            wrapped.register_comm_hook(None, allreduce_hook)
        elif strategy.hook == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        elif strategy.hook == "powersgd":
            self._low_rank = _LowRank(
                dist.group.WORLD,
                matrix_approximation_rank=strategy.rank,
                start_powerSGD_iter=strategy.start,
                random_seed=self.settings.seed % 2**32,
            )
            wrapped.register_comm_hook(self._low_rank, powerSGD_hook)
        return wrapped

    def _one_bucket(self) -> float:
        """Its callbacks start reductions in the engine's threads: those of two buckets mix in an order of their own."""
        kinds = {str(parameter.dtype) for parameter in self.trained}
        if len(kinds) > 1:
            raise IncompatibleError(
                f"{self.strategy!r} with parameters of {' and '.join(sorted(kinds))}: torch puts them into buckets of "
                "their own, and its PowerSGD aborts on gloo with more than one; take hook='fp16'"
            )
        return math.ceil(self.gradient_bytes / 2**20) + 1

    def _count(self) -> None:
        """PowerSGD's first half runs before the one bucket leaves; its second is part of the wait."""
        logical = wire = self.gradient_bytes
        if self.strategy.hook == "fp16":
            wire = sum(2 * parameter.numel() for parameter in self.trained)
        elif self._low_rank is not None:
            # Its own counter: zero until it starts, then both thin matrices and what is too small for them.
            after = int(self._low_rank.total_numel_after_compression)
            if after > self._counted:
                self.stats.coded(self._ready, self._over, "powersgd", where="before")
                wire = (after - self._counted) * self.trained[0].element_size()
                self._counted = after
        if self.strategy.broadcast_buffers:
            logical, wire = logical + self._buffer_bytes, wire + self._buffer_bytes
        self.stats.sent(logical, wire)


def buffers_option() -> str:
    """How this torch calls the option that sends buffers from rank 0 before every forward."""
    known = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # its name until 2.12


def wrap(
    model: nn.Module, broadcast_buffers: bool, bucket_mb: float | None = None, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """The model in DistributedDataParallel, gradients as views of its buckets."""
    options: dict[str, Any] = {
        buffers_option(): broadcast_buffers,
        "find_unused_parameters": find_unused_parameters,
    }
    if bucket_mb is not None:
        options["bucket_cap_mb"] = bucket_mb
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def ddp(model: nn.Module, broadcast_buffers: bool = False, half: bool = False) -> nn.Module:
    """The model in DistributedDataParallel for `bench step`; `half`: gradients travel as fp16.

    Without `broadcast_buffers` batch norm's statistics stay local, as with us: that is the faster of the two.
    """
    wrapped = wrap(model, broadcast_buffers)
    if half:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped
