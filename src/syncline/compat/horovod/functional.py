"""The operations that wait, and how gradients flow through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.compat.horovod import ops
from syncline.compat.horovod.basics import Average
from syncline.compat.horovod.compression import Compression
from syncline.compat.horovod.ops import chosen_op, synchronize
from syncline.compat.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine a tensor over all ranks: the average, unless `op` says otherwise. Differentiable.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def mean(world):
    ...     hvd.init()
    ...     return hvd.allreduce(torch.tensor([float(hvd.rank())]), name="x").item()
    >>> sl.simulate(mean, ranks=3).results
    (1.0, 1.0, 1.0)
    """
    chosen = chosen_op(op, average)
    packed, way_back = compression.compress(tensor)
    told = (name, chosen, prescale_factor, postscale_factor, process_set)
    (combined,) = _Allreduce.apply(told, False, packed)  # type: ignore[no-untyped-call]
    result: Tensor = compression.decompress(combined, way_back)
    return result


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce`, in place."""
    handle = ops.allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(handle)
    return result


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Combine several tensors, all or none of them. Differentiable."""
    chosen = chosen_op(op, average)
    packed = [compression.compress(tensor) for tensor in ops.several(tensors)]
    told = (name, chosen, prescale_factor, postscale_factor, process_set)
    combined = _Allreduce.apply(told, True, *(tensor for tensor, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, way) for tensor, (_, way) in zip(combined, packed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """As `grouped_allreduce`, in place."""
    handle = ops.grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: tuple[Tensor, ...] = synchronize(handle)
    return result


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Join all ranks' tensors along the first dimension, which may differ between them. Differentiable."""
    (result,) = _Allgather.apply(name, process_set, False, tensor)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """As `allgather` for several tensors, all or none of them. Differentiable."""
    found = _Allgather.apply(name, process_set, True, *ops.several(tensors))  # type: ignore[no-untyped-call]
    return tuple(found)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, on every rank. Differentiable."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, in place."""
    result: Tensor = synchronize(ops.broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to each rank: `splits` says how many, equal parts without it. Differentiable.

    Returns the rows received from all ranks; with `splits` also the number of rows received from each. Rows beyond
    the sum of `splits` are not sent.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine a tensor and leave each rank with its rows; the first ranks have one more if need be. Differentiable."""
    packed, way_back = compression.compress(tensor)
    told = (name, chosen_op(op, None), process_set, prescale_factor, postscale_factor)
    (part,) = _Reducescatter.apply(told, False, packed)  # type: ignore[no-untyped-call]
    result: Tensor = compression.decompress(part, way_back)
    return result


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As `reducescatter` for several tensors, all or none of them. Differentiable."""
    packed = [compression.compress(tensor) for tensor in ops.several(tensors)]
    told = (name, chosen_op(op, None), process_set, prescale_factor, postscale_factor)
    parts = _Reducescatter.apply(told, True, *(tensor for tensor, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(part, way) for part, (_, way) in zip(parts, packed, strict=True)]


# Gradients are Horovod's. Each backward is made of the functions above, so that it can be differentiated in turn.


class _Allreduce(torch.autograd.Function):
    """The gradient is combined as the tensors were."""

    @staticmethod
    def forward(ctx: Any, told: Any, grouped: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.told, ctx.grouped = told, grouped
        name, op, before, after, members = told
        if grouped:
            handle = ops.grouped_allreduce_async(tensors, None, name, op, before, after, members)
            return tuple(synchronize(handle))
        return (synchronize(ops.allreduce_async(tensors[0], None, name, op, before, after, members)),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        told = (None, *ctx.told[1:])
        return None, None, *_Allreduce.apply(told, ctx.grouped, *gradients)  # type: ignore[no-untyped-call]


class _Allgather(torch.autograd.Function):
    """The gradient of a rank's rows is the average over the ranks of the gradients of these rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, members: ProcessSet, grouped: bool, *tensors: Tensor) -> Any:
        if grouped:
            handle = ops.grouped_allgather_async(tensors, name, members)
        else:
            handle = ops.allgather_async(tensors[0], name, members)
        ctx.members = members
        ctx.shapes = [tensor.shape for tensor in tensors]
        found = synchronize(handle)
        return tuple(found) if grouped else (found,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own = torch.tensor([[shape[0] if shape else 1 for shape in ctx.shapes]])
        lengths = synchronize(ops.allgather_async(own, None, ctx.members))
        averaged = grouped_allreduce(gradients, op=Average, process_set=ctx.members)
        rank = ctx.members.rank()
        parts = []
        for index, (gradient, shape) in enumerate(zip(averaged, ctx.shapes, strict=True)):
            start = int(lengths[:rank, index].sum())
            parts.append(gradient.narrow(0, start, int(lengths[rank, index])).reshape(shape))
        return None, None, None, *parts


class _Broadcast(torch.autograd.Function):
    """The root gets the average of the gradients, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, members: ProcessSet) -> Any:
        ctx.root, ctx.members = root, members
        return synchronize(ops.broadcast_async(tensor, root, name, members))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        averaged = allreduce(gradient, op=Average, process_set=ctx.members)
        if ctx.members.ranks[ctx.members.rank()] != ctx.root:
            # Not new zeros: every rank must take part when this is differentiated.
            averaged = averaged.masked_fill(torch.ones_like(averaged, dtype=torch.bool), 0.0)
        return averaged, None, None, None


class _Alltoall(torch.autograd.Function):
    """Gradients are sent back to the ranks that sent the rows; rows that were not sent get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, members: ProcessSet) -> Any:
        output, received = synchronize(ops.alltoall_async(tensor, splits, name, members))
        ctx.members, ctx.received, ctx.rows = members, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        back, _ = alltoall(gradient, ctx.received, process_set=ctx.members)
        if back.shape[0] < ctx.rows:
            back = torch.cat([back, back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])])
        return back, None, None, None


class _Reducescatter(torch.autograd.Function):
    """Every rank gathers all parts of the gradient; after a sum they are multiplied by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, told: Any, grouped: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.told = told
        name, op, members, before, after = told
        if grouped:
            return tuple(synchronize(ops.grouped_reducescatter_async(tensors, name, op, members, before, after)))
        return (synchronize(ops.reducescatter_async(tensors[0], name, op, members, before, after)),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, op, members, before, after = ctx.told
        factor = before * after * (1 if op == Average else members.size())
        scaled = [gradient * factor for gradient in gradients]
        return None, None, *grouped_allgather(scaled, process_set=members)
