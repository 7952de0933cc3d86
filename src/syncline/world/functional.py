"""The collectives as functions: `sl.allreduce(x, op)` and the others, on any array, in the current world or a group."""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from syncline.collectives import NATIVE, build, channel
from syncline.collectives.executor import chunk_edges
from syncline.costs import AUTO
from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SpecError, SynclineError, WorldError
from syncline.specs import nearest
from syncline.state_trees import pack, unpack
from syncline.transports import Handle, Op, Transport
from syncline.transports.base import COMPARISON_TAGS, LANE_TAGS, format_bytes, group_ranks_by_text
from syncline.world.arrays import import_array, import_dlpack, widen
from syncline.world.elastic import RepeatedCall, SingleCall
from syncline.world.group import Group, Pending
from syncline.world.world import current_world

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_from",
    "broadcast_object",
    "compare_calls",
    "gather",
    "recv",
    "reduce_scatter",
    "send",
]

SAME_ON_ALL_RANKS = ("allreduce", "allgather", "broadcast", "barrier")
"""Collectives whose result is the same on all ranks."""
DESCRIPTION_BYTES = 256
"""Size of a description in bytes."""
DESCRIPTION_TAG, DIFFERENCE_TAG = COMPARISON_TAGS, COMPARISON_TAGS + 1


def compare_calls(group: Group, call: str) -> None:
    """Compare the ranks' next collective before it runs: the first ones of each kind, or all with `check=True`.

    Raises on every rank if one of them describes its call differently::

        rank 0    ◄── description ── rank 1, rank 2, …    with tags of their own: a rank that does not compare, and
                  ── difference ───► rank 1, rank 2, …    enters its collective, cannot receive them by mistake
    """
    number, transport = group.next_call(), group.transport
    if not group.world.check and (transport.monitor.compare_call(number, call) or not group.is_new(call)):
        return
    text = f"#{number} {call}"
    transport.monitor.enter(f"the comparison of {text}")
    try:
        differ = _compare_at_root(group, text) if group.rank == 0 else _compare_at_rank(transport, text)
    except PeerLostError as error:
        message = f"{error}; it was to compare {text}"
        raise PeerLostError(message, peer=error.peer, pending=text, seconds=error.seconds) from error
    if differ:
        raise IncompatibleError(f"the ranks disagree about their next collective: {differ}")


def _compare_at_root(group: Group, text: str) -> str:
    """Receive the other ranks' descriptions, and send them the difference."""
    transport = group.transport
    table = torch.zeros(transport.size, DESCRIPTION_BYTES, dtype=torch.uint8)
    table[0] = _encode_text(text)
    handles = [transport.recv(table[rank], rank, DESCRIPTION_TAG, exact=True) for rank in range(1, transport.size)]
    for handle in handles:
        handle.wait()
    calls = {rank: _decode_text(row) for rank, row in zip(group.ranks, table, strict=True)}
    differ = group_ranks_by_text(calls) if len(set(calls.values())) > 1 else ""
    data = bytearray(differ.encode())
    buffers = [torch.tensor([len(data)])]
    if data:
        buffers.append(torch.frombuffer(data, dtype=torch.uint8))
    for buffer in buffers:
        sent = [transport.send(buffer, rank, DIFFERENCE_TAG, exact=True) for rank in range(1, transport.size)]
        for handle in sent:
            handle.wait()
    return differ


def _compare_at_rank(transport: Transport, text: str) -> str:
    """Send this rank's description, and receive the difference."""
    length = torch.zeros(1, dtype=torch.int64)
    received = transport.recv(length, 0, DIFFERENCE_TAG, exact=True)
    transport.send(_encode_text(text), 0, DESCRIPTION_TAG, exact=True).wait()
    received.wait()
    if not length.item():
        return ""
    words = torch.empty(int(length), dtype=torch.uint8)
    transport.recv(words, 0, DIFFERENCE_TAG, exact=True).wait()
    return bytes(words.tolist()).decode(errors="replace")


def _encode_text(text: str) -> torch.Tensor:
    data = text.encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode_text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")


Reduction = Literal["mean", "sum", "min", "max", "product"]
REDUCTIONS = ("mean", "sum", "min", "max", "product")


def allreduce(
    x: Any, op: Reduction | None = None, algorithm: str = NATIVE, group: Group | None = None, async_: bool = False
) -> Any:
    """Reduce `x` over all ranks; every rank gets the same bits. `x` itself does not change.

    `op` is "mean", "sum", "min", "max" or "product". `algorithm` is "native" (the engine's own), "auto" (predicted for
    this network and size, then measured in the first calls) or a schedule: "ring", "double_tree(chunks=16)", …
    With `async_` a `Pending` is returned at once, and its `wait()` returns the result.

    >>> import torch, syncline as sl
    >>> sl.simulate(lambda world: sl.allreduce(torch.tensor([world.rank + 1.0]), "mean"), ranks=3).results[2]
    tensor([2.])
    """
    comm, op = _resolve_group(group), op or _default_op("allreduce")
    with _share_errors(comm, "allreduce"):
        tensor, back = import_array(x)
        schedule = None if algorithm in (NATIVE, AUTO) else build("allreduce", algorithm)
        wire_op = _wire_op(op, tensor.dtype)
        wide, narrow = widen(tensor, wire_op)
    describe = f"allreduce({_describe_tensor(tensor)}, {op}, {algorithm})"

    def work() -> Any:
        native = comm.transport.native
        data = wide if comm.world.elastic is None else wide.clone()  # an interrupted call is repeated
        if algorithm == AUTO:
            comm.auto.allreduce(data, wire_op)
        elif schedule is None and native.reduces(data.dtype, wire_op):
            native.allreduce(data, wire_op).wait()
        else:
            channel.allreduce(comm.channel, data, wire_op, schedule or build("allreduce", NATIVE))
        if op == "mean":
            data.div_(comm.size)
        return back(narrow(data).reshape(tensor.shape))

    return _run_counted(comm, "allreduce", tensor, describe, work, async_)


def broadcast(x: Any, root: int = 0, algorithm: str = NATIVE, group: Group | None = None, async_: bool = False) -> Any:
    """Return the root's `x` on every rank. The others pass an `x` of the same shape and dtype.

    >>> import torch, syncline as sl
    >>> sl.simulate(lambda world: sl.broadcast(torch.tensor([world.rank]), root=1), ranks=3).results
    (tensor([1]), tensor([1]), tensor([1]))
    """
    return broadcast_from(x, root, algorithm, group, async_)


def broadcast_from(
    x: Any,
    root: int = 0,
    algorithm: str = NATIVE,
    group: Group | None = None,
    async_: bool = False,
    *,
    replaceable: bool = False,
) -> Any:
    """Like `broadcast`. `replaceable`: if the root is lost, rank 0 of the next team is as good a source."""
    comm = _resolve_group(group)
    with _share_errors(comm, "broadcast"):
        _check_root(root, comm)
        tensor, back = import_array(x)
        copy = _contiguous_copy(tensor)
        flat = copy.reshape(-1).view(torch.uint8)
        schedule = None if algorithm == NATIVE else build("broadcast", algorithm)
        source = comm.transport.members[root]
    describe = f"broadcast({_describe_tensor(tensor)}, root {root}, {algorithm})"

    def work() -> Any:
        native, members = comm.transport.native, comm.transport.members
        if source not in members and not replaceable:
            raise WorldError(
                f"rank {root} (member {source}) was lost before it had sent its value to all by {describe}"
            )
        present = members.index(source) if source in members else 0  # the team may have changed since the call
        if schedule is None and native.available:
            if flat.numel():
                native.broadcast(flat, present).wait()
        else:
            channel.broadcast(comm.channel, flat, present, schedule or build("broadcast", NATIVE))
        if comm.world.elastic is not None:  # no rank completes it before all have the value
            _barrier(comm)
        return back(copy)

    return _run_counted(comm, "broadcast", flat, describe, work, async_)


def allgather(x: Any, algorithm: str = NATIVE, group: Group | None = None, async_: bool = False) -> Any:
    """Concatenate the `x` of all ranks along the first dimension, which may differ between them.

    >>> import torch, syncline as sl
    >>> sl.simulate(lambda world: sl.allgather(torch.full((world.rank,), world.rank)), ranks=3).results[0]
    tensor([1, 2, 2])
    """
    return _gather(x, None, algorithm, group, async_)


def gather(x: Any, root: int = 0, algorithm: str = NATIVE, group: Group | None = None, async_: bool = False) -> Any:
    """Like `allgather`, but only the root gets the result; the others get None.

    >>> import torch, syncline as sl
    >>> sl.simulate(lambda world: sl.gather(torch.tensor([world.rank])), ranks=3).results
    (tensor([0, 1, 2]), None, None)
    """
    return _gather(x, root, algorithm, group, async_)


def reduce_scatter(
    x: Any, op: Reduction | None = None, algorithm: str = NATIVE, group: Group | None = None, async_: bool = False
) -> Any:
    """Reduce `x` over all ranks; each rank gets its part of the first dimension.

    Rank i gets rows ⌊i·n/p⌋ to ⌊(i+1)·n/p⌋ of the n: parts differ by one row at most.

    >>> import torch, syncline as sl
    >>> sl.simulate(lambda world: sl.reduce_scatter(torch.arange(4.0), op="sum"), ranks=2).results
    (tensor([0., 2.]), tensor([4., 6.]))
    """
    comm, op = _resolve_group(group), op or _default_op("reduce_scatter")
    with _share_errors(comm, "reduce_scatter"):
        tensor, back = import_array(x)
        if tensor.dim() == 0:
            raise IncompatibleError("reduce_scatter needs a first dimension to share out; this array has none")
        schedule = None if algorithm == NATIVE else build("reduce_scatter", algorithm)
        wire_op = _wire_op(op, tensor.dtype)
        wide, narrow = widen(tensor, wire_op)
    rows = chunk_edges(tensor.shape[0], comm.size)
    describe = f"reduce_scatter({_describe_tensor(tensor)}, {op}, {algorithm})"

    def work() -> Any:
        native = comm.transport.native
        even = tensor.shape[0] % comm.size == 0 and wide.numel() > 0
        if schedule is None and even and native.reduces(wide.dtype, wire_op):
            part = wide.new_empty(wide.shape[0] // comm.size, *wide.shape[1:])
            native.reduce_scatter(part, wide, wire_op).wait()
        else:
            row = wide[0].numel() if len(wide) else 0
            edges = [edge * row for edge in rows]
            channel.reduce_scatter(comm.channel, wide, edges, wire_op, schedule or build("reduce_scatter", NATIVE))
            part = wide[rows[comm.rank] : rows[comm.rank + 1]].clone()
        if op == "mean":
            part.div_(comm.size)
        return back(narrow(part))

    return _run_counted(comm, "reduce_scatter", tensor, describe, work, async_)


def alltoall(
    x: Any,
    splits: Sequence[int] | None = None,
    algorithm: str = NATIVE,
    group: Group | None = None,
    async_: bool = False,
) -> Any:
    """Send the i-th part of the first dimension to rank i; return the parts from all ranks, in rank order.

    `splits` has the number of rows for each rank; without it the parts are equal.

    >>> import torch, syncline as sl
    >>> sl.simulate(lambda world: sl.alltoall(torch.arange(2) + 10 * world.rank), ranks=2).results
    (tensor([ 0, 10]), tensor([ 1, 11]))
    """
    comm = _resolve_group(group)
    with _share_errors(comm, "alltoall"):
        tensor, back = import_array(x)
        counts = _splits(tensor, splits, comm.size)
        copy = _contiguous_copy(tensor)
        schedule_name = build("alltoall", algorithm).spec
    describe = f"alltoall({_describe_rows(tensor)}, {algorithm})"

    def work() -> Any:
        native = comm.transport.native
        incoming = _exchange_counts(comm, counts, schedule_name)
        output = copy.new_empty(sum(incoming), *copy.shape[1:])
        row_bytes = math.prod(copy.shape[1:]) * copy.element_size()
        if algorithm == NATIVE and native.available and row_bytes:
            native.alltoall(
                output.reshape(-1).view(torch.uint8),
                copy.reshape(-1).view(torch.uint8),
                [count * row_bytes for count in incoming],
                [count * row_bytes for count in counts],
            ).wait()
        else:
            _move_parts(comm, torch.split(copy, counts), torch.split(output, incoming), schedule_name)
        return back(output)

    return _run_counted(comm, "alltoall", copy, describe, work, async_)


def send(x: Any, to: int, tag: int = 0, group: Group | None = None) -> None:
    """Send an array to one rank, which calls `recv`. Returns when `x` may change again.

    >>> import torch, syncline as sl
    >>> def ping(world):
    ...     ball = torch.zeros(1)
    ...     if world.rank == 0:
    ...         sl.send(torch.ones(1), to=1)
    ...     else:
    ...         sl.recv(ball, source=0)
    ...     return ball
    >>> sl.simulate(ping, ranks=2).results[1]
    tensor([1.])
    """
    comm = _resolve_group(group)
    tensor, _ = import_array(x)
    comm.transport.send(tensor.resolve_conj().resolve_neg().contiguous(), to, _check_tag(tag)).wait()
    comm.world.events.count("sl_comm_bytes_logical", tensor.numel() * tensor.element_size())


def recv(x: Any, source: int | None = None, tag: int = 0, group: Group | None = None) -> int:
    """Receive into `x`, a tensor or a writable NumPy array, from `source` or from any rank. Returns the sender's rank.

    The message must have exactly as many bytes as `x`; otherwise a `ProtocolError` is raised.
    """
    comm = _resolve_group(group)
    target = x.detach() if isinstance(x, Tensor) else import_dlpack(x) if hasattr(x, "__dlpack__") else None
    if target is None or (isinstance(x, np.ndarray) and not x.flags.writeable):
        kind = type(x).__name__ if target is None else "a read-only one"
        raise IncompatibleError(f"recv fills a tensor or a writable array, not {kind}")
    buffer = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    handle: Handle = comm.transport.recv(buffer, source, _check_tag(tag))
    handle.wait()
    expected = buffer.numel() * buffer.element_size()
    if handle.nbytes != expected:
        raise ProtocolError(
            f"rank {handle.source} sent {format_bytes(handle.nbytes)} (tag {tag}) where "
            f"{format_bytes(expected)} were expected",
            peer=handle.source,
        )
    if buffer is not target:
        target.copy_(buffer)
    return handle.source


def barrier(group: Group | None = None) -> None:
    """Wait until every rank of the group has called it.

    >>> import syncline as sl
    >>> sl.simulate(lambda world: sl.barrier(), ranks=3).results
    (None, None, None)
    """
    comm = _resolve_group(group)

    def work() -> None:
        compare_calls(comm, "barrier()")
        _barrier(comm)

    _call(comm, "barrier()", work, async_=False)


def _barrier(group: Group) -> None:
    native = group.transport.native
    if native.available:
        native.barrier().wait()
    else:
        channel.barrier(group.channel)


def _gather(x: Any, root: int | None, algorithm: str, group: Group | None, async_: bool) -> Any:
    comm = _resolve_group(group)
    operation: Literal["allgather", "gather"] = "allgather" if root is None else "gather"
    with _share_errors(comm, operation):
        if root is not None:
            _check_root(root, comm)
        tensor, back = import_array(x)
        rows = _contiguous_copy(tensor.reshape(1) if tensor.dim() == 0 else tensor)
        schedule_name = build(operation, algorithm).spec
    describe = f"{operation}({_describe_rows(rows)}, {algorithm}{'' if root is None else f', root {root}'})"

    def work() -> Any:
        lengths = _exchange_lengths(comm, rows, operation)
        native = comm.transport.native
        everywhere = root is None or root == comm.rank
        output = rows.new_empty(sum(lengths) if everywhere else 0, *rows.shape[1:])
        if algorithm == NATIVE and root is None and native.available and len(set(lengths)) == 1:
            if rows.numel():
                native.allgather(output.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8)).wait()
            return back(output)
        if everywhere:
            parts = dict(enumerate(torch.split(output, lengths)))
            parts[comm.rank].copy_(rows)
        else:
            parts = {comm.rank: rows}
        channel.move_pieces(comm.channel, operation, parts, schedule_name, root or 0)
        return back(output) if everywhere else None

    return _run_counted(comm, operation, rows, describe, work, async_)


def _run_counted(group: Group, name: str, tensor: Tensor, describe: str, work: Callable[[], Any], async_: bool) -> Any:
    """Compare the ranks' calls, run one collective, and record its bytes and seconds."""
    events = group.world.events
    events.count("sl_comm_bytes_logical", tensor.numel() * tensor.element_size())

    def timed() -> Any:
        with events.span("sl_comm_seconds", call=name):
            compare_calls(group, describe)
            return work()

    return _call(group, describe, timed, async_)


def _call(group: Group, describe: str, work: Callable[[], Any], async_: bool) -> Any:
    """Run one collective. In an elastic world it runs at once, and is repeated if a worker is lost meanwhile."""
    world = group.world
    if world.elastic is None:
        return group.call(describe, work, async_)

    def attempt() -> Any:
        return group.call(describe, work, async_=False)

    repeated = describe.startswith(SAME_ON_ALL_RANKS)
    value = world.elastic.run(world, RepeatedCall(attempt) if repeated else SingleCall(attempt, describe))
    if not async_:
        return value
    pending: Pending[Any] = Pending(world.runtime, describe, group.transport.timeout)
    pending.settle(lambda: value)
    return pending


def _exchange_lengths(group: Group, rows: Tensor, operation: str) -> list[int]:
    """The first dimension of every rank. Any other difference raises an error on every rank."""
    mine = torch.tensor([len(rows), zlib.crc32(_describe_rows(rows).encode())])
    table = torch.zeros(group.size, 2, dtype=torch.int64)
    table[group.rank] = mine
    native = group.transport.native
    if native.available:
        native.allgather(table, mine).wait()
    else:
        channel.move_pieces(group.channel, "allgather", dict(enumerate(table)), "ring")
    lengths, checksums = table.t().tolist()
    different = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
    if different:
        raise IncompatibleError(
            f"{operation} joins arrays that differ in the first dimension only: rank {group.rank} has "
            f"{_describe_tensor(rows)}, and ranks {different} differ from rank 0 in dtype or the other dimensions"
        )
    return [int(length) for length in lengths]


def _exchange_counts(group: Group, counts: Sequence[int], algorithm: str) -> list[int]:
    outgoing = torch.tensor(list(counts), dtype=torch.int64)
    incoming = torch.zeros_like(outgoing)
    _move_parts(group, torch.split(outgoing, 1), torch.split(incoming, 1), algorithm)
    return [int(count) for count in incoming]


def _move_parts(group: Group, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], algorithm: str) -> None:
    rank, size = group.rank, group.size
    incoming[rank].copy_(outgoing[rank])
    parts = {rank * size + to: outgoing[to] for to in range(size) if to != rank}
    parts |= {source * size + rank: incoming[source] for source in range(size) if source != rank}
    channel.move_pieces(group.channel, "alltoall", parts, algorithm)


def _splits(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    if tensor.dim() == 0:
        raise IncompatibleError("alltoall needs a first dimension to share out; this array has none")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise IncompatibleError(f"alltoall: {rows} rows do not divide among {size} ranks; give splits=")
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or any(count < 0 for count in counts) or sum(counts) != rows:
        raise IncompatibleError(
            f"alltoall: splits={counts} must be {size} numbers, none negative, that add up to {rows} rows"
        )
    return counts


OTHER_REDUCTION_NAMES = {
    **dict.fromkeys(("avg", "average"), "mean"),
    "add": "sum",
    **dict.fromkeys(("prod", "mul", "multiply"), "product"),
    "maximum": "max",
    "minimum": "min",
}
"""Other names of the reductions, each with our name."""


def _default_op(function: str) -> Reduction:
    warnings.warn(
        f"sl.{function} without op takes the mean; torch and MPI take the sum: write op='mean' or op='sum'",
        DeprecationWarning,
        stacklevel=3,
    )
    return "mean"


def _wire_op(op: str, dtype: torch.dtype) -> Op:
    if op not in REDUCTIONS:
        raise SpecError(f"unknown reduction {op!r}; {nearest(str(op), list(REDUCTIONS), OTHER_REDUCTION_NAMES)}")
    if op == "mean":
        if not (dtype.is_floating_point or dtype.is_complex):
            raise IncompatibleError(f"the mean of {dtype} is not {dtype}: use op='sum', or a floating-point dtype")
        return "sum"
    return cast("Op", op)


def _resolve_group(group: Group | None) -> Group:
    if group is None:
        return current_world().everyone
    if not isinstance(group, Group):
        raise IncompatibleError(f"group= takes a group, made by world.group(ranks), not {type(group).__name__}")
    return group


@contextmanager
def _share_errors(group: Group, name: str) -> Iterator[None]:
    """With `check`, send an error that one rank raises before the call to the others, which would wait for it."""
    try:
        yield
    except SynclineError as error:
        if group.world.check:
            refusal = f"{name}(refused on this rank: {error})"
            group.call(name, lambda: compare_calls(group, refusal), async_=False)
        raise


def _check_tag(tag: int) -> int:
    if not 0 <= tag < LANE_TAGS:
        raise IncompatibleError(f"tag={tag} is not between 0 and {LANE_TAGS - 1}")
    return tag


def _check_root(root: int, group: Group) -> None:
    if not 0 <= root < group.size:
        raise IncompatibleError(f"root={root} is not a rank of a group of {group.size}")


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _describe_rows(tensor: Tensor) -> str:
    shape = ", ".join(map(str, tensor.shape[1:]))
    return f"{str(tensor.dtype).removeprefix('torch.')}[:{', ' + shape if shape else ''}]"


def broadcast_object(value: Any = None, root: int = 0, group: Group | None = None) -> Any:
    """Give every rank the root's `value`: a tree of dicts, lists, tuples and sets with plain values and tensors.

    Strings, bytes, numbers, None, tensors and NumPy arrays may be in it. The values of the other ranks are ignored.
    Every rank gets a tree of its own, the root too. Subclasses of dict and tuple arrive as dict and tuple, NumPy's
    numbers as Python's, and tensors on a GPU arrive on the device of the receiving rank.

    >>> import torch, syncline as sl
    >>> def settings(world):
    ...     return sl.broadcast_object({"rate": 0.1, "order": torch.tensor([2, 0, 1])} if world.rank == 0 else None)
    >>> sl.simulate(settings, ranks=2).results[1]
    {'rate': 0.1, 'order': tensor([2, 0, 1])}
    """
    comm = _resolve_group(group)
    text, buffer = b"", torch.zeros(0, dtype=torch.uint8)
    if comm.rank == root:
        try:
            text, buffer = pack(value, "value")
        except (IncompatibleError, ValueError) as error:  # sent to all ranks, because they wait for the tree
            digits = "" if isinstance(error, IncompatibleError) else "a number has too many digits to be sent: "
            text = json.dumps({"refused": f"{digits}{error}"}).encode()
    lengths = broadcast(torch.tensor([len(text), buffer.numel()]), root, group=comm).tolist()
    padded = torch.frombuffer(bytearray(text.ljust(lengths[0], b"\0")), dtype=torch.uint8)
    document = broadcast(padded, root, group=comm).numpy().tobytes()
    refused = json.loads(document).get("refused")
    if refused:
        raise IncompatibleError(refused)
    if lengths[1]:  # through the CPU: it is rare, and ranks may share a GPU
        buffer = broadcast(buffer if comm.rank == root else buffer.new_zeros(lengths[1]), root, group=comm)
    return unpack(document, buffer, f"the object of rank {comm.ranks[root]}", comm.world.device)
