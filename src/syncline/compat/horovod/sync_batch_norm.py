"""Batch normalisation over the batches of all ranks.

```text
forward     each rank's count, mean and Σ(x−mean)²  →  gathered  →  the whole batch's mean and variance
backward    each rank's Σ dy and Σ dy·(x−mean)      →  summed    →  the gradient of the input
```

The gradients of weight and bias are those of this rank: the optimizer reduces them like all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from syncline.compat.horovod.context import ProcessSet, Sum, context, global_process_set
from syncline.compat.horovod.ops import allgather_async, allreduce_async, synchronize
from syncline.errors import IncompatibleError


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of the batches of all ranks, which may differ in size.

    It trains on CPU and GPU. In evaluation it is the same as in torch.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def mean(world):
    ...     hvd.init()
    ...     norm = hvd.SyncBatchNorm(1)
    ...     norm(torch.full((2, 1), float(hvd.rank())))
    ...     return round(norm.running_mean.item(), 3)      # a tenth of the mean of 0 and 1
    >>> sl.simulate(mean, ranks=2).results
    (0.05, 0.05)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def forward(self, input: Tensor) -> Tensor:
        """Normalise with the statistics of all ranks, or with the running statistics in evaluation."""
        self._check_input_dim(input)
        whole = self.training or not self.track_running_stats
        if not whole or self.process_set.size() == 1:
            return super().forward(input)
        result: Tensor
        count, mean, squares = _statistics(input)
        count, mean, squares = _global_statistics(count, mean, squares, self._name(), self.process_set)
        variance = squares / count
        if self.training and self.track_running_stats:
            self._track(count, mean, variance)
        result = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, torch.rsqrt(variance + self.eps), count, self._name(), self.process_set
        )
        return result

    def _check_input_dim(self, input: Tensor) -> None:
        expected = f"SyncBatchNorm({self.num_features}) takes (batch, {self.num_features}, …), not {tuple(input.shape)}"
        if input.dim() < 2:
            raise IncompatibleError(f"expected at least 2D input (got {input.dim()}D input): {expected}")
        if input.shape[1] != self.num_features:
            raise IncompatibleError(expected)

    def _name(self) -> str:
        """The name of the layer's operations, equal in every step, so that requests are cached."""
        numbers = context().layer_numbers
        return f"sync_batch_norm.{numbers.setdefault(self, len(numbers))}"

    def _track(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None, "it tracks running statistics"
        assert self.running_var is not None, "it tracks running statistics"
        assert self.num_batches_tracked is not None, "it tracks running statistics"
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        with torch.no_grad():
            self.running_mean.mul_(1 - rate).add_(rate * mean.to(self.running_mean))
            self.running_var.mul_(1 - rate).add_(rate * unbiased.to(self.running_var))


def _statistics(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of this rank's batch, in double precision."""
    rows = input.detach().transpose(0, 1).reshape(input.shape[1], -1)
    count = torch.tensor(float(rows.shape[1]), dtype=torch.float64, device=input.device)
    mean = rows.sum(dim=1, dtype=torch.float64) / count.clamp(min=1)
    squares = (rows - mean[:, None]).square().sum(dim=1)
    return count, mean, squares


def _global_statistics(
    count: Tensor, mean: Tensor, squares: Tensor, name: str, process_set: ProcessSet
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations over all ranks."""
    mine = torch.cat([count.view(1), mean, squares]).view(1, -1)
    table = synchronize(allgather_async(mine, f"{name}.forward", process_set))
    counts, means, sums = table[:, :1], table[:, 1 : 1 + mean.numel()], table[:, 1 + mean.numel() :]
    total = counts.sum()
    if not total > 0:
        raise IncompatibleError("SyncBatchNorm: the batches of all ranks are empty")
    middle = (counts * means).sum(dim=0) / total
    return total, middle, sums.sum(dim=0) + (counts * (means - middle).square()).sum(dim=0)


class _Normalise(Function):
    """y = (x − mean) · scale · weight + bias, where mean and scale depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        count: Tensor,
        name: str,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.name, ctx.process_set, ctx.shape = name, process_set, [1, -1] + [1] * (input.dim() - 2)
        wide = torch.promote_types(input.dtype, torch.float32)
        mean, scale = mean.to(wide), scale.to(wide)
        ctx.save_for_backward(input, weight, mean, scale, count)
        result = (input.to(wide) - mean.view(ctx.shape)) * scale.view(ctx.shape)
        if weight is not None:
            result = result * weight.to(wide).view(ctx.shape)
        if bias is not None:
            result = result + bias.to(wide).view(ctx.shape)
        return result.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        input, weight, mean, scale, count = ctx.saved_tensors
        shape, sums = ctx.shape, [0, *range(2, input.dim())]
        outer_gradient = outer[0].to(mean.dtype)
        apart = (input.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        summed = outer_gradient.sum(dim=sums, dtype=torch.float64)
        summed_apart = (outer_gradient * apart).sum(dim=sums, dtype=torch.float64)
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            both = torch.stack([summed, summed_apart])
            handle = allreduce_async(both, name=f"{ctx.name}.backward", op=Sum, process_set=ctx.process_set)
            first, second = (synchronize(handle) / count).to(mean.dtype)
            of_input = outer_gradient - first.view(shape) - apart * second.view(shape)
            of_input = of_input * (scale if weight is None else scale * weight.to(mean.dtype)).view(shape)
            of_input = of_input.to(input.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = summed_apart.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = summed.to(mean.dtype if weight is None else weight.dtype)
        return of_input, of_weight, of_bias, None, None, None, None, None
