"""The operations of Horovod: synchronous, differentiable ones, and asynchronous ones with handles.

`allreduce_async(tensor)` returns a handle, and `synchronize(handle)` its result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline.compat.horovod.compression import Compression
from syncline.compat.horovod.context import Average, ProcessSet, ReduceOp, context, global_process_set
from syncline.compat.horovod.errors import UnsupportedAdasumError, UnsupportedReductionError
from syncline.compat.horovod.messages import DEVICES, DTYPES, OperationRequest, TensorInfo
from syncline.compat.horovod.pending import PendingOperation
from syncline.errors import IncompatibleError

POLL_SLEEP_S = 1e-4
"""Seconds that `poll` sleeps if the operation is not done, so that other threads can work."""
_OP_NAMES = {op: op.name.lower() for op in ReduceOp}
AVERAGE = "average"
AVERAGE_IS_OLD = "Parameter `average` has been replaced with `op` and will be removed in v1.0"
"""Horovod's text, by which scripts filter the warning."""


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """The reduction that the arguments name: `op`, or Horovod's old `average`; the average without either."""
    if average is not None:
        if op is not None:
            raise IncompatibleError(
                f"The op parameter supersedes average. Please provide only one of them: op={op}, average={average}"
            )
        warnings.warn(AVERAGE_IS_OLD, DeprecationWarning, stacklevel=3)
        return ReduceOp.Average if average else ReduceOp.Sum
    try:
        return ReduceOp.Average if op is None else ReduceOp(op)
    except ValueError:
        raise IncompatibleError(f"op={op!r} is none of hvd.{', hvd.'.join(ReduceOp.__members__)}") from None


class _Call(NamedTuple):
    """The arguments of a call, without its tensors."""

    kind: str
    name: str | None
    process_set: ProcessSet
    op: ReduceOp | None = None
    before: float = 1.0
    after: float = 1.0
    grouped: bool = False


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of a tensor. The tensor itself does not change."""
    call = _Call("allreduce", name, process_set, resolve_op(op, average), prescale_factor, postscale_factor)
    return _start_allreduce(call, [tensor])


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `allreduce_async`, in place."""
    if average is None:
        handle = _repeat_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)
        if handle is not None:
            return handle
    call = _Call("allreduce", name, process_set, resolve_op(op, average), prescale_factor, postscale_factor)
    return _start_allreduce(call, [tensor], in_place=True)


def _repeat_allreduce(
    tensor: Tensor, name: str | None, op: int | None, before: float, after: float, process_set: ProcessSet
) -> int | None:
    """Fast path for an allreduce in place that repeats the last request of this rank; None if it does not."""
    here = context(operation=True)
    engine = here.engine_of(process_set)
    if engine is None or name is None:
        return None
    known = engine.known(f"allreduce.{name}")
    if known is None or len(known.parts) != 1 or not isinstance(tensor, Tensor):
        return None
    (part,) = known.parts
    if (
        part.dtype is not tensor.dtype
        or part.shape != tensor.shape
        or known.op != (AVERAGE if op is None else _OP_NAMES.get(op))  # type: ignore[call-overload]
        or known.before != before
        or known.after != after
        or known.device != tensor.device.type
        or tensor.layout is not torch.strided
        or not tensor.is_contiguous()
    ):
        return None
    tensors = [tensor]
    pending = PendingOperation(here.world.runtime, known, tensors, tensors)
    pending.finish = _first
    engine.submit(pending)
    return here.add_handle(engine, pending)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of several tensors, all or none of them. The result is a tuple."""
    call = _Call(
        "allreduce", name, process_set, resolve_op(op, average), prescale_factor, postscale_factor, grouped=True
    )
    return _start_allreduce(call, tensors)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `grouped_allreduce_async`, in place."""
    call = _Call(
        "allreduce", name, process_set, resolve_op(op, average), prescale_factor, postscale_factor, grouped=True
    )
    return _start_allreduce(call, tensors, in_place=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start an allreduce of a sparse tensor, by an allgather. Call the returned function for the result."""
    chosen = resolve_op(op, None)
    if chosen not in (ReduceOp.Average, ReduceOp.Sum):
        raise IncompatibleError(f"sparse tensors are averaged or summed, not combined by {chosen.name}")
    if not isinstance(tensor, Tensor) or not tensor.is_sparse:
        raise IncompatibleError("sparse_allreduce_async takes a sparse COO tensor; for others there is allreduce_async")
    own = tensor.detach().coalesce()
    indices = own.indices().t().contiguous()
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    rows = allgather_async(indices, names[0], process_set)
    values = allgather_async(own.values(), names[1], process_set)

    def result() -> Tensor:
        gathered: Tensor = synchronize(values)
        places: Tensor = synchronize(rows)
        if chosen == ReduceOp.Average:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(places.t(), gathered.to(own.dtype), own.shape, check_invariants=False)

    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an allgather along the first dimension, which may differ between ranks."""
    return _start_allgather(_Call("allgather", name, process_set), [tensor])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `allgather_async` for several tensors, all or none of them."""
    return _start_allgather(_Call("allgather", name, process_set, grouped=True), tensors)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast of the root's tensor. The tensor itself does not change."""
    return _start_broadcast(_Call("broadcast", name, process_set), tensor, root_rank, in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `broadcast_async`, in place."""
    return _start_broadcast(_Call("broadcast", name, process_set), tensor, root_rank, in_place=True)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-to-all: `splits` is the number of rows for each rank; without it the parts are equal.

    The result is a pair: the rows received from all ranks, and the number received from each.
    """

    def check() -> _Operands:
        counts = _checked_splits(_dense(tensor), splits, process_set.size())
        dtype, device = (splits.dtype, splits.device) if isinstance(splits, Tensor) else (torch.int32, "cpu")
        return _Operands([tensor], splits=counts, finish=lambda found: (found[0], found[1].to(device, dtype)))

    return _submit(_Call("alltoall", name, process_set), check)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reduce-scatter. The first ranks have one row more if the rows do not divide evenly."""
    call = _Call("reducescatter", name, process_set, resolve_op(op, None), prescale_factor, postscale_factor)
    return _start_reducescatter(call, [tensor])


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `reducescatter_async` for several tensors, all or none of them."""
    call = _Call(
        "reducescatter", name, process_set, resolve_op(op, None), prescale_factor, postscale_factor, grouped=True
    )
    return _start_reducescatter(call, tensors)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it."""
    synchronize(_submit(_Call("barrier", None, process_set), _Operands))


def join(device: int = -1) -> int:
    """This rank has no more data: it contributes zeros to the sums of other ranks until all have joined.

    Returns the rank that joined last. Averages still divide by the number of all ranks. `device` has no effect.
    """
    handle = _submit(_Call("join", None, global_process_set), _Operands)
    here = context()
    here.handles[handle][0].flush()
    if len(here.optimizers) == 1:
        here.optimizers[0].join_rounds()
    else:
        runtime = here.world.runtime
        tasks = [runtime.spawn(each.join_rounds, name="hvd-joined") for each in here.optimizers]
        for task in tasks:
            task.join()
    return int(synchronize(handle))


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once."""
    here = context()
    found = here.handles.get(handle)
    if found is None:
        raise IncompatibleError(f"Handle {handle} was not created or has been cleared. Each is waited for once.")
    engine, pending = found
    if pending.done():
        return True
    engine.flush()
    here.world.runtime.sleep(POLL_SLEEP_S)
    return pending.done()


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle that was waited for before, as in Horovod."""
    found = context().handles.pop(handle, None)
    if found is None:
        return None
    engine, pending = found
    return engine.wait(pending)


def _first(found: Any) -> Any:
    return found[0]


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def _group_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Check that a group is a list of at least one tensor."""
    found = list(tensors) if isinstance(tensors, (list, tuple)) else None
    if not found:
        raise IncompatibleError(f"a group is a list of tensors, at least one; not {tensors!r:.60}")
    return found


def _checked_inputs(call: _Call, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Check the tensors of a call: dense, no bools in a reduction, and those of a group on one device."""
    inputs = _group_of(tensors) if call.grouped else tensors
    for tensor in inputs:
        if _dense(tensor).dtype == torch.bool and call.op is not None:
            raise IncompatibleError(f"Tensor type torch.bool is not supported by {call.kind}; cast it to uint8")
    devices = {str(tensor.device) for tensor in inputs} if call.grouped else ()
    if len(devices) > 1:
        raise IncompatibleError(f"Tensors in list must be on same device, not on {', '.join(sorted(devices))}")
    return inputs


def _dense(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise IncompatibleError(f"a tensor is needed, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise IncompatibleError(f"this tensor is {tensor.layout}: use sparse_allreduce_async, or tensor.to_dense()")
    if tensor.dtype not in DTYPES:
        raise IncompatibleError(f"Tensor type {tensor.dtype} is not supported.")
    if tensor.device.type not in DEVICES:
        raise IncompatibleError(
            f"Tensor type {tensor.dtype} on {tensor.device} is not supported: move it to a CPU or GPU"
        )
    return tensor


class _Operands(NamedTuple):
    """The tensors and arguments of an operation."""

    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    root: int = -1
    splits: tuple[int, ...] = ()
    finish: Callable[[Any], Any] | None = None


def _start_allreduce(call: _Call, tensors: Sequence[Tensor], in_place: bool = False) -> int:
    def check() -> _Operands:
        inputs = _checked_inputs(call, tensors)
        if call.op == ReduceOp.Adasum:
            check_adasum(call.process_set)
            if not all(tensor.dtype.is_floating_point for tensor in inputs):
                raise IncompatibleError("Adasum combines floating-point tensors")
        outputs = [_check_no_overlap(tensor) if in_place else _like(tensor) for tensor in inputs]
        return _Operands(inputs, outputs, finish=tuple if call.grouped else _first)

    return _submit(call, check)


def _start_allgather(call: _Call, tensors: Sequence[Tensor]) -> int:
    def check() -> _Operands:
        return _Operands(_checked_inputs(call, tensors), finish=tuple if call.grouped else _first)

    return _submit(call, check)


def _start_broadcast(call: _Call, tensor: Tensor, root: int, in_place: bool) -> int:
    def check() -> _Operands:
        ranks = call.process_set.ranks
        if root not in ranks:
            raise IncompatibleError(f"root_rank={root} is not among the ranks {ranks} of this process set")
        output = _check_no_overlap(_dense(tensor)) if in_place else _like(_dense(tensor))
        return _Operands([tensor], [output], root=ranks.index(root), finish=_first)

    return _submit(call, check)


def _start_reducescatter(call: _Call, tensors: Sequence[Tensor]) -> int:
    def check() -> _Operands:
        if call.op not in (ReduceOp.Average, ReduceOp.Sum):
            raise UnsupportedReductionError(
                f"Reducescatter currently only supports AVERAGE and SUM: it averages or sums, and does not take "
                f"op={'None' if call.op is None else call.op.name}"
            )
        inputs = _checked_inputs(call, tensors)
        if any(tensor.dim() == 0 for tensor in inputs):
            raise IncompatibleError("reducescatter needs a first dimension to share out; this tensor has none")
        return _Operands(inputs, finish=tuple if call.grouped else _first)

    return _submit(call, check)


def _submit(call: _Call, check: Callable[[], _Operands]) -> int:
    """Request the operation with the operands that `check` returns. If `check` raises, other ranks are informed."""
    here = context(operation=True)
    engine = here.engine(call.process_set)
    family = f"grouped_{call.kind}" if call.grouped else call.kind  # those of different families can have equal names
    name = engine.unnamed(family) if call.name is None else f"{family}.{call.name}"
    try:
        tensors, outputs, root, splits, finish = check()
    except Exception as refusal:
        engine.refuse(OperationRequest(call.kind, name, refusal=str(refusal)))
        raise
    op = "none" if call.op is None else _OP_NAMES[call.op]
    device = tensors[0].device.type if tensors else "cpu"
    known = engine.known(name)
    if (
        known is not None
        and (known.op, known.root, known.splits) == (op, root, splits)
        and (known.before, known.after, known.device) == (call.before, call.after, device)
        and len(known.parts) == len(tensors)
        and all(p.dtype is t.dtype and p.shape == t.shape for p, t in zip(known.parts, tensors, strict=True))
    ):
        request = known
    else:
        parts = tuple([TensorInfo(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
        request = OperationRequest(call.kind, name, parts, op, root, call.before, call.after, device, splits)
    pending = PendingOperation(here.world.runtime, request, list(tensors), list(outputs))
    if call.kind == "join":
        pending.action = lambda plan: plan.rows[0][0]
    pending.finish = finish
    engine.submit(pending)
    return here.add_handle(engine, pending)


def check_adasum(process_set: ProcessSet) -> None:
    """Raise if the number of ranks is not a power of two."""
    size = process_set.size()
    if size & (size - 1):
        raise UnsupportedAdasumError(f"Adasum combines pairs of ranks: it needs a power of two of them, not {size}")


def _check_no_overlap(tensor: Tensor) -> Tensor:
    """Check that a tensor can be written in place: its elements must not overlap in memory."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise IncompatibleError(
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} cannot be changed in place: "
            "its elements overlap in memory; clone() it"
        )
    return tensor


def _checked_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """The number of rows for each rank. Rows beyond the sum are not sent."""
    if tensor.dim() == 0:
        raise IncompatibleError("alltoall needs a first dimension to share out; this tensor has none")
    rows = tensor.shape[0]
    if isinstance(splits, Tensor) and splits.dim() > 1:
        raise IncompatibleError(f"alltoall expects a 1D splits tensor, not one of shape {list(splits.shape)}")
    counts = [] if splits is None else [int(count) for count in splits]
    if not counts:
        if rows % size:
            raise IncompatibleError(f"alltoall: {rows} rows do not divide among {size} ranks; give splits")
        return (rows // size,) * size
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise IncompatibleError(
            f"alltoall: splits {counts} must be {size} numbers, none negative, that add up to at most {rows} rows"
        )
    return tuple(counts)


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
    """Allreduce of a tensor: the average, or another `op`. Differentiable.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def mean(world):
    ...     hvd.init()
    ...     return hvd.allreduce(torch.tensor([float(hvd.rank())]), name="x").item()
    >>> sl.simulate(mean, ranks=3).results
    (1.0, 1.0, 1.0)
    """
    call = _Call("allreduce", name, process_set, resolve_op(op, average), prescale_factor, postscale_factor)
    return _apply_compressed(_Allreduce, call, [tensor], compression)[0]


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
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
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
    """Allreduce of several tensors, all or none of them. Differentiable."""
    call = _Call(
        "allreduce", name, process_set, resolve_op(op, average), prescale_factor, postscale_factor, grouped=True
    )
    return _apply_compressed(_Allreduce, call, tensors, compression)


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
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: tuple[Tensor, ...] = synchronize(handle)
    return result


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Allgather along the first dimension, which may differ between ranks. Differentiable."""
    (result,) = _Allgather.apply(_Call("allgather", name, process_set), tensor)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """As `allgather` for several tensors, all or none of them. Differentiable."""
    call = _Call("allgather", name, process_set, grouped=True)
    return tuple(_Allgather.apply(call, *_group_of(tensors)))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, on every rank. Differentiable."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, in place."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """All-to-all: `splits` is the number of rows for each rank; without it the parts are equal. Differentiable.

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
    """Reduce-scatter. The first ranks have one row more if the rows do not divide evenly. Differentiable."""
    call = _Call("reducescatter", name, process_set, resolve_op(op, None), prescale_factor, postscale_factor)
    return _apply_compressed(_Reducescatter, call, [tensor], compression)[0]


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
    call = _Call(
        "reducescatter", name, process_set, resolve_op(op, None), prescale_factor, postscale_factor, grouped=True
    )
    return _apply_compressed(_Reducescatter, call, tensors, compression)


def _apply_compressed(function: Any, call: _Call, tensors: Sequence[Tensor], compression: Any) -> list[Tensor]:
    packed = [compression.compress(tensor) for tensor in (_group_of(tensors) if call.grouped else tensors)]
    results = function.apply(call, *(tensor for tensor, _ in packed))
    return [compression.decompress(result, meta) for result, (_, meta) in zip(results, packed, strict=True)]


def _results(call: _Call, handle: int) -> tuple[Tensor, ...]:
    found = synchronize(handle)
    return tuple(found) if call.grouped else (found,)


# The gradients are those of Horovod. Each backward uses the functions above, so that it can be differentiated too.


class _Allreduce(torch.autograd.Function):
    """The gradient is reduced as the tensors were."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return _results(call, _start_allreduce(call, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_Allreduce.apply(ctx.call._replace(name=None), *gradients)  # type: ignore[no-untyped-call]


class _Allgather(torch.autograd.Function):
    """The gradient of a rank's rows is the average over the ranks of the gradients of these rows."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        results = _results(call, _start_allgather(call, tensors))
        ctx.members = call.process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own = torch.tensor([[shape[0] if shape else 1 for shape in ctx.shapes]])
        lengths = synchronize(allgather_async(own, None, ctx.members))
        averaged = grouped_allreduce(gradients, op=Average, process_set=ctx.members)
        rank = ctx.members.rank()
        parts = []
        for index, (gradient, shape) in enumerate(zip(averaged, ctx.shapes, strict=True)):
            start = int(lengths[:rank, index].sum())
            parts.append(gradient.narrow(0, start, int(lengths[rank, index])).reshape(shape))
        return None, *parts


class _Broadcast(torch.autograd.Function):
    """The root gets the average of the gradients, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, members: ProcessSet) -> Any:
        ctx.root, ctx.members = root, members
        return synchronize(broadcast_async(tensor, root, name, members))

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
        output, received = synchronize(alltoall_async(tensor, splits, name, members))
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
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return _results(call, _start_reducescatter(call, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call = ctx.call
        factor = call.before * call.after * (1 if call.op == Average else call.process_set.size())
        scaled = [gradient * factor for gradient in gradients]
        return None, *grouped_allgather(scaled, process_set=call.process_set)
