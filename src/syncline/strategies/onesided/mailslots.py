"""Receive buffers that other workers write at any time, by one-sided puts.

    a worker's window   │ slot 0 │ slot 1 │ … │ slot n−1 │
    a slot              │ checksum │ sender │ sequence │ first │ count │ values …          little-endian
                        └ of all that follows

A message overwrites the slot. An unread message is then lost, which the algorithm allows. The owner copies a slot and
checks the checksum of the copy. If the slot was being written, the checksum does not match: such a message is *torn*
and stays in the slot. A sender's sequence numbers rise, so each message counts once. With n ≥ p − 1 slots every sender
has its own.

Outgoing messages wait in a short queue for a task that puts them one after another. A message that finds the queue full
is dropped, because it would be old when it arrives. Among processes of one host, where a put is a copy in memory, there
is no queue and no task.
"""

from __future__ import annotations

import logging
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from syncline.errors import PeerLostError
from syncline.strategies.onesided.update import Array, StateSlice
from syncline.transports import Transport
from syncline.world import World

__all__ = ["Mailslots", "MessageCounts", "SlotMessage", "is_whole", "on_same_host", "pack"]

logger = logging.getLogger("syncline")

CHECKSUM = struct.Struct("<I")
MESSAGE_FIELDS = struct.Struct("<Iqqq")
"""Sender, sequence, first element, number of elements."""
HEADER_BYTES = CHECKSUM.size + MESSAGE_FIELDS.size
CACHE_LINE_BYTES = 64
"""A slot begins on its own cache line."""
PUT_CHUNK_BYTES = 4 << 20
"""Largest number of bytes in one put."""
MAX_QUEUED_MESSAGES = 2
"""A longer queue would send older states."""


@dataclass(frozen=True)
class SlotMessage(StateSlice):
    """A message that was read from a slot."""

    sender: int
    sequence: int


@dataclass
class MessageCounts:
    """Counts of a worker's messages."""

    sent: int = 0
    """Messages that are complete in other workers' windows."""
    dropped: int = 0
    """Messages that found the queue full, or a lost peer."""
    received: int = 0
    torn: int = 0
    sent_bytes: int = 0


class Mailslots:
    """One worker's slots, and puts into the other workers' slots. All workers construct and close it together.

    `same_host`: whether all workers are processes of one host.

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
        same_host: bool = False,
        chunk_bytes: int = PUT_CHUNK_BYTES,
    ) -> None:
        self.transport = transport
        self.numel = numel
        self.dtype = np.dtype(dtype)
        self.buffers = buffers
        self._chunk_bytes = chunk_bytes
        self._stride = -(-(HEADER_BYTES + numel * self.dtype.itemsize) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        self._window = transport.memory.window(buffers * self._stride, torch.uint8)
        self.memory = self._window.local.numpy().reshape(buffers, self._stride)
        self.counts = MessageCounts()
        self.lost: set[int] = set()
        """Lost peers, to which nothing is put any more."""
        self._latest = [0] * transport.size
        """The sequence number of each sender's latest collected message."""
        self._torn: list[bytes] = [b""] * buffers
        """The header of the last torn message of each slot, so that it is counted once."""
        self._sequence = 0
        """Messages of this worker, including dropped ones."""
        self._posted = self._done = 0
        self._queue = transport.runtime.queue(MAX_QUEUED_MESSAGES)
        self._moved = transport.runtime.event()
        self._failed: BaseException | None = None
        self._poster = None if same_host else transport.runtime.spawn(self._put_all, name="one-sided puts")

    # Out.

    @property
    def in_flight(self) -> int:
        """Posted messages that are not complete at their target."""
        return self._posted - self._done

    def post(self, state: Array, to: int, first: int = 0, count: int | None = None) -> bool:
        """Send a state, or `count` elements of it, to one other worker. False: it was dropped. Never waits."""
        if self._failed is not None:
            raise self._failed
        self._sequence += 1
        if to in self.lost or len(self._queue) >= MAX_QUEUED_MESSAGES:
            self.counts.dropped += 1
            return False
        values = state[first:] if count is None else state[first : first + count]
        self._posted += 1
        message = pack(self.transport.rank, self._sequence, first, values.astype(self.dtype, copy=False))
        if self._poster is None:
            self._deliver(to, message)
        else:
            self._queue.put((to, message), timeout=self.transport.timeout)
        return True

    def settle(self) -> None:
        """Wait until all posted messages are complete."""
        timeout = 2 * self.transport.timeout  # a put has its own
        while self.in_flight and self._failed is None:
            self._moved.clear()
            pending = f"{self.in_flight} posted states to be complete"
            if self.in_flight and not self._moved.wait(timeout, pending, hang=True):
                raise self.transport.failure(None, pending, timeout, None)

    # In.

    def collect(self) -> list[SlotMessage]:
        """The messages since the last call. It reads only this worker's own memory."""
        messages = []
        for number in range(self.buffers):
            message = self._read(number)
            if message is not None:
                messages.append(message)
        self.counts.received += len(messages)
        return messages

    def close(self) -> None:
        """Wait for the last messages and free the window. Every worker closes."""
        self.settle()
        if self._poster is not None:
            self._queue.put(None, timeout=self.transport.timeout)
            self._poster.join(self.transport.timeout)
        self.memory = self.memory.copy()
        self._window.close()

    # Within.

    def _read(self, number: int) -> SlotMessage | None:
        slot = self.memory[number]
        head = slot[:HEADER_BYTES].tobytes()
        sender, sequence, first, count = MESSAGE_FIELDS.unpack_from(head, CHECKSUM.size)
        if not sequence or (sender < len(self._latest) and sequence <= self._latest[sender]):
            return None
        whole = sender < len(self._latest) and first >= 0 and 0 < count <= self.numel - first
        if whole:
            data = slot[: HEADER_BYTES + count * self.dtype.itemsize].copy()
            whole = data[:HEADER_BYTES].tobytes() == head and is_whole(data)
        if not whole:
            self.counts.torn += head != self._torn[number]
            self._torn[number] = head
            return None
        self._latest[sender] = sequence
        return SlotMessage(first, data[HEADER_BYTES:].view(self.dtype), sender, sequence)

    def _put_all(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            try:
                self._deliver(*item)
            except BaseException as error:  # the next post raises it
                self._failed = error
                raise

    def _deliver(self, to: int, message: Array) -> None:
        try:
            self._put(to, message)
        except PeerLostError as error:
            logger.warning("rank %d sends its state no more to rank %d: %s", self.transport.rank, to, error)
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
        for start in range(0, len(message), self._chunk_bytes):
            self._window.put(data[start : start + self._chunk_bytes], to, offset + start)
        self._window.flush(to)
        self.counts.sent += 1
        self.counts.sent_bytes += len(message)


def pack(sender: int, sequence: int, first: int, values: Array) -> Array:
    """A message as bytes."""
    data = np.empty(HEADER_BYTES + values.nbytes, np.uint8)
    MESSAGE_FIELDS.pack_into(data.data, CHECKSUM.size, sender, sequence, first, len(values))
    data[HEADER_BYTES:] = np.ascontiguousarray(values).view(np.uint8)
    CHECKSUM.pack_into(data.data, 0, zlib.crc32(data[CHECKSUM.size :].data))
    return data


def is_whole(data: Array) -> bool:
    """Whether a message's checksum matches its bytes.

    >>> message = pack(1, 1, 0, np.ones(4))
    >>> message_half_old = np.concatenate([message[:40], pack(1, 2, 0, np.zeros(4))[40:]])
    >>> is_whole(message), is_whole(message_half_old)
    (True, False)
    """
    (told,) = CHECKSUM.unpack_from(data.data)
    return int(told) == zlib.crc32(data[CHECKSUM.size :].data)


def on_same_host(world: World) -> bool:
    """Whether all workers are processes of one host, whose windows are shared memory."""
    return not world.transport.timing.virtual and len(set(world.hosts)) == 1
