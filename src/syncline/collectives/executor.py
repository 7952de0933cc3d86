"""Runs a schedule over a transport.

A lane is one execution of the schedule on one part of the data. Several lanes of a call take turns, so that one
combines received data while the bytes of the next are on the wire::

    lane 0   post 1 │ wait 1, merge │ post 2 │            │ wait 2, merge │ …
    lane 1          │               │ post 1 │ … on the wire …            │ wait 1, merge │ …

All lanes advance round by round, idle rounds included. What one lane waits for in round k was then sent on every
rank, so lanes cannot wait for each other in a circle. Within a lane the receives of a round are posted before its
sends. They are merged in the order of the schedule, so the result does not depend on timing. Empty chunks are not
sent. A large send to one peer completes before the next round sends to another: in parallel they would share the
port, and the first receiver would wait for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from syncline.collectives.base import Move, Round
from syncline.transports import Handle, Op, Transport
from syncline.transports.base import LANE_TAGS

if TYPE_CHECKING:
    from syncline.collectives.channel import BufferPool

__all__ = ["LARGE_SEND_BYTES", "Chunks", "DenseChunks", "Lane", "SeparateChunks", "chunk_edges", "execute"]

MAX_EARLIER_SENDS = 4
"""Sends of earlier rounds that may be under way before a lane waits for the oldest."""
LARGE_SEND_BYTES = 1 << 17
"""A send of at least this size completes before a send to another peer begins."""


_COMBINE: dict[Op, Callable[..., Tensor]] = {
    "sum": Tensor.add_,
    "min": lambda place, data: torch.minimum(place, data, out=place),
    "max": lambda place, data: torch.maximum(place, data, out=place),
    "product": Tensor.mul_,
}
"""Combines the second argument into the first."""


class Chunks(Protocol):
    """The data of one rank, cut into chunks: where each lies, where one may arrive, how it is combined."""

    def nbytes(self, move: Move) -> int:
        """Size of a move in bytes, the same for sender and receiver."""
        ...

    def read(self, move: Move) -> Tensor:
        """The bytes to send."""
        ...

    def receive_buffer(self, move: Move) -> Tensor:
        """The memory to receive into: the chunk itself, or a buffer if the data will be combined."""
        ...

    def merge(self, move: Move, data: Tensor) -> None:
        """Store or combine the received data."""
        ...


def chunk_edges(numel: int, chunks: int) -> list[int]:
    """The first element of each chunk, and the end. Sizes differ by one element at most.

    >>> chunk_edges(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [numel * chunk // chunks for chunk in range(chunks + 1)]


class DenseChunks:
    """A contiguous tensor that is reduced in place."""

    def __init__(self, tensor: Tensor, edges: Sequence[int], op: Op, buffers: BufferPool) -> None:
        self._flat = tensor.view(-1)
        self._bytes = self._flat.view(torch.uint8)
        self._item = tensor.element_size()
        self._edges = edges
        self._combine = _COMBINE[op]
        self._buffers = buffers

    def nbytes(self, move: Move) -> int:
        return (self._edges[move.chunk + move.width] - self._edges[move.chunk]) * self._item

    def read(self, move: Move) -> Tensor:
        return self._bytes[self._edges[move.chunk] * self._item : self._edges[move.chunk + move.width] * self._item]

    def receive_buffer(self, move: Move) -> Tensor:
        return self._buffers.take(self.nbytes(move), self._flat.device) if move.combine else self.read(move)

    def merge(self, move: Move, data: Tensor) -> None:
        if move.combine:
            place = self._flat[self._edges[move.chunk] : self._edges[move.chunk + move.width]]
            self._combine(place, data.view(place.dtype))
            self._buffers.give(data)


class SeparateChunks:
    """Contiguous tensors by chunk number, which are moved and not combined."""

    def __init__(self, pieces: Mapping[int, Tensor]) -> None:
        self._pieces = pieces

    def nbytes(self, move: Move) -> int:
        piece = self._pieces[move.chunk]
        return piece.numel() * piece.element_size()

    def read(self, move: Move) -> Tensor:
        return self._pieces[move.chunk]

    receive_buffer = read

    def merge(self, move: Move, data: Tensor) -> None:
        assert not move.combine, "pieces are moved, not combined"


def execute(transport: Transport, lanes: Sequence[tuple[Iterator[Round], Chunks]]) -> None:
    """Run every lane to its end. Each lane has its own tag. A channel runs one call at a time."""
    with transport.timing.no_user_code():
        active = [Lane(transport, rounds, chunks, LANE_TAGS + lane) for lane, (rounds, chunks) in enumerate(lanes)]
        active = [lane for lane in active if lane.post()]
        while active:
            active = [lane for lane in active if lane.advance()]


class _Send(NamedTuple):
    """A send under way. Its chunks from `first` to before `end` must not be overwritten yet."""

    first: int
    end: int
    peer: int
    nbytes: int
    handle: Handle


class Lane:
    """One execution of a schedule."""

    def __init__(self, transport: Transport, rounds: Iterator[Round], chunks: Chunks, tag: int) -> None:
        self._transport = transport
        self._rounds = rounds
        self._chunks = chunks
        self._tag = tag
        self._receiving: list[tuple[Move, Tensor, Handle]] = []
        self._sending: deque[_Send] = deque()

    def post(self) -> bool:
        """Start the next round. At the end of the schedule wait for the remaining sends, and return False."""
        transport, chunks, tag = self._transport, self._chunks, self._tag
        now = next(self._rounds, None)
        if now is None:
            for send in self._sending:
                send.handle.wait()
            self._sending.clear()
            return False
        for move in now.recvs:
            if chunks.nbytes(move):
                if not move.combine:
                    self._finish_sending(move)  # it is received in place
                data = chunks.receive_buffer(move)
                self._receiving.append((move, data, transport.recv(data, move.peer, tag, exact=True)))
        if self._sending:
            self._finish_large_sends(now.sends)
        for move in now.sends:
            nbytes = chunks.nbytes(move)
            if nbytes:
                peer, chunk, width, _ = move
                handle = transport.send(chunks.read(move), peer, tag, exact=True)
                self._sending.append(_Send(chunk, chunk + width, peer, nbytes, handle))
        while len(self._sending) > MAX_EARLIER_SENDS + len(now.sends):
            self._sending.popleft().handle.wait()  # of many rounds ago: complete by now
        return True

    def advance(self) -> bool:
        """Finish the current round and start the next one."""
        for _, _, handle in self._receiving:
            handle.wait()
        combined = 0
        for move, data, _ in self._receiving:
            if move.combine:
                self._finish_sending(move)
                combined += data.numel()
            self._chunks.merge(move, data)
        self._receiving.clear()
        if combined:
            self._transport.timing.reduced(combined)
        return self.post()

    def _finish_large_sends(self, sends: Sequence[Move]) -> None:
        """Wait for large sends of earlier rounds to peers that are not the next ones."""
        for sent in self._sending:
            if sent.nbytes >= LARGE_SEND_BYTES and sends and all(move.peer != sent.peer for move in sends):
                sent.handle.wait()

    def _finish_sending(self, move: Move) -> None:
        """Wait for the sends that read what this move overwrites."""
        chunk, end = move.chunk, move.chunk + move.width
        for sent in self._sending:
            if sent.first < end and chunk < sent.end:
                break
        else:
            return
        for sent in [each for each in self._sending if each.first < end and chunk < each.end]:
            sent.handle.wait()
            self._sending.remove(sent)
