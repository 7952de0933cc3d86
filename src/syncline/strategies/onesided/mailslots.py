"""Receive buffers that others write at any time, without the help of who owns them.

    a worker's window   │ slot 0 │ slot 1 │ … │ slot n−1 │
    a slot              │ check sum │ sender │ sequence │ first │ count │ values …          little-endian
                        └ of all that follows

A message is put over whatever the slot held: an unread one is lost, which the algorithm allows. The owner copies a slot
and then checks the sum of the copy. Where it was being written, by one or by several, half of it old and half of it
new, the sum does not match: such a message is *torn*, and is left where it is. A sender's numbers rise, so that each
message counts once. With n ≥ p − 1 slots every sender has one of its own.

Outgoing messages wait in a short line for a task that puts them one after another and sees each in place before the
next. What finds the line full is dropped: it would be old when it came. Among processes of one host,
where a put is a copy in memory, there is no line and no task.
"""

from __future__ import annotations

import logging
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from syncline.errors import PeerLostError
from syncline.strategies.onesided.step import Array, Part
from syncline.transports import Transport

__all__ = ["Mailslots", "Message", "Traffic"]

logger = logging.getLogger("syncline")

CHECK = struct.Struct("<I")
HEAD = struct.Struct("<Iqqq")
"""Sender, sequence, first element, number of elements."""
HEADER = CHECK.size + HEAD.size
ALIGNED = 64
"""Bytes: a slot begins on a cache line of its own."""
PIECE = 4 << 20
"""Bytes that are put at once; longer messages go in pieces."""
LINE = 2
"""Messages that wait to be put: a longer line would send older states."""


@dataclass(frozen=True)
class Message(Part):
    """What a sender has left in a slot."""

    sender: int
    sequence: int


@dataclass
class Traffic:
    """What went through a worker's slots."""

    sent: int = 0
    """Messages that are in place in others' windows."""
    dropped: int = 0
    """Messages that found the line full, or a peer that is gone."""
    received: int = 0
    torn: int = 0
    sent_bytes: int = 0


class Mailslots:
    """One worker's slots, and its way into the others'. Made by all workers together, and closed by all.

    `near` says that all are processes of one host.

    >>> from syncline.transports import SingleTransport
    >>> slots = Mailslots(SingleTransport(), 3, np.float64)
    >>> slots.post(np.array([1.0, 2.0, 3.0]), to=0, first=1, count=2)
    True
    >>> slots.settle()
    >>> [(message.first, message.values.tolist()) for message in slots.collect()], slots.collect()
    ([(1, [2.0, 3.0])], [])
    >>> slots.close()
    """

    def __init__(
        self,
        transport: Transport,
        numel: int,
        dtype: type[np.floating] | np.dtype[np.floating],
        buffers: int = 4,
        *,
        near: bool = False,
        piece: int = PIECE,
    ) -> None:
        self.transport = transport
        self.numel = numel
        self.dtype = np.dtype(dtype)
        self.buffers = buffers
        self._piece = piece
        self._stride = -(-(HEADER + numel * self.dtype.itemsize) // ALIGNED) * ALIGNED
        self._window = transport.memory.window(buffers * self._stride, torch.uint8)
        self._slots = self._window.local.numpy().reshape(buffers, self._stride)
        self.counts = Traffic()
        self.lost: set[int] = set()
        """Peers that were found to be gone: nothing is put there any more."""
        self._latest = [0] * transport.size
        """The number of each sender's latest message that was collected."""
        self._torn: list[bytes] = [b""] * buffers
        """The head of what was last found torn in each slot: looked at again, counted once."""
        self._sequence = 0
        """Messages of this worker, the dropped ones too."""
        self._posted = self._done = 0
        self._line = transport.runtime.queue(LINE)
        self._moved = transport.runtime.event()
        self._failed: BaseException | None = None
        self._poster = None if near else transport.runtime.spawn(self._put_all, name="one-sided puts")

    # Out.

    @property
    def under_way(self) -> int:
        """Messages that were posted and are not yet in place: the outgoing queue."""
        return self._posted - self._done

    def post(self, state: Array, to: int, first: int = 0, count: int | None = None) -> bool:
        """Send a state, or `count` elements of it, to one other worker; False: it was dropped. Never waits."""
        if self._failed is not None:
            raise self._failed
        self._sequence += 1
        if to in self.lost or len(self._line) >= LINE:
            self.counts.dropped += 1
            return False
        values = state[first:] if count is None else state[first : first + count]
        self._posted += 1
        message = pack(self.transport.rank, self._sequence, first, values.astype(self.dtype, copy=False))
        if self._poster is None:
            self._deliver(to, message)
        else:
            self._line.put((to, message), timeout=self.transport.timeout)
        return True

    def settle(self) -> None:
        """Return when all that was posted is in place."""
        patience = 2 * self.transport.timeout  # a put has its own
        while self.under_way and self._failed is None:
            self._moved.clear()
            pending = f"{self.under_way} posted states to be in place"
            if self.under_way and not self._moved.wait(patience, pending, hang=True):
                raise self.transport.failure(None, pending, patience, None)

    # In.

    def collect(self) -> list[Message]:
        """What has come since the last call. Only looks at this worker's own memory: no engine is called."""
        found = []
        for number in range(self.buffers):
            message = self._read(number)
            if message is not None:
                found.append(message)
        self.counts.received += len(found)
        return found

    def close(self) -> None:
        """See the last posts in place and let the window go. Every worker closes."""
        self.settle()
        if self._poster is not None:
            self._line.put(None, timeout=self.transport.timeout)
            self._poster.join(self.transport.timeout)
        self._slots = self._slots.copy()
        self._window.close()

    # Within.

    def _read(self, number: int) -> Message | None:
        slot = self._slots[number]
        head = slot[:HEADER].tobytes()
        sender, sequence, first, count = HEAD.unpack_from(head, CHECK.size)
        if not sequence or (sender < len(self._latest) and sequence <= self._latest[sender]):
            return None
        whole = sender < len(self._latest) and first >= 0 and 0 < count <= self.numel - first
        if whole:
            data = slot[: HEADER + count * self.dtype.itemsize].copy()  # what is checked does not change any more
            whole = data[:HEADER].tobytes() == head and is_whole(data)
        if not whole:
            self.counts.torn += head != self._torn[number]
            self._torn[number] = head
            return None
        self._latest[sender] = sequence
        return Message(first, data[HEADER:].view(self.dtype), sender, sequence)

    def _put_all(self) -> None:
        while True:
            item = self._line.get()
            if item is None:
                return
            try:
                self._deliver(*item)
            except BaseException as error:  # told by the next post
                self._failed = error
                raise

    def _deliver(self, to: int, message: Array) -> None:
        try:
            self._put(to, message)
        except PeerLostError as error:
            logger.warning("rank %d sends its state to rank %d no more: %s", self.transport.rank, to, error)
            self.lost.add(to)
            self.counts.dropped += 1
        finally:
            self._done += 1
            self._moved.set()

    def _put(self, to: int, message: Array) -> None:
        transport = self.transport
        if transport.members[to] in transport.lost():
            raise PeerLostError(f"rank {transport.members[to]} is gone", peer=transport.members[to])
        # Senders are spread evenly over the slots of each receiver.
        offset = (transport.rank - to - 1) % transport.size % self.buffers * self._stride
        data = torch.from_numpy(message)
        for start in range(0, len(message), self._piece):
            self._window.put(data[start : start + self._piece], to, offset + start)
        self._window.flush(to)
        self.counts.sent += 1
        self.counts.sent_bytes += len(message)


def pack(sender: int, sequence: int, first: int, values: Array) -> Array:
    """A message as bytes."""
    data = np.empty(HEADER + values.nbytes, np.uint8)
    HEAD.pack_into(data.data, CHECK.size, sender, sequence, first, len(values))
    data[HEADER:] = np.ascontiguousarray(values).view(np.uint8)
    CHECK.pack_into(data.data, 0, zlib.crc32(data[CHECK.size :].data))
    return data


def is_whole(data: Array) -> bool:
    """Whether a message's check sum is that of its bytes.

    >>> message = pack(1, 1, 0, np.ones(4))
    >>> message_half_old = np.concatenate([message[:40], pack(1, 2, 0, np.zeros(4))[40:]])
    >>> is_whole(message), is_whole(message_half_old)
    (True, False)
    """
    (told,) = CHECK.unpack_from(data.data)
    return int(told) == zlib.crc32(data[CHECK.size :].data)
