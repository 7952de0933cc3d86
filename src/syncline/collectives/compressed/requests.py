"""What a compressed reduction asks of the network, and the executor that carries it out.

A reduction is a generator. It yields a request, receives the answer, and returns its result at the end. All ranks
yield requests of the same kinds in the same order::

    request                                 on rank r                        answer
    AllReduceRequest(tensor)                is summed in place               None
    AllGatherRequest(data)                  n bytes, as many on every rank   [p, n]: row i is rank i's
    AllToAllRequest(data)                   [p, n]: row j goes to rank j     [p, n]: row i came from rank i
    SendRecvRequest(peer, data, max_bytes)  data goes to the peer            at most `max_bytes` bytes from the peer

The generators are pure, so tests and cost models can run them without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from syncline.collectives.base import Operation
from syncline.collectives.channel import Channel, move_pieces

__all__ = [
    "IDLE",
    "AllGatherRequest",
    "AllReduceRequest",
    "AllToAllRequest",
    "LaunchedRequest",
    "Reduction",
    "Request",
    "RequestExecutor",
    "SendRecvRequest",
]

R = TypeVar("R")

SEND_RECV_TAG = 7
"""The tag of messages between two ranks on the run's channel."""


@dataclass(frozen=True, eq=False)
class AllReduceRequest:
    """Sum a tensor over the ranks, in place. Answer: None."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class AllGatherRequest:
    """Send a row of bytes to all ranks, the same length everywhere. Answer: all rows, as bytes[p, n]."""

    data: Tensor


@dataclass(frozen=True, eq=False)
class AllToAllRequest:
    """Send one row to each rank: bytes[p, n], the same n everywhere. Answer: the rows received, as bytes[p, n]."""

    data: Tensor


@dataclass(frozen=True, eq=False)
class SendRecvRequest:
    """Exchange bytes with one peer; the two lengths may differ. Answer: the peer's bytes, at most `max_bytes`.

    Without data only the peer sends. With `max_bytes` 0 only this rank sends, and the answer is empty. Without a peer
    the rank is idle in this round.
    """

    peer: int | None
    data: Tensor | None
    max_bytes: int


IDLE = SendRecvRequest(None, None, 0)
"""A round in which this rank does nothing."""

Request: TypeAlias = AllReduceRequest | AllGatherRequest | AllToAllRequest | SendRecvRequest
Reduction: TypeAlias = Generator[Request | tuple[Request, ...], Any, R]


class WaitableReduction(Protocol):
    """An operation under way."""

    def wait(self) -> Any:
        """Return when it is complete."""
        ...


class LaunchedRequest(NamedTuple):
    """A request under way. `wait()` returns the answer."""

    wait: Callable[[], Any]
    sent_bytes: int
    """Bytes that this rank gives to the network."""


class RequestExecutor:
    """Carries out requests on a channel: by the engine's own collectives if `native`, else by our schedules.

    `start_sum(tensor, what, in_comm_task)` begins a dense sum. `call(what, work)` runs work in the comm task of the
    channel and returns what its result can be waited for with. On every rank the same requests are launched in the
    same order.
    """

    def __init__(
        self,
        channel: Channel,
        native: bool,
        start_sum: Callable[[Tensor, str, bool], WaitableReduction],
        call: Callable[[str, Callable[[], Any]], WaitableReduction],
    ) -> None:
        self._channel = channel
        self._rank, self._size = channel.rank, channel.size
        engine = channel.transport.native
        self._native = engine if native and engine.available else None
        self._start_sum = start_sum
        self._call = call

    def launch(self, request: Request, what: str, in_comm_task: bool) -> LaunchedRequest:
        """Begin a request. `in_comm_task`: the caller is the comm task, so that schedules run at once."""
        if isinstance(request, AllGatherRequest):
            return self._all_gather(request.data, what, in_comm_task)
        if isinstance(request, AllReduceRequest):
            tensor = request.tensor
            return LaunchedRequest(self._start_sum(tensor, what, in_comm_task).wait, tensor.nbytes)
        if isinstance(request, AllToAllRequest):
            return self._all_to_all(request.data, what, in_comm_task)
        return self._send_recv(request, what, in_comm_task)

    def _all_gather(self, data: Tensor, what: str, in_comm_task: bool) -> LaunchedRequest:
        nbytes = data.numel()
        out = torch.empty(self._size, nbytes, dtype=torch.uint8, device=data.device)
        if self._native is not None and nbytes:
            return LaunchedRequest(_returning(self._native.allgather(out, data), out), nbytes)
        out[self._rank] = data
        return LaunchedRequest(self._move("allgather", dict(enumerate(out)), out, what, in_comm_task), nbytes)

    def _all_to_all(self, data: Tensor, what: str, in_comm_task: bool) -> LaunchedRequest:
        size, rank, each, out = self._size, self._rank, data.shape[1], torch.empty_like(data)
        if self._native is not None and each:
            handle = self._native.alltoall(out.view(-1), data.view(-1), [each] * size, [each] * size)
            return LaunchedRequest(_returning(handle, out), each * (size - 1))
        out[rank] = data[rank]
        pieces = {rank * size + to: data[to] for to in range(size)}
        pieces |= {source * size + rank: out[source] for source in range(size) if source != rank}
        return LaunchedRequest(self._move("alltoall", pieces, out, what, in_comm_task), each * (size - 1))

    def _send_recv(self, request: SendRecvRequest, what: str, in_comm_task: bool) -> LaunchedRequest:
        transport, data, peer = self._channel.transport, request.data, request.peer

        def work() -> Tensor:
            device = torch.device("cpu") if data is None else data.device
            into = torch.empty(request.max_bytes, dtype=torch.uint8, device=device)
            if peer is None:
                return into[:0]
            receipt = transport.recv(into, peer, SEND_RECV_TAG) if request.max_bytes else None
            sending = transport.send(data, peer, SEND_RECV_TAG) if data is not None else None
            if receipt is not None:
                receipt.wait()  # first: where a length precedes the bytes, both ranks must be receiving
            if sending is not None:
                sending.wait()
            return into[: 0 if receipt is None else receipt.nbytes]

        return LaunchedRequest(self._run(work, what, in_comm_task), 0 if data is None else data.numel())

    def _move(
        self, operation: Operation, pieces: Mapping[int, Tensor], out: Tensor, what: str, in_comm_task: bool
    ) -> Callable[[], Tensor]:
        """Run a schedule that fills `out`. The result waits for it."""

        def work() -> Tensor:
            move_pieces(self._channel, operation, pieces, "sharded")
            return out

        return self._run(work, what, in_comm_task)

    def _run(self, work: Callable[[], Tensor], what: str, in_comm_task: bool) -> Callable[[], Tensor]:
        if not in_comm_task:
            return self._call(f"the exchange of {what}", work).wait
        result = work()
        return lambda: result


def _returning(pending: WaitableReduction, out: Tensor) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        pending.wait()
        return out

    return wait
