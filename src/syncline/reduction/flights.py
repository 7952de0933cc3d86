"""Carrying out what a compressed reduction asks for: a request takes off, and lands with its answer.

The engine's own collectives where there are some, else our schedules in the team's comm task. On every rank the same
requests take off in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.collectives import NATIVE, run
from syncline.reduction.requests import Gather, Request, Scatter, Sum, Swap
from syncline.transports import Handle

if TYPE_CHECKING:
    from syncline.reduction.communicator import Communicator

__all__ = ["Flight", "take_off"]

TAG = 7
"""Of messages between two ranks, on the run's own channel."""


class Flight:
    """A request under way."""

    def __init__(self, wait: Callable[[], Any], sent: int) -> None:
        self.land = wait
        """Wait for the answer and give it."""
        self.sent = sent
        """Bytes that this rank hands to the network."""


def take_off(exchange: Communicator, request: Request, what: str, here: bool) -> Flight:
    """Begin a request. `here`: this is the comm task itself, so schedules run now."""
    if isinstance(request, Sum):
        return _sum(exchange, request.tensor, what, here)
    if isinstance(request, Gather):
        return _gather(exchange, request.data, what, here)
    if isinstance(request, Scatter):
        return _scatter(exchange, request.data, what, here)
    return _swap(exchange, request, what, here)


def _sum(exchange: Communicator, tensor: Tensor, what: str, here: bool) -> Flight:
    reduction = exchange.begin_sum(tensor, what, here)
    return Flight(reduction.wait, tensor.numel() * tensor.element_size())


def _gather(exchange: Communicator, data: Tensor, what: str, here: bool) -> Flight:
    out = torch.empty(exchange.size, data.numel(), dtype=torch.uint8, device=data.device)
    native = exchange.team.transport.native
    if native.available and exchange.gathering == NATIVE and data.numel():
        handle = native.allgather(out, data)
        return Flight(lambda: _landed(handle, out), data.numel())
    out[exchange.rank] = data
    pieces = {rank: out[rank] for rank in range(exchange.size)}
    channel = exchange.team.channel
    wait = _call(exchange, what, lambda: run.exchange(channel, "allgather", pieces, "sharded"), here)
    return Flight(lambda: _after(wait, out), data.numel())


def _scatter(exchange: Communicator, data: Tensor, what: str, here: bool) -> Flight:
    size, rank, out = exchange.size, exchange.rank, torch.empty_like(data)
    native, each = exchange.team.transport.native, data.shape[1]
    if native.available and exchange.gathering == NATIVE and each:
        handle = native.alltoall(out.view(-1), data.view(-1), [each] * size, [each] * size)
        return Flight(lambda: _landed(handle, out), each * (size - 1))
    out[rank] = data[rank]
    pieces = {rank * size + to: data[to] for to in range(size)}
    pieces |= {source * size + rank: out[source] for source in range(size) if source != rank}
    channel = exchange.team.channel
    wait = _call(exchange, what, lambda: run.exchange(channel, "alltoall", pieces, "sharded"), here)
    return Flight(lambda: _after(wait, out), each * (size - 1))


def _swap(exchange: Communicator, request: Swap, what: str, here: bool) -> Flight:
    transport = exchange.team.transport
    data, peer = request.data, request.peer
    sent = 0 if data is None else data.numel()

    def work() -> Tensor:
        into = torch.empty(request.most, dtype=torch.uint8, device=torch.device("cpu") if data is None else data.device)
        if peer is None:
            return into[:0]
        receipt = transport.recv(into, peer, TAG) if request.most else None
        sending = transport.send(data, peer, TAG) if data is not None else None
        if receipt is not None:
            receipt.wait()  # first: where a length comes before the bytes, both must be listening for them
        if sending is not None:
            sending.wait()
        return into[: 0 if receipt is None else receipt.nbytes]

    return Flight(_call(exchange, what, work, here), sent)


def _call(exchange: Communicator, what: str, work: Callable[[], Any], here: bool) -> Callable[[], Any]:
    if here:
        result = work()
        return lambda: result
    pending: Any = exchange.team.call(f"the exchange of {what}", work, async_=True)
    return lambda: pending.wait()


def _landed(handle: Handle, out: Tensor) -> Tensor:
    handle.wait()
    return out


def _after(wait: Callable[[], Any], out: Tensor) -> Tensor:
    wait()
    return out
