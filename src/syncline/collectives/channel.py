"""Collectives on a channel by our schedules. In place, on contiguous tensors.

Every rank of the channel calls the same function with the same shapes. One call runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.collectives.base import Operation, Round, Schedule
from syncline.collectives.executor import Chunks, DenseChunks, SeparateChunks, chunk_edges, execute
from syncline.collectives.schedules import build
from syncline.runtime import Runtime
from syncline.transports import Op, Transport

__all__ = ["BufferPool", "Channel", "allreduce", "barrier", "broadcast", "move_pieces", "reduce", "reduce_scatter"]

CPU = torch.device("cpu")
LANES_FROM_CHUNK_BYTES = 1 << 20
"""Chunks of at least this size are worth the extra messages of several lanes."""


class BufferPool:
    """Byte buffers that are reused from one call to the next, by length. Safe for several tasks.

    Fresh pages cost more time than the bytes that they hold.
    """

    def __init__(self, runtime: Runtime, max_bytes: int = 1 << 28) -> None:
        self._lock = runtime.lock(short=True)
        self._max_bytes = max_bytes
        self._free: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._free_bytes = 0

    def take(self, nbytes: int, device: torch.device = CPU) -> Tensor:
        """A buffer of `nbytes` bytes."""
        with self._lock:
            free = self._free.get((device, nbytes))
            if free:
                self._free_bytes -= nbytes
                return free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer. If the pool would exceed its limit, all free buffers are dropped first."""
        nbytes = buffer.numel()
        with self._lock:
            if self._free_bytes + nbytes > self._max_bytes:
                self._free.clear()
                self._free_bytes = 0
            if nbytes <= self._max_bytes:
                self._free.setdefault((buffer.device, nbytes), []).append(buffer)
                self._free_bytes += nbytes

    def clear(self) -> None:
        """Drop all free buffers."""
        with self._lock:
            self._free.clear()
            self._free_bytes = 0


@dataclass
class Channel:
    """A transport, with what the schedules need: the host of each rank, and buffers."""

    transport: Transport
    hosts: tuple[int, ...]
    buffers: BufferPool
    lanes: int = 1
    """Number of lanes of a large reduction, the same on every rank."""

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def lanes_for(self, schedule: Schedule, nbytes: int) -> int:
        """Number of lanes for a reduction of `nbytes` bytes: more than one only where chunks are large."""
        large = nbytes // schedule.chunks_for(self.size, self.hosts) >= LANES_FROM_CHUNK_BYTES
        return self.lanes if schedule.supports_lanes and large else 1


def allreduce(channel: Channel, tensor: Tensor, op: Op, schedule: Schedule, lanes: int | None = None) -> None:
    """Reduce in place on every rank; the same bits everywhere.

    With several lanes, one combines while the bytes of another are on the wire, at the price of more messages.
    `lanes` None: as many as `Channel.lanes_for` says.
    """
    lanes = lanes or channel.lanes_for(schedule, tensor.numel() * tensor.element_size())
    _reduction(channel, tensor, op, schedule, 0, lanes)


def reduce(channel: Channel, tensor: Tensor, op: Op, root: int, schedule: Schedule) -> None:
    """Reduce in place on the root; the other ranks' tensors hold partial sums afterwards."""
    _reduction(channel, tensor, op, schedule, root, 1)


def broadcast(channel: Channel, tensor: Tensor, root: int, schedule: Schedule) -> None:
    """Copy the root's tensor to every rank."""
    _reduction(channel, tensor, "sum", schedule, root, 1)


def reduce_scatter(channel: Channel, tensor: Tensor, edges: Sequence[int], op: Op, schedule: Schedule) -> None:
    """Reduce chunk i, from edges[i] to edges[i + 1], in place on rank i; the rest holds partial sums."""
    setting = schedule.setting(channel.size, hosts=channel.hosts)
    chunks = DenseChunks(tensor, edges, op, channel.buffers)
    channel.transport.monitor.enter(_name(schedule, tensor))
    execute(channel.transport, [(schedule.rounds(channel.rank, setting), chunks)])


def barrier(channel: Channel) -> None:
    """Return when every rank of the channel has called it."""
    allreduce(channel, torch.zeros(1, dtype=torch.uint8), "sum", build("allreduce", "recursive_doubling"))


def move_pieces(
    channel: Channel, operation: Operation, pieces: Mapping[int, Tensor], algorithm: str, root: int = 0
) -> None:
    """Move tensors of any sizes, by chunk number: all-gather, all-to-all, gather and scatter."""
    schedule = build(operation, algorithm)
    setting = schedule.setting(channel.size, root, channel.hosts)
    channel.transport.monitor.enter(f"{operation} by {schedule}")
    execute(channel.transport, [(schedule.rounds(channel.rank, setting), SeparateChunks(pieces))])


def _reduction(channel: Channel, tensor: Tensor, op: Op, schedule: Schedule, root: int, lanes: int) -> None:
    setting = schedule.setting(channel.size, root, channel.hosts)
    flat = tensor.view(-1)
    parts = chunk_edges(flat.numel(), lanes)
    work: list[tuple[Iterator[Round], Chunks]] = []
    for lane in range(lanes):
        part = flat[parts[lane] : parts[lane + 1]]
        work.append(
            (
                schedule.rounds(channel.rank, setting),
                DenseChunks(part, chunk_edges(part.numel(), setting.chunks), op, channel.buffers),
            )
        )
    channel.transport.monitor.enter(_name(schedule, tensor))
    execute(channel.transport, work)


def _name(schedule: Schedule, tensor: Tensor) -> str:
    return f"{schedule.operation} of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} by {schedule}"
