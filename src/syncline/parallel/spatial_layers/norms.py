"""Normalisation of strips with the mean and the variance of the whole images.

    n = Σ nᵢ      mean = Σ nᵢ·meanᵢ / n      S = Σ (Sᵢ + nᵢ·(meanᵢ − mean)²)      var = S / n
    x̂ = (x − mean) / √(var + ε)              y = w·x̂ + b
    dw = Σ dy·x̂      db = Σ dy               dx = w / √(var + ε) · (dy − (db + x̂·dw) / n)

Sums are over the rows of all workers: one all-gather of meanᵢ and Sᵢ in forward, one all-reduce of dw and db in
backward, which are also the gradients of the weight and the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from syncline.parallel.spatial_layers.strips import Rule, SplitAxis, Strip, refuse, require_strip, share_over_team

__all__ = ["RULES"]


class _Normalize(Function):
    """Normalises a tensor (samples, channels, …) per channel. Returns the output, the mean and the variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: SplitAxis, counts: list[int], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        shape, dims = [1, -1] + [1] * (x.dim() - 2), [0, *range(2, x.dim())]
        mean = wide.mean(dims)
        variance = (wide - mean.view(shape)).square_().mean(dims)  # torch.var_mean takes many times as long
        own = torch.stack([mean, variance])[None]
        moments = axis.team.gather(own, 0)
        share = torch.tensor(counts, dtype=mean.dtype, device=mean.device)[:, None] / sum(counts)
        mean = (share * moments[:, 0]).sum(0)
        variance = (share * (moments[:, 1] + (moments[:, 0] - mean).square())).sum(0)
        factor, offset = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
        output = functional.batch_norm(wide, mean, variance, factor, offset, training=False, eps=eps)
        ctx.team, ctx.count, ctx.biased, ctx.eps = axis.team, sum(counts), bias is not None, eps
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide, factor = x.to(mean.dtype), torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        inverse = (variance + ctx.eps).rsqrt()
        backward = torch.ops.aten.native_batch_norm_backward.default  # with a fixed mean: dy·w/√(var + ε), and the sums
        output, *own = backward(
            gradients[0].to(mean.dtype), wide, factor, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = ctx.team.reduce(torch.stack(own[::-1]))
        scale = -inverse * factor / ctx.count
        output.addcmul_(wide - mean.view(shape), (scale * inverse * sums[1]).view(shape))
        output.add_((scale * sums[0]).view(shape))
        return (
            output.to(x.dtype),
            None if weight is None else sums[1].to(weight.dtype),
            sums[0].to(gradients[0].dtype if weight is None else weight.dtype) if ctx.biased else None,
            *(None, None, None),
        )


def _normalize(
    x: Tensor, axis: SplitAxis, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The output, the mean and the variance of each channel, and the number of values of a channel."""
    values = x.numel() // x.shape[1] // axis.lengths[axis.team.rank]
    counts = [rows * values for rows in axis.lengths]
    output, mean, variance = _Normalize.apply(x, weight, bias, axis, counts, eps)  # type: ignore[no-untyped-call]
    return output, mean, variance, sum(counts)


def _batch_norm(
    function: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Strip:
    axis, rows = _spatial_axis(function, input, functional.batch_norm)
    if not training:
        factors = share_over_team(axis.team, weight, bias)
        return axis.strip(function(rows, running_mean, running_var, *factors, training=False, eps=eps))
    output, mean, variance, count = _normalize(rows, axis, eps, weight, bias)
    with torch.no_grad():
        for running, value in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)
    return axis.strip(output)


def _group_norm(
    function: Callable[..., Any],
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Strip:
    axis, rows = _spatial_axis(function, input, function)
    if rows.shape[1] % num_groups:
        refuse(function, f"cannot divide {rows.shape[1]} channels into {num_groups} groups")
    return axis.strip(_normalize_groups(rows, axis, num_groups, weight, bias, eps))


def _instance_norm(
    function: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Strip:
    axis, rows = _spatial_axis(function, input, functional.instance_norm)
    if not use_input_stats:
        return _batch_norm(functional.batch_norm, input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None:
        refuse(function, "with track_running_stats=True is not supported in training on images that are split")
    return axis.strip(_normalize_groups(rows, axis, rows.shape[1], weight, bias, eps))


def _normalize_groups(
    x: Tensor, axis: SplitAxis, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Each group of channels of a sample is normalised as one channel."""
    flat = x.reshape(1, x.shape[0] * groups, -1)
    output = _normalize(flat, axis, eps)[0].view(x.shape)
    shape = [1, -1] + [1] * (x.dim() - 2)
    factor, offset = share_over_team(axis.team, weight, bias)
    output = output if factor is None else output * factor.view(shape)
    return output if offset is None else output + offset.view(shape)


def _last_dimensions_norm(
    function: Callable[..., Any], input: Tensor, normalized_shape: Sequence[int], *args: Any, **kwargs: Any
) -> Strip:
    """Layer norm and RMS norm, of other dimensions than the split one."""
    axis, rows = require_strip(function, input)
    if len(normalized_shape) >= -axis.dim:
        refuse(function, f"over {tuple(normalized_shape)} includes the {axis.kind}, which is split")
    tensors = share_over_team(axis.team, *(each for each in args if isinstance(each, Tensor)))
    found = iter(tensors)
    args = tuple(next(found) if isinstance(each, Tensor) else each for each in args)
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    named = dict(zip(names, share_over_team(axis.team, *(kwargs[name] for name in names)), strict=True))
    return axis.strip(function(rows, normalized_shape, *args, **{**kwargs, **named}))


def _spatial_axis(function: Callable[..., Any], x: Tensor, known: Callable[..., Any]) -> tuple[SplitAxis, Tensor]:
    """The split axis, which must not be that of samples or channels. `known` takes the arguments of the rule."""
    axis, rows = require_strip(function, x)
    if function is not known:
        refuse(function, f"is not supported on images that are split: use torch.nn.functional.{known.__name__}")
    if rows.dim() + axis.dim < 2:
        refuse(function, f"needs samples and channels before the {axis.kind}, and gets {rows.dim()} dimensions")
    return axis, rows


RULES: Mapping[str, Rule] = {
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _last_dimensions_norm,
    "rms_norm": _last_dimensions_norm,
}
