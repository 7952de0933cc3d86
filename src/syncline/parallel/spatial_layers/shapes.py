"""Sizes, views, reductions and dropout of strips.

Code sees the sizes of whole images. A view that keeps the split dimension, and all dimensions after it, is a view of
the strip. One that merges it with others, such as `flatten(1)`, gathers the images: from there on every worker computes
the same as without strips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from syncline.parallel.spatial_layers.strips import (
    Rule,
    SplitAxis,
    Strip,
    gather_rows,
    refuse,
    require_strip,
    rows_of,
    share_over_team,
)
from syncline.parallel.spatial_layers.windows import RowWindow
from syncline.parallel.team import sum_over_team

__all__ = ["RULES", "whole_shape"]


def whole_shape(x: Tensor, axis: SplitAxis) -> torch.Size:
    """The shape of the whole image."""
    shape = list(x.shape)
    shape[axis.dim] = axis.length
    return torch.Size(shape)


def _shape(function: Callable[..., Any], input: Tensor) -> torch.Size:
    axis, rows = require_strip(function, input)
    return whole_shape(rows, axis)


def _size(function: Callable[..., Any], input: Tensor, dim: int | None = None) -> torch.Size | int:
    shape = _shape(function, input)
    return shape if dim is None else shape[dim]


def _number_of_elements(function: Callable[..., Any], input: Tensor) -> int:
    return prod(_shape(function, input))


def _length(function: Callable[..., Any], input: Tensor) -> int:
    return _shape(function, input)[0]


def _ask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is the same for a strip and a whole image, and no tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        found = function(*args, **kwargs)
    if isinstance(found, Tensor):
        refuse(function, "is not supported on images that are split")
    return found


def _data(function: Callable[..., Any], input: Tensor) -> Strip:
    axis, rows = require_strip(function, input)
    return axis.strip(function(rows))


def _reshape(function: Callable[..., Any], input: Tensor, *shape: Any) -> Tensor:
    axis, rows = require_strip(function, input)
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not isinstance(sizes, Sequence):
        refuse(function, f"to {sizes} is not supported on images that are split")
    return _view(rows, axis, list(sizes))


def _view(rows: Tensor, axis: SplitAxis, sizes: list[int]) -> Tensor:
    whole = whole_shape(rows, axis)
    if -1 in sizes:
        sizes[sizes.index(-1)] = prod(whole) // -prod(sizes)
    if list(whole[axis.dim :]) != sizes[axis.dim :]:
        return gather_rows(rows, axis).reshape(sizes)
    sizes[axis.dim] = rows.shape[axis.dim]
    return axis.strip(rows.reshape(sizes))


def _flatten(function: Callable[..., Any], input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    axis, rows = require_strip(function, input)
    shape = list(whole_shape(rows, axis))
    start, end = start_dim % len(shape), end_dim % len(shape) + 1
    return _view(rows, axis, [*shape[:start], prod(shape[start:end]), *shape[end:]])


def _permute(function: Callable[..., Any], input: Tensor, *dims: Any) -> Strip:
    axis, rows = require_strip(function, input)
    order = [int(dim) % rows.dim() for dim in (dims if isinstance(dims[0], int) else dims[0])]
    return axis.strip(rows.permute(order), dim=order.index(rows.dim() + axis.dim) - rows.dim())


def _transpose(function: Callable[..., Any], input: Tensor, dim0: int, dim1: int) -> Strip:
    _, rows = require_strip(function, input)
    order = list(range(rows.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(function, input, order)


def _unsqueeze(function: Callable[..., Any], input: Tensor, dim: int) -> Strip:
    axis, rows = require_strip(function, input)
    behind = dim % (rows.dim() + 1) > rows.dim() + axis.dim
    return axis.strip(function(rows, dim), dim=axis.dim - behind)


def _cat(function: Callable[..., Any], tensors: Sequence[Tensor], dim: int = 0) -> Strip:
    strips = [each for each in tensors if isinstance(each, Strip)]
    axis = strips[0].axis
    if any((each.axis.dim, each.axis.length) != (axis.dim, axis.length) for each in strips):
        lengths = ", ".join(f"{each.axis.length}" for each in strips)
        refuse(function, f"gets images that are split differently: their lengths in the {axis.kind} are {lengths}")
    _require_other_dim(function, strips[0], dim)
    for each in tensors:
        if not isinstance(each, Strip) and (each.dim() < -axis.dim or each.shape[axis.dim] != axis.length):
            refuse(function, f"gets a tensor {tuple(each.shape)} and images of {axis.length} in the {axis.kind}")
    return axis.strip(function([rows_of(each if isinstance(each, Strip) else axis.cut(each)) for each in tensors], dim))


def _parts(function: Callable[..., Any], input: Tensor, sizes: Any, dim: int = 0) -> tuple[Strip, ...]:
    """`chunk`, `split` and `tensor_split`."""
    axis, rows = require_strip(function, input)
    _require_other_dim(function, input, dim)
    return tuple(axis.strip(part) for part in function(rows, sizes, dim))


def _get_item(function: Callable[..., Any], input: Tensor, index: Any) -> Strip:
    axis, rows = require_strip(function, input)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is None or item is Ellipsis or isinstance(item, int | slice)) for item in items):
        refuse(function, "with an index that is a tensor or a list is not supported on images that are split")
    used = sum(item is not None and item is not Ellipsis for item in items)
    place = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[place : place + 1] = [slice(None)] * (rows.dim() - used)
    places = [number for number, item in enumerate(items) if item is not None]
    split = places[axis.dim]
    behind = sum(isinstance(item, slice) or item is None for item in items[split:])
    wanted, output = items[split], axis.length
    if not isinstance(wanted, slice) or wanted.step not in (None, 1):
        refuse(function, f"with {wanted} is not supported in the {axis.kind}, which is split")
    start, stop, _ = wanted.indices(axis.length)
    if (start, stop) != (0, axis.length):
        output = axis.check_length(stop - start, "a part of an image")
        rows = RowWindow(1, before=-start).fetch(rows, axis, output)
    items[split] = slice(None)
    return axis.strip(rows[tuple(items)], dim=-behind, length=output)


def _along_dimension(
    function: Callable[..., Any], input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
) -> Strip:
    """Functions of all values along another dimension than the split one, with an output of the same dimensions."""
    axis, rows = require_strip(function, input)
    if dim is None:
        refuse(function, "needs dim= on images that are split")
    _require_other_dim(function, input, dim)
    return axis.strip(function(rows, dim, *args, **kwargs))


def _reduce(
    function: Callable[..., Any], input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """`sum` and `mean`. Over the split dimension the workers add their sums, and all have the result."""
    axis, rows = require_strip(function, input)
    if not isinstance(keepdim, bool):
        refuse(function, "gets several dimensions: write them as a tuple")
    dims = list(range(rows.dim())) if dim in (None, ()) else [dim] if isinstance(dim, int) else list(dim)
    dims = [each % rows.dim() for each in dims]
    split = rows.dim() + axis.dim
    if split not in dims:
        removed = 0 if keepdim else sum(each > split for each in dims)
        return axis.strip(function(rows, dims, keepdim, dtype=dtype), dim=axis.dim + removed)
    low = rows.dtype in (torch.float16, torch.bfloat16)
    total = sum_over_team(torch.sum(rows, dims, keepdim, dtype=dtype or (torch.float32 if low else None)), axis.team)
    shape = whole_shape(rows, axis)
    total = total / (prod(shape[each] for each in dims) if function.__name__ == "mean" else 1)
    return total.to(dtype or (rows.dtype if low else total.dtype))


def _linear(function: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Strip:
    axis, rows = require_strip(function, input)
    _require_other_dim(function, input, -1)
    return axis.strip(function(rows, *share_over_team(axis.team, weight, bias)))


def _require_other_dim(function: Callable[..., Any], x: Tensor, dim: int) -> None:
    axis, rows = require_strip(function, x)
    if dim % rows.dim() == rows.dim() + axis.dim:
        refuse(function, f"along dimension {dim} is not supported: it is the {axis.kind}, which is split")


def _dropout(
    function: Callable[..., Any], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Each worker draws the mask of its strip from a stream of its own.

    All workers draw its seed from torch's global stream, which stays the same on all of them.
    """
    axis, rows = require_strip(function, input)
    if not training or p in (0.0, 1.0):
        found = function(rows, p, training, inplace)
        return input if found is rows else axis.strip(found)
    seed = int(torch.randint(2**62, ())) + axis.team.rank
    stream = torch.Generator(rows.device).manual_seed(seed)
    mask = torch.empty_like(rows).bernoulli_(1 - p, generator=stream).div_(1 - p)
    return _multiply_in_place(input, mask) if inplace else axis.strip(rows * mask)


def _channel_dropout(
    function: Callable[..., Any], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Whole channels are dropped: all workers draw the same mask."""
    axis, rows = require_strip(function, input)
    if rows.dim() != _CHANNEL_DROPOUTS[function.__name__] + 2:
        refuse(function, f"needs samples and channels on images that are split, and gets {rows.dim()} dimensions")
    if not training or p == 0:
        return input
    shape = [*rows.shape[:2], *[1] * (rows.dim() - 2)]
    mask = function(torch.ones(shape, dtype=rows.dtype, device=rows.device), p, True)
    return _multiply_in_place(input, mask) if inplace else axis.strip(rows * mask)


def _multiply_in_place(x: Tensor, mask: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.mul_(mask)


_CHANNEL_DROPOUTS = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}


def _pointwise(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Functions whose output at a place depends on the inputs at that place."""
    strips = [each for each in (*args, *kwargs.values()) if isinstance(each, Strip)]
    axis = strips[0].axis
    if any((each.axis.dim, each.axis.length) != (axis.dim, axis.length) for each in strips):
        lengths = ", ".join(f"{each.axis.length}" for each in strips)
        refuse(function, f"gets images that are split differently: their lengths in the {axis.kind} are {lengths}")
    in_place = function.__name__.endswith("_") and not function.__name__.endswith("__")
    if kwargs.get("out") is not None or (in_place and not isinstance(args[0], Strip)):
        refuse(function, "cannot write a strip of an image into another tensor")
    args = tuple(_match(function, each, axis) for each in args)
    kwargs = {name: _match(function, each, axis) for name, each in kwargs.items()}
    with torch._C.DisableTorchFunctionSubclass():  # the function may work in place on a strip, and return it
        found = function(*args, **kwargs)
    return found if isinstance(found, Strip) else axis.strip(found)


def _match(function: Callable[..., Any], value: Any, axis: SplitAxis) -> Any:
    """A tensor that every worker has, so that it can be combined with a strip."""
    if isinstance(value, Strip) or not isinstance(value, Tensor):
        return value
    if value.dim() < -axis.dim or value.shape[axis.dim] == 1:
        return share_over_team(axis.team, value)[0]
    if value.shape[axis.dim] != axis.length:
        refuse(function, f"gets a tensor {tuple(value.shape)} and an image of {axis.length} in the {axis.kind}")
    return axis.cut(value)


def _with_shared_tensors(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Functions of an image, and of tensors with one value for each channel."""
    axis, rows = require_strip(function, input)
    args = tuple(share_over_team(axis.team, each)[0] if isinstance(each, Tensor) else each for each in args)
    return axis.strip(function(rows, *args, **kwargs))


def _along_channels(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    axis, rows = require_strip(function, input)
    _require_other_dim(function, input, 1)
    return axis.strip(function(rows, *args, **kwargs))


def _random_leaky_relu(
    function: Callable[..., Any],
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if training:
        refuse(function, "in training is not supported on images that are split: it draws a number for each value")
    return _pointwise(function, input, lower, upper, training, inplace)


_POINTWISE = (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "tanh"),
    *("sigmoid", "logsigmoid", "log_sigmoid", "hardswish", "hardsigmoid", "hardtanh", "hardshrink", "softshrink"),
    *("tanhshrink", "threshold", "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide"),
    *("neg", "negative", "positive", "abs", "absolute", "pow", "square", "sqrt", "rsqrt", "exp", "expm1", "log"),
    *("log1p", "log2", "sin", "cos", "erf", "reciprocal", "sign", "floor", "ceil", "round", "clamp", "clip"),
    *("clamp_min", "clamp_max", "maximum", "minimum", "where", "lerp", "addcmul", "addcdiv", "masked_fill"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or"),
    *("bitwise_not", "isnan", "isinf", "isfinite", "nan_to_num", "clone", "contiguous", "detach", "to", "type_as"),
    *("float", "double", "half", "bfloat16", "bool", "zeros_like", "ones_like", "requires_grad", "cpu", "cuda"),
)
_QUESTIONS = (
    *("dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device", "is_contiguous"),
    *("register_hook", "retain_grad", "hash", "repr", "format", "get dtype", "get device", "get layout", "get ndim"),
    *("get requires_grad", "set requires_grad", "get is_cuda", "get is_leaf", "get grad_fn", "get is_meta"),
    *("get is_sparse", "get is_quantized", "get is_nested", "get is_mkldnn", "get is_cpu", "get _version", "data_ptr"),
    *("is_inference", "get itemsize", "is_conj", "is_neg", "get is_mps", "get is_xpu", "stride", "storage_offset"),
    *("get output_nr", "get _backward_hooks", "get grad", "has_names"),
)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_QUESTIONS, _ask),
    "get shape": _shape,
    "get data": _data,
    "size": _size,
    "numel": _number_of_elements,
    "nelement": _number_of_elements,
    "len": _length,
    **dict.fromkeys(("view", "reshape"), _reshape),
    "flatten": _flatten,
    "permute": _permute,
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("chunk", "split", "tensor_split"), _parts),
    "getitem": _get_item,
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "glu", "cumsum", "cumprod"), _along_dimension),
    **dict.fromkeys(("sum", "mean"), _reduce),
    "linear": _linear,
    "dropout": _dropout,
    **dict.fromkeys(_CHANNEL_DROPOUTS, _channel_dropout),
    "prelu": _with_shared_tensors,
    "local_response_norm": _along_channels,
    "rrelu": _random_leaky_relu,
}
