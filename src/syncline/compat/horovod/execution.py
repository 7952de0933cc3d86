"""How operations are carried out once all ranks have asked for them: in one order, many small ones as one.

```text
what all have asked for   sum a │ max b │ broadcast c │ sum d
in groups                 sum (a d) │ max (b) │ broadcast (c)
one buffer a group        [ a │ d ]  →  reduced  →  a, d
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from syncline.collectives import NATIVE, build, run
from syncline.compat.horovod.messages import OperationPlan, OperationRequest
from syncline.compat.horovod.pending import PendingOperation
from syncline.transports import Op
from syncline.world import Group
from syncline.world.arrays import widen

__all__ = ["FusionGroup", "adasum", "combine", "execute", "fuse_plans", "row_offsets", "scale"]

WIRE_OPS = {"average": "sum", "sum": "sum", "min": "min", "max": "max", "product": "product"}


@dataclass
class FusionGroup:
    """Plans that are carried out as one."""

    plans: list[OperationPlan]
    key: tuple[Any, ...]
    nbytes: int = 0
    views: list[Tensor] = field(default_factory=list)
    flat: Tensor | None = None
    """The buffer that all parts lie in, kept for the next time."""


def fuse_plans(plans: Sequence[OperationPlan], most: int) -> list[FusionGroup]:
    """Plans of one kind together, up to `most` bytes; the same on every rank, for it depends on the plans alone."""
    groups: list[FusionGroup] = []
    open_groups: dict[tuple[Any, ...], FusionGroup] = {}
    for plan in plans:
        request = plan.request
        key = _key(request)
        nbytes = sum(_numel(part.shape) * part.dtype.itemsize for part in request.parts)
        found = open_groups.get(key) if key else None
        if found is None or found.nbytes + nbytes > most:
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
    """Do it, and give what each of the plans results in; None where this rank takes part in another's alone.

    No gradients are tracked: who calls this has switched that off.
    """
    request = group.plans[0].request
    if request.kind == "allreduce":
        if request.op == "adasum":
            return [_combined(team, plan, asked) for plan, asked in zip(group.plans, pending, strict=True)]
        return _reduced(team, group, pending, hierarchical)
    if request.kind == "broadcast":
        return _spread(team, group, pending)
    (asked,) = pending
    assert asked is not None, "only sums go without some ranks"
    (plan,) = group.plans
    if request.kind == "allgather":
        return [_gathered(team, plan, asked)]
    if request.kind == "alltoall":
        return [_traded(team, plan, asked)]
    if request.kind == "reducescatter":
        return [_scattered(team, plan, asked)]
    if request.kind == "barrier":
        run.meet(team.channel)
    return [None if asked.action is None else asked.action(plan)]


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place as Horovod does on a CPU: whole numbers by way of doubles, cut off towards zero."""
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
    """Where each rank's rows of a reduce-scatter begin: the first ranks have one more where they do not divide.

    >>> row_offsets(7, 3)
    [0, 3, 5, 7]
    """
    return [0, *accumulate(rows // size + (rank < rows % size) for rank in range(size))]


def _key(request: OperationRequest) -> tuple[Any, ...]:
    """What requests must share to go together; empty: each goes alone."""
    dtypes = {part.dtype for part in request.parts}
    if request.kind == "allreduce" and request.op != "adasum" and len(dtypes) == 1:
        return ("allreduce", request.op, *dtypes, request.before, request.after, request.device)
    if request.kind == "broadcast":
        return ("broadcast", request.root, request.device)
    return ()


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, strides included: a single element is contiguous with any stride, but then has no view as bytes."""
    found = tensor.contiguous()
    return found if found.numel() > 1 else found.clone(memory_format=torch.contiguous_format)


def _own(plan: OperationPlan, asked: PendingOperation | None, device: torch.device) -> list[Tensor]:
    """This rank's tensors; zeros after it has joined."""
    if asked is not None:
        return asked.inputs
    return [torch.zeros(part.shape, dtype=part.dtype, device=device) for part in plan.request.parts]


def _reduced(
    team: Group, group: FusionGroup, pending: Sequence[PendingOperation | None], hierarchical: bool
) -> list[Any]:
    request = group.plans[0].request
    device = team.world.device if request.device == "cuda" else torch.device("cpu")
    owned = [_own(plan, asked, device) for plan, asked in zip(group.plans, pending, strict=True)]
    inputs = [tensor for tensors in owned for tensor in tensors]
    if len(inputs) == 1 and pending[0] is not None and pending[0].outputs[0].is_contiguous():
        return _reduced_in_place(team, request, pending[0], hierarchical)
    if group.flat is None:
        total = sum(tensor.numel() for tensor in inputs)
        group.flat = torch.empty(total, dtype=inputs[0].dtype, device=device)
        sizes = [tensor.numel() for tensor in inputs]
        shapes = [tensor.shape for tensor in inputs]
        group.views = [piece.view(shape) for piece, shape in zip(torch.split(group.flat, sizes), shapes, strict=True)]
    torch._foreach_copy_(group.views, inputs)
    _reduce_flat(team, request, group.flat, hierarchical)
    return _handed_out(group, pending)


def _reduced_in_place(team: Group, request: OperationRequest, asked: PendingOperation, hierarchical: bool) -> list[Any]:
    """One tensor alone needs no buffer."""
    (own,), (output,) = asked.inputs, asked.outputs
    flat = output.view(-1)
    if flat.numel() < 2:
        flat = flat.as_strided(flat.shape, (1,))  # see _plain
    if own is not output:
        flat.copy_(own.reshape(-1))
    _reduce_flat(team, request, flat, hierarchical)
    return [asked.outputs]


def _reduce_flat(team: Group, request: OperationRequest, flat: Tensor, hierarchical: bool) -> None:
    scale(flat, request.before)
    sum_in_place(team, flat, cast("Op", WIRE_OPS[request.op]), hierarchical)
    scale(flat, request.after / team.size if request.op == "average" else request.after)


def _handed_out(group: FusionGroup, pending: Sequence[PendingOperation | None]) -> list[Any]:
    pieces: Iterator[Tensor] = iter(group.views)
    targets, sources, results = [], [], []
    for plan, asked in zip(group.plans, pending, strict=True):
        mine = [next(pieces) for _ in plan.request.parts]
        results.append(None if asked is None else asked.outputs)
        if asked is not None:
            targets += asked.outputs
            sources += mine
    if targets:
        torch._foreach_copy_(targets, sources)
    return results


def sum_in_place(team: Group, flat: Tensor, op: Op, hierarchical: bool = False) -> None:
    """Reduce a contiguous tensor over the team."""
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
        run.allreduce(team.channel, wide, op, build("allreduce", "hierarchical" if hierarchical else NATIVE))
    flat.copy_(narrow(wide).view(flat.shape))


def _combined(team: Group, plan: OperationPlan, asked: PendingOperation | None) -> Any:
    request = plan.request
    tensors = _own(plan, asked, torch.device("cpu"))
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for copy in copies:
        scale(copy, request.before)
    results = adasum(team, copies)
    for result in results:
        scale(result, request.after)
    if asked is None:
        return None
    for output, result in zip(asked.outputs, results, strict=True):
        output.copy_(result)
    return asked.outputs


def _spread(team: Group, group: FusionGroup, pending: Sequence[PendingOperation | None]) -> list[Any]:
    root = group.plans[0].request.root
    held = [asked for asked in pending if asked is not None]
    inputs = [tensor for asked in held for tensor in asked.inputs]
    pieces = [_plain(tensor).view(-1).view(torch.uint8) for tensor in inputs]
    flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
    native = team.transport.native
    if team.size > 1 and flat.numel():
        if native.available:
            native.broadcast(flat, root).wait()
        else:
            run.broadcast(team.channel, flat, root, build("broadcast", NATIVE))
    landed = iter(torch.split(flat, [piece.numel() for piece in pieces]))
    for asked in held:
        for output in asked.outputs:
            output.copy_(next(landed).clone().view(output.dtype).view(output.shape))
    return [None if asked is None else asked.outputs for asked in pending]


def _gathered(team: Group, plan: OperationPlan, asked: PendingOperation) -> list[Tensor]:
    results = []
    for index, tensor in enumerate(asked.inputs):
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        lengths = [row[index] for row in plan.rows]
        results.append(join_rows(team, _plain(rows), lengths))
    return results


def join_rows(team: Group, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """All ranks' rows, whose numbers are known, one after the other."""
    output = rows.new_empty(sum(lengths), *rows.shape[1:])
    native = team.transport.native
    if native.available and len(set(lengths)) == 1 and team.size > 1:
        if rows.numel():
            native.allgather(output.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8)).wait()
        return output
    parts = dict(enumerate(torch.split(output, list(lengths))))
    parts[team.rank].copy_(rows)
    if team.size > 1:
        run.exchange(team.channel, "allgather", parts, build("allgather", NATIVE).spec)
    return output


def _traded(team: Group, plan: OperationPlan, asked: PendingOperation) -> tuple[Tensor, Tensor]:
    (tensor,) = (_plain(tensor) for tensor in asked.inputs)
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
        run.exchange(team.channel, "alltoall", parts, build("alltoall", NATIVE).spec)
    return output, received


def _scattered(team: Group, plan: OperationPlan, asked: PendingOperation) -> list[Tensor]:
    request = plan.request
    results = []
    for tensor in asked.inputs:
        held = tensor.clone(memory_format=torch.contiguous_format)
        scale(held, request.before)
        edges = row_offsets(tensor.shape[0], team.size)
        if team.size > 1 and held.numel():
            wide, narrow = widen(held, "sum")
            row = wide[0].numel()
            schedule = build("reduce_scatter", NATIVE)
            run.reduce_scatter(team.channel, wide, [edge * row for edge in edges], "sum", schedule)
            part = narrow(wide[edges[team.rank] : edges[team.rank + 1]].clone())
        else:
            part = held[edges[team.rank] : edges[team.rank + 1]].clone()
        scale(part, request.after / team.size if request.op == "average" else request.after)
        results.append(part)
    return results


TAG = 7


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Of two tensors; the dot products are taken in double precision.

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
    """Of all ranks, a power of two; the same bits on every rank, for both of a pair combine in the order of ranks.

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
        sent = [team.transport.send(result, partner, TAG) for result in results if result.numel()]
        received = [team.transport.recv(other, partner, TAG) for other in theirs if other.numel()]
        for handle in (*received, *sent):
            handle.wait()
        pairs = zip(results, theirs, strict=True)
        results = [combine(a, b) if team.rank < partner else combine(b, a) for a, b in pairs]
        distance *= 2
    return results
