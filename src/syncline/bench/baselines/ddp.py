"""PyTorch's DistributedDataParallel, alone and with its communication hooks that work.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data-Parallel Training", 2020.
PowerSGD: Vogels et al. 2019.

The module does not report its communication. Hooks of the run record when gradients are ready. Callbacks at the end of
backward run before and after the module's own callback, in which it waits::

    backward   ····g3····g2····g1│h│          the last gradient; the module's hook starts the last reduction
    callbacks                      │run's│module's········│run's│
    reductions    ┌────────────────┼──────────────────────┐
                                         │◄── exposed ───►│   the time that the rank waited
"""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.baselines.base import ForeignRun, process_group
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.reduction import BUCKET_BYTES, Communicator
from syncline.reduction.codec_cost import dense_seconds
from syncline.specs import nearest
from syncline.strategies import RunSettings, Strategy, StrategyRun
from syncline.world import Pending, allreduce

__all__ = ["DDP", "WrappedRun", "buffers_option", "ddp", "wrap"]

HOOKS = ("allreduce", "fp16", "powersgd")
"""Hooks that work on gloo and the CPU; "allreduce" does in Python what DDP does without a hook."""
CALLBACK_TIMEOUT_S = 5.0
"""For the callbacks of a run that has ended."""
BROKEN_HOOKS = {
    "bf16": "torch's bf16 hook refuses to be registered without NCCL or XCCL; hook='fp16' halves the bytes too",
    "powersgd_batched": "torch 2.13's batched_powerSGD_hook fails an assertion (it passes one matrix to a "
    "function that expects a batch of them); take hook='powersgd'",
    "quantize_tensor": "torch's quantization_pertensor_hook raises IndexError on gloo; use strategy 'allreduce' with "
    "codec 'quantize(8)'",
    "quantize_channel": "torch's quantization_perchannel_hook raises IndexError on gloo; use strategy 'allreduce' "
    "with codec 'quantize(8)'",
}


class WrappedRun(ForeignRun):
    """Trains with a DistributedDataParallel, which `_wrap` makes inside an existing process group."""

    _wrapped: DistributedDataParallel | None = None
    _queued = False
    _ready = _over = 0.0
    """When the last gradient of this backward was ready, and when only waiting was left."""

    def _connect(self) -> None:
        self._place = ExitStack()
        self._place.enter_context(self._group())
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
        """Make the module that trains."""

    def _count(self) -> None:
        """Count the bytes of a reduction that has ended."""
        self.stats.sent(self.gradient_bytes, self.gradient_bytes)

    @property
    def replica(self) -> nn.Module:
        """The DistributedDataParallel."""
        return self.model if self._wrapped is None else self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """The context manager of DistributedDataParallel."""
        return super().no_sync() if self._wrapped is None else self._wrapped.no_sync()

    def detach(self) -> None:
        """Release the module before the process group: a callback that outlives Python aborts the process."""
        super().detach()
        if self._wrapped is not None:
            self._wrapped = None
            gc.collect()  # the module is part of a reference cycle
        self._place.close()

    def _gradient_ready(self, parameter: Tensor) -> None:
        self._ready = self.now()
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        """The callback of the module, which waits, was queued after this one: queue another one behind it."""
        self._over = self.now()
        Variable._execution_engine.queue_callback(self._reduced)

    def _reduced(self) -> None:
        self._queued = False
        if self._wrapped is not None and self._wrapped.require_backward_grad_sync:
            self._expose()
            self._count()
            self.note_reduction()

    def _expose(self) -> None:
        """Record how long the rank has waited, at the end of a backward that reduced."""
        self.stats.waited(self._over, self.now())


class _ZeroGradients(nn.Module):
    """Replaces the model: its output is zero, and so is the gradient of every parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_of_model = parameters

    def forward(self, zero: Tensor) -> Tensor:
        return torch.stack([(parameter * 0).sum() for parameter in self._parameters_of_model]).sum() + zero


@dataclass(frozen=True, repr=False)
class DDP(Strategy):
    """DistributedDataParallel, with gradients as views of its buckets.

    `hook` says how gradients are sent: None unchanged, "fp16" in half precision, "powersgd" as products of two matrices
    of `rank` columns, after `start` steps without compression. With `broadcast_buffers`, rank 0 sends its batch-norm
    buffers before every forward; otherwise they stay local, as in Syncline.

    >>> DDP(hook="powersgd", rank=2)
    ddp(hook='powersgd', rank=2)
    """

    hook: str | None = None
    rank: int = 1
    start: int = 10
    broadcast_buffers: bool = False

    name: ClassVar[str] = "ddp"

    def __post_init__(self) -> None:
        if self.hook in BROKEN_HOOKS:
            raise UnsupportedError(f"ddp(hook={self.hook!r}): {BROKEN_HOOKS[self.hook]}")
        if self.hook is not None and self.hook not in HOOKS:
            raise SpecError(
                f"ddp(hook={self.hook!r}): no such hook; {nearest(str(self.hook), [*HOOKS, *BROKEN_HOOKS])}"
            )
        if self.hook != "powersgd" and (self.rank, self.start) != (DDP.rank, DDP.start):
            raise SpecError(f"{self!r}: rank and start are PowerSGD's; add hook='powersgd' or leave them out")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise SpecError(f"ddp(rank={self.rank!r}): a number of columns, at least one")
        if not isinstance(self.start, int) or self.start < 2:
            raise SpecError(f"ddp(start={self.start!r}): torch's PowerSGD begins after two steps at the earliest")

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        return _DDPRun(self, model, optimizer, communicator, settings)


class _LowRank(PowerSGDState):
    """Torch's state, with weak references."""

    __slots__ = ("__weakref__",)


class _DDPRun(WrappedRun):
    """A rank without data takes part in the steps of the others with zero gradients.

    In an epoch whose end may be uneven, the ranks exchange at every step whether they have data. Only a rank without
    data waits for the result.
    """

    strategy: DDP
    _low_rank: _LowRank | None = None
    _counted = 0
    _may_end_uneven = False
    _count_of_step: Pending[Tensor] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The hook, and where torch's own choice of buckets was changed for it."""
        buckets = "one, or PowerSGD aborts on gloo" if self.strategy.hook == "powersgd" else "torch's"
        return {**super().config, "hook": self.strategy.hook, "buckets": buckets}

    @cached_property
    def _buffer_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.model.buffers())

    def predict(self) -> dict[str, float] | None:
        """What its bytes take by the engine's own all-reduce; of PowerSGD there is no model."""
        if self.strategy.hook == "powersgd":
            return None
        nbytes = sum((2 if self.strategy.hook == "fp16" else p.element_size()) * p.numel() for p in self.trained)
        seconds = dense_seconds(self.communicator, [nbytes]) if self.communicator.size > 1 else 0.0
        return {"communication": seconds, "codec": 0.0, "buckets": 1.0}

    def detach(self) -> None:
        """Wait until PowerSGD's callbacks, which run in threads of the process group, have released the group.

        If such a thread released it last, it would wait for its own end, and torch would abort the process. The
        callbacks also hold the state, so its weak reference shows when they have ended.
        """
        group = None if self._low_rank is None else self._low_rank.process_group
        watched = None if self._low_rank is None else weakref.ref(self._low_rank)
        self._low_rank = self._wrapped = None
        gc.collect()
        until = self.now() + CALLBACK_TIMEOUT_S
        while watched is not None and watched() is not None and self.now() < until:
            self.world.runtime.sleep(0.001)
        super().detach()
        del group

    def _wrap(self) -> DistributedDataParallel:
        strategy = self.strategy
        # None, not 25: torch makes the first bucket 1 MB only if no size is given.
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
        """A bucket size for all gradients.

        PowerSGD's callbacks start reductions in the engine's threads, so the order of two buckets could differ between
        ranks.
        """
        kinds = {str(parameter.dtype) for parameter in self.trained}
        if len(kinds) > 1:
            raise IncompatibleError(
                f"{self.strategy!r} with parameters of {' and '.join(sorted(kinds))}: torch puts them into separate "
                "buckets, and its PowerSGD aborts on gloo with more than one; use hook='fp16'"
            )
        return math.ceil(self.gradient_bytes / 2**20) + 1

    def _count(self) -> None:
        """Count the bytes. The first half of PowerSGD runs before its bucket is sent, the second while waiting."""
        logical = wire = self.gradient_bytes
        if self.strategy.hook == "fp16":
            wire = sum(2 * parameter.numel() for parameter in self.trained)
        elif self._low_rank is not None:
            # Torch's counter: zero until PowerSGD starts, then both matrices and the tensors that are too small.
            after = int(self._low_rank.total_numel_after_compression)
            if after > self._counted:
                self.stats.coded(self._ready, self._over, "powersgd", phase="before")
                wire = (after - self._counted) * self.trained[0].element_size()
                self._counted = after
        if self.strategy.broadcast_buffers:
            logical, wire = logical + self._buffer_bytes, wire + self._buffer_bytes
        self.stats.sent(logical, wire)

    def check_uneven(self) -> None:
        """Allowed: the rank joins with zero gradients."""
        StrategyRun.check_uneven(self)
        self._may_end_uneven = True

    def settle_uneven(self) -> None:
        self._may_end_uneven = False
        super().settle_uneven()

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """All ranks have the same weight. If a rank may have no data, announce that this one has some."""
        if self._may_end_uneven and uneven:
            self._announce(1.0)

    def join_idle(self) -> bool:
        if not float(self._announce(0.0).wait()):
            return False
        replica = self._wrapped
        assert replica is not None
        self.model.zero_grad(set_to_none=True)
        replica.module = _ZeroGradients(self.trained)
        try:
            replica(torch.zeros((), device=self.trained[0].device)).backward()
        finally:
            replica.module = self.model
        self.model.zero_grad(set_to_none=True)
        return True

    def _announce(self, has_data: float) -> Pending[Tensor]:
        """Start to count the ranks that have data; wait for the count of the step before, for its errors."""
        if self._count_of_step is not None:
            self._count_of_step.wait()
        self._count_of_step = allreduce(torch.tensor([has_data]), op="sum", group=self.communicator.group, async_=True)
        return self._count_of_step


def buffers_option() -> str:
    """The name in this release of torch of the option that broadcasts buffers before every forward."""
    known = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # its name until 2.12


def wrap(
    model: nn.Module, broadcast_buffers: bool, bucket_mb: float | None = None, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel, with gradients as views of its buckets."""
    options: dict[str, Any] = {
        buffers_option(): broadcast_buffers,
        "find_unused_parameters": find_unused_parameters,
    }
    if bucket_mb is not None:
        options["bucket_cap_mb"] = bucket_mb
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def ddp(model: nn.Module, broadcast_buffers: bool = False, half: bool = False) -> nn.Module:
    """Wrap a model in DistributedDataParallel for `bench step`; with `half`, gradients are sent as fp16.

    Without `broadcast_buffers`, batch-norm statistics stay local, as in Syncline, which is faster.
    """
    wrapped = wrap(model, broadcast_buffers)
    if half:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped
