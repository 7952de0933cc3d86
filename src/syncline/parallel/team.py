"""Workers that divide a layer, and the collectives inside its forward and backward passes.

```text
                     forward                     backward
copy_to_team         x                           Σ dy           before a layer that is split by outputs
sum_over_team        Σ x                         dy             after a layer that is split by inputs
gather               x₀ x₁ … along a dimension   own part       before a layer that every worker computes
take_own_part        own part                    dy₀ dy₁ …      its counterpart
gather_and_reduce    x₀ x₁ …                     own part of Σ  sequence parallelism: instead of copy_to_team
reduce_own_part      own part of Σ x             dy₀ dy₁ …      sequence parallelism: instead of sum_over_team
exchange             rows for each worker        the way back   experts
```

Every worker of a team calls them in the same order, in backward too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Function

from syncline.collectives import AUTO, NATIVE, build, channel
from syncline.collectives.executor import chunk_edges
from syncline.reduction import Stats
from syncline.transports import Handle, NativeCollectives, Op
from syncline.world import Group, broadcast_from
from syncline.world.arrays import widen
from syncline.world.functional import compare_calls

__all__ = [
    "LayerTeam",
    "PendingSwap",
    "copy_to_team",
    "exchange",
    "gather",
    "gather_and_reduce",
    "reduce_own_part",
    "sum_over_team",
    "take_own_part",
]


class LayerTeam:
    """The workers that divide one layer, or all layers of a kind. A copy of a model shares the team of the original."""

    def __init__(self, group: Group, algorithm: str = NATIVE) -> None:
        """`algorithm`: the all-reduce of sums. With "native" and "auto" all collectives are the engine's own."""
        self.group = group
        self._algorithm = NATIVE if algorithm == AUTO else algorithm
        self.rank, self.size = (group.rank, group.size) if group.member else (0, 1)
        self.divided = True
        """False while every worker has the whole model: layers then compute without the others."""
        self.stats: Stats | None = None
        """The statistics of the run, which count bytes and waits."""
        self.calls: Counter[str] = Counter()
        """The number of collectives so far, by kind."""
        self.sent_bytes = 0
        """The logical bytes of this worker's tensors in them: what a reduction reduces, and what others receive."""
        self.in_backward: Callable[[], None] | None = None
        """Called before a collective of a backward pass."""

    @property
    def active(self) -> bool:
        """Whether layers are divided at the moment."""
        return self.divided and self.size > 1

    @property
    def _native(self) -> NativeCollectives | None:
        """The engine's own collectives, if they are to be used."""
        native = self.group.transport.native
        return native if native.available and self._algorithm == NATIVE else None

    def reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """The sum, maximum, … over the team, as a new tensor."""
        if self.size == 1:
            return x.clone()
        wide, narrow = widen(x, op)

        def work() -> None:
            native = self._native
            if native is not None and native.reduces(wide.dtype, op):
                native.allreduce(wide, op).wait()
            else:
                channel.allreduce(self.group.channel, wide, op, build("allreduce", self._algorithm))

        self._run("allreduce", f"{x.dtype}{list(x.shape)}, {op}", x.numel() * x.element_size(), work)
        return narrow(wide)

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """The tensors of all workers, one after another along a dimension. `sizes`: theirs in it, if they differ."""
        if self.size == 1:
            return x
        lengths = [x.shape[dim]] * self.size if sizes is None else list(sizes)
        own = x.transpose(0, dim).contiguous()
        output = own.new_empty(sum(lengths), *own.shape[1:])

        def work() -> None:
            native = self._native
            if native is not None and len(set(lengths)) == 1 and own.numel():
                native.allgather(output.view(-1).view(torch.uint8), own.view(-1).view(torch.uint8)).wait()
                return
            parts = dict(enumerate(torch.split(output, lengths)))
            parts[self.rank].copy_(own)
            channel.move_pieces(self.group.channel, "allgather", parts, NATIVE)

        self._run("allgather", f"{x.dtype}{list(output.shape)}, {dim}", x.numel() * x.element_size(), work)
        return _move_first(output, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This worker's part of the sum over the team, along a dimension. See `edges`."""
        if self.size == 1:
            return x.clone()
        wide, narrow = widen(x.transpose(0, dim), "sum")
        edges = self.edges(x.shape[dim])
        parts: list[Tensor] = []

        def work() -> None:
            native = self._native
            even = wide.shape[0] % self.size == 0 and wide.numel() > 0
            if native is not None and even and native.reduces(wide.dtype, "sum"):
                part = wide.new_empty(wide.shape[0] // self.size, *wide.shape[1:])
                native.reduce_scatter(part, wide, "sum").wait()
                parts.append(part)
                return
            row = wide[0].numel() if len(wide) else 0
            places = [edge * row for edge in edges]
            channel.reduce_scatter(self.group.channel, wide, places, "sum", build("reduce_scatter", NATIVE))
            parts.append(wide[edges[self.rank] : edges[self.rank + 1]].clone())

        self._run("reduce_scatter", f"{x.dtype}{list(x.shape)}, {dim}", x.numel() * x.element_size(), work)
        return _move_first(narrow(parts[0]), dim)

    def alltoall(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], logical_bytes: int | None = None
    ) -> Tensor:
        """Send `send[i]` rows of `x` to worker i. Returns the rows from all workers, `receive[i]` from worker i.

        `logical_bytes`: the bytes that others receive, before a codec has encoded them in `x`.
        """
        if self.size == 1:
            return x.clone()
        own = x.contiguous()
        output = own.new_empty(sum(receive), *own.shape[1:])

        def work() -> None:
            native = self._native
            row_bytes = row_size(own)
            if native is not None and row_bytes:
                native.alltoall(
                    output.view(-1).view(torch.uint8),
                    own.view(-1).view(torch.uint8),
                    [count * row_bytes for count in receive],
                    [count * row_bytes for count in send],
                ).wait()
                return
            outgoing, incoming = torch.split(own, list(send)), torch.split(output, list(receive))
            incoming[self.rank].copy_(outgoing[self.rank])
            parts = {self.rank * self.size + to: part for to, part in enumerate(outgoing) if to != self.rank}
            parts |= {
                source * self.size + self.rank: part for source, part in enumerate(incoming) if source != self.rank
            }
            channel.move_pieces(self.group.channel, "alltoall", parts, NATIVE)

        call = f"{x.dtype}{list(x.shape[1:])} in rows"
        nbytes = (len(x) - send[self.rank]) * row_size(x)
        self._run("alltoall", call, nbytes if logical_bytes is None else logical_bytes, work, wire_bytes=nbytes)
        return output

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """The tensor of one worker. The tensors of all workers have one shape and dtype."""
        if self.size == 1:
            return x
        self.calls["broadcast"] += 1
        found: Tensor = broadcast_from(x.cpu(), root, group=self.group)
        return found.to(x.device)

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Send the number `counts[i]` to worker i. Returns the numbers from all workers."""
        received = self.alltoall(torch.tensor(list(counts)), [1] * self.size, [1] * self.size)
        return [int(count) for count in received]

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int = 0) -> None:
        """Send tensors to some workers, and receive into contiguous tensors from some. Both sides know the lengths."""
        self.start_swap(sends, receives, tag).wait()

    def start_swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int = 0
    ) -> PendingSwap:
        """Start a swap. Its tensors must not be used before `wait` of the result has returned."""
        self._enter()
        transport = self.group.transport
        bodies = [(to, tensor.contiguous()) for to, tensor in sends]
        handles: list[Handle] = [transport.recv(buffer, source, tag, exact=True) for source, buffer in receives]
        handles += [transport.send(body, to, tag, exact=True) for to, body in bodies]
        nbytes = sum(body.numel() * body.element_size() for _, body in bodies)
        self.calls["swap"] += 1
        self.sent_bytes += nbytes
        if self.stats is not None:
            self.stats.forwarded(nbytes)
        return PendingSwap(self, handles, [body for _, body in bodies])

    def edges(self, length: int) -> list[int]:
        """Where the parts of the workers begin and end along a dimension: parts differ by one at most."""
        return chunk_edges(length, self.size)

    def lengths(self, length: int) -> list[int]:
        """The sizes of the parts of the workers along a dimension."""
        return [stop - start for start, stop in pairwise(self.edges(length))]

    def _run(self, kind: str, call: str, nbytes: int, work: Callable[[], None], wire_bytes: int | None = None) -> None:
        """Run a collective, and count it. `call` describes it, the same on every worker; empty: they do different
        things. `wire_bytes`: if a codec has encoded the `nbytes`."""
        self._enter()
        self.calls[kind] += 1
        self.sent_bytes += nbytes
        if call:
            compare_calls(self.group, f"{kind}({call})")
        now = self.group.world.runtime.now
        start = now()
        work()
        if self.stats is not None:
            self.stats.forwarded(nbytes, wire_bytes)
            self.stats.waited(start, now(), "waits for the workers that divide a layer")

    def _enter(self) -> None:
        """Called first in every collective."""
        if self.in_backward is not None and torch._C._current_graph_task_id() != -1:
            self.in_backward()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerTeam:
        """The same team."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None: a layer that is loaded elsewhere has no team."""
        return _no_team, ()


class PendingSwap:
    """Messages under way to and from workers of a team."""

    def __init__(self, team: LayerTeam, handles: Sequence[Handle], bodies: Sequence[Tensor]) -> None:
        self._team, self._handles = team, handles
        self._bodies = bodies
        """The sent tensors, which must exist until they have left."""

    def wait(self) -> None:
        """Wait until all messages have arrived and left."""
        now = self._team.group.world.runtime.now
        start = now()
        for handle in self._handles:
            handle.wait()
        self._handles = self._bodies = ()
        if self._team.stats is not None:
            self._team.stats.waited(start, now(), "waits for the workers that divide a layer")


def _no_team() -> None:
    """The value of a pickled team when it is loaded: None."""
    return


def _move_first(x: Tensor, dim: int) -> Tensor:
    """`x` with its first dimension at `dim`, contiguous, and no view: layers may change it in place."""
    return x if dim == 0 else x.transpose(0, dim).clone(memory_format=torch.contiguous_format)


def row_size(x: Tensor) -> int:
    """The bytes of a row."""
    return math.prod(x.shape[1:]) * x.element_size()


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: LayerTeam) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_over_team(gradients[0], ctx.team), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: LayerTeam) -> Tensor:
        ctx.team = team
        return team.reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return copy_to_team(gradients[0], ctx.team), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: LayerTeam, dim: int, lengths: Sequence[int]) -> Tensor:
        ctx.team, ctx.dim, ctx.lengths = team, dim, lengths
        return team.gather(x, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _call(_OwnPart, gradients[0], ctx.team, ctx.dim, ctx.lengths), None, None, None


class _OwnPart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: LayerTeam, dim: int, lengths: Sequence[int]) -> Tensor:
        ctx.team, ctx.dim, ctx.lengths = team, dim, lengths
        return x.narrow(dim, sum(lengths[: team.rank]), lengths[team.rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _call(_Gather, gradients[0], ctx.team, ctx.dim, ctx.lengths), None, None, None


class _GatherAndReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: LayerTeam, dim: int, length: int) -> Tensor:
        ctx.team, ctx.dim = team, dim
        return team.gather(x, dim, team.lengths(length))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _call(_ReduceOwnPart, gradients[0], ctx.team, ctx.dim), None, None, None


class _ReduceOwnPart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: LayerTeam, dim: int) -> Tensor:
        ctx.team, ctx.dim, ctx.length = team, dim, x.shape[dim]
        return team.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _call(_GatherAndReduce, gradients[0], ctx.team, ctx.dim, ctx.length), None, None


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: LayerTeam, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.team, ctx.send, ctx.receive = team, send, receive
        return team.alltoall(x, send, receive)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _call(_ExchangeRows, gradients[0], ctx.team, ctx.receive, ctx.send), None, None, None


@_disable_dynamo
def _call(function: type[Function], *arguments: Any) -> Tensor:
    """Call an autograd function, in a compiled model too: it communicates, so it cannot be part of a graph."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def copy_to_team(x: Tensor, team: LayerTeam) -> Tensor:
    """`x` itself; its gradient is the sum over the team."""
    return _call(_Copy, x, team) if team.size > 1 else x


def sum_over_team(x: Tensor, team: LayerTeam) -> Tensor:
    """The sum over the team; the gradient is that of the sum."""
    return _call(_Sum, x, team) if team.size > 1 else x


def gather(x: Tensor, team: LayerTeam, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The tensors of all workers along a dimension; the gradient is this worker's part, which others do not add to."""
    if team.size == 1:
        return x
    dim %= x.dim()
    return _call(_Gather, x, team, dim, [x.shape[dim]] * team.size if sizes is None else list(sizes))


def take_own_part(x: Tensor, team: LayerTeam, dim: int) -> Tensor:
    """This worker's part along a dimension; the gradient has the parts of all workers."""
    dim %= x.dim()
    return _call(_OwnPart, x, team, dim, team.lengths(x.shape[dim])) if team.size > 1 else x


def gather_and_reduce(x: Tensor, team: LayerTeam, dim: int, length: int) -> Tensor:
    """The parts of all workers along a dimension of `length`; the gradient is this worker's part of the sum."""
    return _call(_GatherAndReduce, x, team, dim % x.dim(), length) if team.size > 1 else x


def reduce_own_part(x: Tensor, team: LayerTeam, dim: int) -> Tensor:
    """This worker's part of the sum over the team; the gradient has the parts of all workers."""
    return _call(_ReduceOwnPart, x, team, dim % x.dim()) if team.size > 1 else x


def exchange(x: Tensor, team: LayerTeam, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send `send[i]` rows to worker i, and return those of all workers. Gradients go the way back."""
    return _call(_ExchangeRows, x, team, send, receive) if team.size > 1 else x
