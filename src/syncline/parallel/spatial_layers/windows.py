"""Convolution, pooling, padding and enlargement of strips: functions whose output rows need a window of input rows.

With kernel k, stride s, padding q and dilation d, a worker that computes the output rows [a, b) needs the input rows

    [a·s − q, (b − 1)·s − q + d·(k − 1) + 1)

It receives the ones that others hold, adds the padding at the borders of the image, and computes without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from syncline.parallel.spatial_layers.halos import Rows, fetch_rows
from syncline.parallel.spatial_layers.strips import (
    Rule,
    SplitAxis,
    Strip,
    function_name,
    gather_rows,
    refuse,
    require_strip,
    share_over_team,
)
from syncline.parallel.team import sum_over_team

__all__ = ["RULES", "RowWindow"]

Sizes = int | Sequence[int]


@dataclass(frozen=True)
class RowWindow:
    """The input rows of an output row, along the split dimension.

    >>> RowWindow(kernel=3, stride=2, before=1, after=1).length(7)
    4
    >>> RowWindow(kernel=3, stride=2, before=1, after=1).rows(2, 4)
    (3, 8)
    """

    kernel: int
    stride: int = 1
    before: int = 0
    """Rows of padding before the image."""
    after: int = 0
    dilation: int = 1
    ceil: bool = False
    """Whether a last window begins in the image and ends outside of it."""

    def length(self, length: int) -> int:
        """The output rows of an image with so many rows. See `torch.nn.MaxPool2d` for `ceil`."""
        free = length + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if not self.ceil:
            return free // self.stride + 1
        output = -(-free // self.stride) + 1
        return output - 1 if (output - 1) * self.stride >= length + self.before else output

    def rows(self, start: int, stop: int) -> Rows:
        """The input rows for the output rows [start, stop)."""
        return (
            start * self.stride - self.before,
            (stop - 1) * self.stride - self.before + self.dilation * (self.kernel - 1) + 1,
        )

    def fetch(self, x: Tensor, axis: SplitAxis, output: int, fill: float = 0.0) -> Tensor:
        """The input rows of this worker's rows of an output."""
        return fetch_rows(x, axis, [self.rows(*rows) for rows in pairwise(axis.team.edges(output))], fill)


def _index(function: Callable[..., Any], axis: SplitAxis, dimensions: int) -> int:
    """The place of the split dimension among the spatial dimensions of a layer."""
    if axis.dim < -dimensions:
        refuse(function, f"has no {axis.kind}: it works on the last {dimensions} dimension{'s' * (dimensions > 1)}")
    return dimensions + axis.dim


def _dimensions(function: Callable[..., Any]) -> int:
    """The number in the name of a function, such as conv2d."""
    return int(function_name(function)[-2])


def _each(sizes: Sizes, dimensions: int) -> list[int]:
    """A size for each spatial dimension."""
    if isinstance(sizes, int):
        return [sizes] * dimensions
    return list(sizes) * dimensions if len(sizes) == 1 else list(sizes)


def _output_length(function: Callable[..., Any], axis: SplitAxis, length: int) -> int:
    return axis.check_length(length, f"the output of {function.__name__}")


def _convolve(
    function: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Strip:
    axis, rows = require_strip(function, input)
    count = weight.dim() - 2
    place = _index(function, axis, count)
    strides, dilations = _each(stride, count), _each(dilation, count)
    totals = [each * (size - 1) for each, size in zip(dilations, weight.shape[2:], strict=True)]
    if isinstance(padding, str) and (padding not in ("same", "valid") or (padding == "same" and max(strides) > 1)):
        refuse(function, f"with padding={padding!r} and stride {strides} does not exist")
    if isinstance(padding, str):  # "same" has one more row after the image than before it if their sum is odd
        befores = [total // 2 if padding == "same" else 0 for total in totals]
        afters = [total - before if padding == "same" else 0 for total, before in zip(totals, befores, strict=True)]
    else:
        befores = afters = _each(padding, count)
    window = RowWindow(weight.shape[2 + place], strides[place], befores[place], afters[place], dilations[place])
    output = _output_length(function, axis, window.length(axis.length))
    rows = window.fetch(rows, axis, output)
    afters = [0 if number == place else after for number, after in enumerate(afters)]
    befores = [0 if number == place else before for number, before in enumerate(befores)]
    if befores != afters:
        pairs = zip(befores, afters, strict=True)
        rows = functional.pad(rows, [size for pair in reversed(list(pairs)) for size in pair])
        befores = [0] * count
    weights = share_over_team(axis.team, weight, bias)
    return axis.strip(function(rows, *weights, strides, befores, dilations, groups), length=output)


def _convolve_transposed(
    function: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Strip:
    """Input row i adds to the output rows i·s − q + d·j for each row j of the kernel."""
    axis, rows = require_strip(function, input)
    count = weight.dim() - 2
    place = _index(function, axis, count)
    strides, paddings, dilations = _each(stride, count), _each(padding, count), _each(dilation, count)
    extras = _each(output_padding, count)
    s, q, reach = strides[place], paddings[place], dilations[place] * (weight.shape[2 + place] - 1)
    if extras[place] >= max(s, dilations[place]):
        refuse(function, f"has output_padding {extras[place]}, which must be below its stride {s} or its dilation")
    output = _output_length(function, axis, (axis.length - 1) * s - 2 * q + reach + extras[place] + 1)
    edges = axis.team.edges(output)
    needs = [_transposed_rows(start + q, stop + q, s, reach) for start, stop in pairwise(edges)]
    rows = fetch_rows(rows, axis, needs)
    paddings[place] = extras[place] = 0
    weights = share_over_team(axis.team, weight, bias)
    found = function(rows, *weights, strides, paddings, extras, groups, dilations)
    start, stop = edges[axis.team.rank : axis.team.rank + 2]
    begin = start + q - needs[axis.team.rank][0] * s
    return axis.strip(found.narrow(axis.dim, begin, stop - start), length=output)


def _transposed_rows(start: int, stop: int, stride: int, reach: int) -> Rows:
    """The input rows that cover the output rows [start, stop), counted without the padding that is cut off."""
    first, last = -((reach - start) // stride), (stop - 1) // stride
    if first * stride > start:  # no input row reaches the first output rows
        first -= 1
    if last * stride + reach + 1 < stop:  # nor the last ones
        last += 1
    return first, last + 1


def _max_pool(
    function: Callable[..., Any],
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    axis, rows = require_strip(function, input)
    count = _dimensions(function)
    window, kernels, strides, paddings = _pooling(function, axis, kernel_size, stride, padding, dilation, ceil_mode)
    if window.length(axis.length) == 1:
        whole = function(gather_rows(rows, axis), kernel_size, stride, padding, dilation, ceil_mode)
        return torch.as_tensor(whole)
    output = _output_length(function, axis, window.length(axis.length))
    rows = window.fetch(rows, axis, output, float("-inf"))
    found = function(rows, kernels, strides, paddings, _each(dilation, count), ceil_mode)
    return axis.strip(found, length=output)


def _max_pool_with_indices(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    refuse(function, "is not supported on images that are split: leave return_indices=True out")


def _average_pool(
    function: Callable[..., Any],
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    axis, rows = require_strip(function, input)
    extra = () if divisor_override is None else (divisor_override,)
    window, kernels, strides, paddings = _pooling(function, axis, kernel_size, stride, padding, 1, ceil_mode)
    if window.length(axis.length) == 1:
        whole = gather_rows(rows, axis)
        return torch.as_tensor(function(whole, kernel_size, stride, padding, ceil_mode, count_include_pad, *extra))
    output = _output_length(function, axis, window.length(axis.length))
    rows = window.fetch(rows, axis, output)
    found = function(rows, kernels, strides, paddings, ceil_mode, count_include_pad, *extra)
    counts = [_pooled_rows(window, row, axis.length, count_include_pad) for row in range(output)]
    if divisor_override is None and any(count != window.kernel for count in counts):  # the same on all workers
        start, stop = axis.team.edges(output)[axis.team.rank : axis.team.rank + 2]
        scale = torch.tensor([window.kernel / count for count in counts[start:stop]], dtype=torch.float64)
        found = found * scale.to(found).view(-1, *[1] * (-axis.dim - 1))
    return axis.strip(found, length=output)


def _pooled_rows(window: RowWindow, row: int, length: int, with_padding: bool) -> int:
    """The rows by whose number torch divides the sum of a window. Rows after the padding never count."""
    start, stop = window.rows(row, row + 1)
    if with_padding:
        return min(stop, length + window.after) - start
    return min(stop, length) - max(start, 0)


def _pooling(
    function: Callable[..., Any],
    axis: SplitAxis,
    kernel_size: Sizes,
    stride: Sizes | None,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> tuple[RowWindow, list[int], list[int], list[int]]:
    """The window along the split dimension; kernels, strides, and paddings of the others."""
    count = _dimensions(function)
    place = _index(function, axis, count)
    kernels, paddings = _each(kernel_size, count), _each(padding, count)
    strides = _each(stride, count) if stride or isinstance(stride, int) else kernels
    size, pad = kernels[place], paddings[place]
    if not 0 <= 2 * pad <= size:
        refuse(function, f"has padding {pad}, which must be at most half of its kernel, {size}")
    window = RowWindow(size, strides[place], pad, pad, _each(dilation, count)[place], ceil_mode)
    return window, kernels, strides, [0 if number == place else each for number, each in enumerate(paddings)]


def _adaptive_average(function: Callable[..., Any], input: Tensor, output_size: Any) -> Tensor:
    axis, rows = require_strip(function, input)
    count = _dimensions(function)
    place = _index(function, axis, count)
    wanted = [output_size] * count if isinstance(output_size, int | None) else list(output_size)
    if wanted[place] in (None, axis.length):  # the split dimension stays as it is
        wanted[place] = rows.shape[axis.dim]
        return axis.strip(function(rows, wanted))
    if wanted[place] != 1:
        return torch.as_tensor(function(gather_rows(rows, axis), output_size))
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    total = sum_over_team(function(wide, wanted) * rows.shape[axis.dim], axis.team)
    return (total / axis.length).to(rows.dtype)


def _adaptive_max(function: Callable[..., Any], input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """A whole image is gathered: its largest value, and which gradient it gets, depend on all rows."""
    axis, rows = require_strip(function, input)
    return function(gather_rows(rows, axis), output_size, return_indices)


def _pad(
    function: Callable[..., Any], input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Strip:
    axis, rows = require_strip(function, input)
    place, sizes = 2 * (-axis.dim - 1), list(pad)
    before, after = sizes[place : place + 2] or (0, 0)
    if (before or after) and mode != "constant":
        refuse(function, f"with mode {mode!r} is not supported along the {axis.kind}, which is split: use zeros")
    sizes[place : place + 2] = [0, 0][: len(sizes[place:])]
    output = _output_length(function, axis, axis.length + before + after)
    rows = RowWindow(1, before=before, after=after).fetch(rows, axis, output, value or 0.0)
    padded = function(rows, sizes, mode, value) if any(sizes) else rows
    return axis.strip(padded, length=output)


def _interpolate(
    function: Callable[..., Any],
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Strip:
    axis, rows = require_strip(function, input)
    count = rows.dim() - 2
    place = _index(function, axis, count)
    sizes = None if size is None else [size] * count if isinstance(size, int) else list(size)
    factors = list(scale_factor) if isinstance(scale_factor, list | tuple) else [scale_factor] * count
    output = int(axis.length * float(factors[place])) if sizes is None else int(sizes[place])
    factor = output // axis.length
    linear = mode in ("linear", "bilinear", "trilinear")
    exact = output == factor * axis.length and (sizes is not None or float(factors[place]) == factor)
    if not exact or not (linear or mode in ("nearest", "nearest-exact")) or align_corners or antialias:
        refuse(
            function,
            f"from {axis.length} to {output} with mode={mode!r}, align_corners={align_corners}, antialias={antialias} "
            f"is not supported along the {axis.kind}, which is split: whole factors with nearest or linear are",
        )
    needs = []
    for start, stop in pairwise(axis.team.edges(output)):
        first, last = start // factor, (stop - 1) // factor
        if linear:  # row o of the output is at (o + ½)/factor − ½ of the input
            first, last = (2 * start + 1 - factor) // (2 * factor), (2 * stop - 1 - factor) // (2 * factor) + 1
        needs.append((max(first, 0), min(last + 1, axis.length)))
    rows = fetch_rows(rows, axis, needs)
    if sizes is not None:
        sizes[place] = factor * rows.shape[axis.dim]
    found = function(rows, sizes, scale_factor, mode, align_corners, recompute_scale_factor)
    return _crop(axis, found, output, needs[axis.team.rank][0] * factor)


def _pixel_shuffle(function: Callable[..., Any], input: Tensor, upscale_factor: int) -> Strip:
    axis, rows = require_strip(function, input)
    factor = upscale_factor
    _index(function, axis, 2)
    output = axis.length * factor
    needs = [(start // factor, (stop - 1) // factor + 1) for start, stop in pairwise(axis.team.edges(output))]
    found = function(fetch_rows(rows, axis, needs), factor)
    return _crop(axis, found, output, needs[axis.team.rank][0] * factor)


def _pixel_unshuffle(function: Callable[..., Any], input: Tensor, downscale_factor: int) -> Strip:
    axis, rows = require_strip(function, input)
    factor = downscale_factor
    _index(function, axis, 2)
    if axis.length % factor:
        refuse(function, f"needs a {axis.kind} that is divisible by {factor}, not {axis.length}")
    output = _output_length(function, axis, axis.length // factor)
    return axis.strip(function(RowWindow(factor, factor).fetch(rows, axis, output), factor), length=output)


def _crop(axis: SplitAxis, found: Tensor, output: int, first: int) -> Strip:
    """This worker's rows of an output, of which the rows from `first` are computed."""
    start, stop = axis.team.edges(output)[axis.team.rank : axis.team.rank + 2]
    return axis.strip(found.narrow(axis.dim, start - first, stop - start), length=output)


RULES: Mapping[str, Rule] = {
    **{f"conv{count}d": _convolve for count in (1, 2, 3)},
    **{f"conv_transpose{count}d": _convolve_transposed for count in (1, 2, 3)},
    **{f"max_pool{count}d": _max_pool for count in (1, 2, 3)},
    **{f"max_pool{count}d_with_indices": _max_pool_with_indices for count in (1, 2, 3)},
    **{f"avg_pool{count}d": _average_pool for count in (1, 2, 3)},
    **{f"adaptive_avg_pool{count}d": _adaptive_average for count in (1, 2, 3)},
    **{f"adaptive_max_pool{count}d": _adaptive_max for count in (1, 2, 3)},
    "pad": _pad,
    "interpolate": _interpolate,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
}
