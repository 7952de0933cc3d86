"""Executes operations that all ranks have requested, in the same order; small ones share one buffer.

```text
requested by all ranks    sum a │ max b │ broadcast c │ sum d
fusion groups             sum (a d) │ max (b) │ broadcast (c)
one buffer per group      [ a │ d ]  →  reduced  →  a, d
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from syncline.collectives import NATIVE, build, channel
from syncline.compat.horovod.messages import OperationPlan, OperationRequest
from syncline.compat.horovod.pending import PendingOperation
from syncline.transports import Op
from syncline.world import Group
from syncline.world.arrays import widen


@dataclass
class FusionGroup:
    """Plans that are executed as one collective."""

    plans: list[OperationPlan]
    key: tuple[Any, ...]
    nbytes: int = 0
    views: list[Tensor] = field(default_factory=list)
    flat: Tensor | None = None
    """The buffer of all tensors, kept for the next time."""


def fuse_plans(plans: Sequence[OperationPlan], max_bytes: int) -> list[FusionGroup]:
    """Group plans of one kind, up to `max_bytes`. The result depends only on the plans: it is equal on all ranks."""
    groups: list[FusionGroup] = []
    open_groups: dict[tuple[Any, ...], FusionGroup] = {}
    for plan in plans:
        request = plan.request
        key = _group_key(request)
        nbytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in request.parts)
        found = open_groups.get(key) if key else None
        if found is None or found.nbytes + nbytes > max_bytes:
            found = FusionGroup([], key)
            groups.append(found)
            if key:
                open_groups[key] = found
        found.plans.append(plan)
        found.nbytes += nbytes
    return groups


def execute(
    team: Group, group: FusionGroup, pending: Sequence[PendingOperation | None], hierarchical: bool
) -> list[Any]:
    """Execute a group; return the result of each plan, or None if this rank has only contributed zeros.

    The caller has switched autograd off.
    """
    request = group.plans[0].request
    if request.kind == "allreduce":
        if request.op == "adasum":
            return [_adasum(team, plan, requested) for plan, requested in zip(group.plans, pending, strict=True)]
        return _allreduce(team, group, pending, hierarchical)
    if request.kind == "broadcast":
        return _broadcast(team, group, pending)
    (requested,) = pending
    assert requested is not None, "only sums are computed without some ranks"
    (plan,) = group.plans
    if request.kind == "allgather":
        return [_allgather(team, plan, requested)]
    if request.kind == "alltoall":
        return [_alltoall(team, plan, requested)]
    if request.kind == "reducescatter":
        return [_reduce_scatter(team, plan, requested)]
    if request.kind == "barrier":
        channel.barrier(team.channel)
    return [None if requested.action is None else requested.action(plan)]


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place as Horovod does on a CPU: integers are converted to double, and rounded towards zero."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        if tensor.dtype.itemsize == 2:
            tensor.copy_(tensor.float().mul_(factor))
        else:
            tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def row_offsets(rows: int, size: int) -> list[int]:
    """The offsets of the ranks' rows in a reduce-scatter. The first ranks have one row more if rows do not divide.

    >>> row_offsets(7, 3)
    [0, 3, 5, 7]
    """
    return [0, *accumulate(rows // size + (rank < rows % size) for rank in range(size))]


def _group_key(request: OperationRequest) -> tuple[Any, ...]:
    """The key that requests of one group share; empty if each runs alone."""
    dtypes = {part.dtype for part in request.parts}
    if request.kind == "allreduce" and request.op != "adasum" and len(dtypes) == 1:
        return ("allreduce", request.op, *dtypes, request.before, request.after, request.device)
    if request.kind == "broadcast":
        return ("broadcast", request.root, request.device)
    return ()


def _contiguous(tensor: Tensor) -> Tensor:
    """A contiguous tensor with plain strides: a single element with other strides has no byte view."""
    found = tensor.contiguous()
    return found if found.numel() > 1 else found.clone(memory_format=torch.contiguous_format)


def _input_tensors(plan: OperationPlan, requested: PendingOperation | None, device: torch.device) -> list[Tensor]:
    """The tensors of this rank; zeros after it has joined."""
    if requested is not None:
        return requested.inputs
    return [torch.zeros(part.shape, dtype=part.dtype, device=device) for part in plan.request.parts]


def _allreduce(
    team: Group, group: FusionGroup, pending: Sequence[PendingOperation | None], hierarchical: bool
) -> list[Any]:
    request = group.plans[0].request
    device = team.world.device if request.device == "cuda" else torch.device("cpu")
    owned = [_input_tensors(plan, requested, device) for plan, requested in zip(group.plans, pending, strict=True)]
    inputs = [tensor for tensors in owned for tensor in tensors]
    if len(inputs) == 1 and pending[0] is not None and pending[0].outputs[0].is_contiguous():
        return _allreduce_in_place(team, request, pending[0], hierarchical)
    if group.flat is None:
        total = sum(tensor.numel() for tensor in inputs)
        group.flat = torch.empty(total, dtype=inputs[0].dtype, device=device)
        sizes = [tensor.numel() for tensor in inputs]
        shapes = [tensor.shape for tensor in inputs]
        group.views = [piece.view(shape) for piece, shape in zip(torch.split(group.flat, sizes), shapes, strict=True)]
    torch._foreach_copy_(group.views, inputs)
    _reduce_flat(team, request, group.flat, hierarchical)
    return _copy_results(group, pending)


def _allreduce_in_place(
    team: Group, request: OperationRequest, requested: PendingOperation, hierarchical: bool
) -> list[Any]:
    """Reduce a single tensor without a buffer."""
    (own,), (output,) = requested.inputs, requested.outputs
    flat = output.view(-1)
    if flat.numel() < 2:
        flat = flat.as_strided(flat.shape, (1,))  # see _contiguous
    if own is not output:
        flat.copy_(own.reshape(-1))
    _reduce_flat(team, request, flat, hierarchical)
    return [requested.outputs]


def _reduce_flat(team: Group, request: OperationRequest, flat: Tensor, hierarchical: bool) -> None:
    scale(flat, request.before)
    _sum_in_place(team, flat, cast("Op", "sum" if request.op == "average" else request.op), hierarchical)
    scale(flat, request.after / team.size if request.op == "average" else request.after)


def _copy_results(group: FusionGroup, pending: Sequence[PendingOperation | None]) -> list[Any]:
    pieces: Iterator[Tensor] = iter(group.views)
    targets, sources, results = [], [], []
    for plan, requested in zip(group.plans, pending, strict=True):
        mine = [next(pieces) for _ in plan.request.parts]
        results.append(None if requested is None else requested.outputs)
        if requested is not None:
            targets += requested.outputs
            sources += mine
    if targets:
        torch._foreach_copy_(targets, sources)
    return results


def _sum_in_place(team: Group, flat: Tensor, op: Op, hierarchical: bool) -> None:
    if team.size == 1 or not flat.numel():
        return
    native = team.transport.native
    if native.reduces(flat.dtype, op) and not hierarchical:
        native.allreduce(flat, op).wait()
        return
    wide, narrow = widen(flat, op)
    if native.reduces(wide.dtype, op) and not hierarchical:
        native.allreduce(wide, op).wait()
    else:
        channel.allreduce(team.channel, wide, op, build("allreduce", "hierarchical" if hierarchical else NATIVE))
    flat.copy_(narrow(wide).view(flat.shape))


def _adasum(team: Group, plan: OperationPlan, requested: PendingOperation | None) -> Any:
    request = plan.request
    tensors = _input_tensors(plan, requested, torch.device("cpu"))
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for copy in copies:
        scale(copy, request.before)
    results = adasum(team, copies)
    for result in results:
        scale(result, request.after)
    if requested is None:
        return None
    for output, result in zip(requested.outputs, results, strict=True):
        output.copy_(result)
    return requested.outputs


def _broadcast(team: Group, group: FusionGroup, pending: Sequence[PendingOperation | None]) -> list[Any]:
    root = group.plans[0].request.root
    held = [requested for requested in pending if requested is not None]
    inputs = [tensor for requested in held for tensor in requested.inputs]
    pieces = [_contiguous(tensor).view(-1).view(torch.uint8) for tensor in inputs]
    flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
    native = team.transport.native
    if team.size > 1 and flat.numel():
        if native.available:
            native.broadcast(flat, root).wait()
        else:
            channel.broadcast(team.channel, flat, root, build("broadcast", NATIVE))
    landed = iter(torch.split(flat, [piece.numel() for piece in pieces]))
    for requested in held:
        for output in requested.outputs:
            output.copy_(next(landed).clone().view(output.dtype).view(output.shape))
    return [None if requested is None else requested.outputs for requested in pending]


def _allgather(team: Group, plan: OperationPlan, requested: PendingOperation) -> list[Tensor]:
    results = []
    for index, tensor in enumerate(requested.inputs):
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        lengths = [row[index] for row in plan.rows]
        results.append(_join_rows(team, _contiguous(rows), lengths))
    return results


def _join_rows(team: Group, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    output = rows.new_empty(sum(lengths), *rows.shape[1:])
    native = team.transport.native
    if native.available and len(set(lengths)) == 1 and team.size > 1:
        if rows.numel():
            native.allgather(output.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8)).wait()
        return output
    parts = dict(enumerate(torch.split(output, list(lengths))))
    parts[team.rank].copy_(rows)
    if team.size > 1:
        channel.move_pieces(team.channel, "allgather", parts, build("allgather", NATIVE).spec)
    return output


def _alltoall(team: Group, plan: OperationPlan, requested: PendingOperation) -> tuple[Tensor, Tensor]:
    (tensor,) = (_contiguous(tensor) for tensor in requested.inputs)
    rank, size = team.rank, team.size
    incoming = [row[rank] for row in plan.rows]
    received = torch.tensor(incoming, dtype=torch.int32)
    output = tensor.new_empty(sum(incoming), *tensor.shape[1:])
    outgoing = list(plan.rows[rank])
    outgoing_parts = torch.split(tensor[: sum(outgoing)], outgoing)  # rows beyond the sum are not sent
    incoming_parts = torch.split(output, incoming)
    incoming_parts[rank].copy_(outgoing_parts[rank])
    parts = {rank * size + to: outgoing_parts[to] for to in range(size) if to != rank}
    parts |= {source * size + rank: incoming_parts[source] for source in range(size) if source != rank}
    if size > 1:
        channel.move_pieces(team.channel, "alltoall", parts, build("alltoall", NATIVE).spec)
    return output, received


def _reduce_scatter(team: Group, plan: OperationPlan, requested: PendingOperation) -> list[Tensor]:
    request = plan.request
    results = []
    for tensor in requested.inputs:
        held = tensor.clone(memory_format=torch.contiguous_format)
        scale(held, request.before)
        edges = row_offsets(tensor.shape[0], team.size)
        if team.size > 1 and held.numel():
            wide, narrow = widen(held, "sum")
            row = wide[0].numel()
            schedule = build("reduce_scatter", NATIVE)
            channel.reduce_scatter(team.channel, wide, [edge * row for edge in edges], "sum", schedule)
            part = narrow(wide[edges[team.rank] : edges[team.rank + 1]].clone())
        else:
            part = held[edges[team.rank] : edges[team.rank + 1]].clone()
        scale(part, request.after / team.size if request.op == "average" else request.after)
        results.append(part)
    return results


ADASUM_TAG = 7


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Adasum of two tensors, with dot products in double precision.

        adasum(a, b) = (1 − a·b / 2‖a‖²) a + (1 − a·b / 2‖b‖²) b

    Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021.

    >>> combine(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor([1., 1.])
    >>> combine(torch.tensor([2.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([2., 0.])
    """
    a, b = first.double(), second.double()
    dot, a_norm, b_norm = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1.0 - dot / (2.0 * a_norm) if a_norm > 0 else torch.tensor(1.0, dtype=torch.float64)
    right = 1.0 - dot / (2.0 * b_norm) if b_norm > 0 else torch.tensor(1.0, dtype=torch.float64)
    return (left * a + right * b).to(first.dtype)


def adasum(team: Group, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Adasum of each tensor over all ranks, a power of two. Both ranks of a pair combine in the same order: equal bits.

    ```text
    round 1   0─1   2─3   4─5   6─7
    round 2   0───2   1───3   …
    round 3   0───────4   …
    ```
    """
    results = [tensor.clone() for tensor in tensors]
    distance = 1
    while distance < team.size:
        partner = team.rank ^ distance
        theirs = [torch.empty_like(result) for result in results]
        sent = [team.transport.send(result, partner, ADASUM_TAG) for result in results if result.numel()]
        received = [team.transport.recv(other, partner, ADASUM_TAG) for other in theirs if other.numel()]
        for handle in (*received, *sent):
            handle.wait()
        pairs = zip(results, theirs, strict=True)
        results = [combine(a, b) if team.rank < partner else combine(b, a) for a, b in pairs]
        distance *= 2
    return results
