"""The collectives on a channel: the engine's own, or a schedule of ours. In place, on contiguous tensors.

Every rank of the channel calls the same function with the same shapes; one call runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.collectives.base import Operation, Round, Schedule
from syncline.collectives.buffers import Buffers
from syncline.collectives.carriers import Carrier, DenseCarrier, PiecesCarrier, bounds
from syncline.collectives.catalog import build
from syncline.collectives.executor import execute
from syncline.transports import Op, Transport

__all__ = ["Channel", "allreduce", "broadcast", "exchange", "meet", "reduce", "reduce_scatter"]


LARGE = 1 << 20
"""Bytes of a chunk from which on lanes are worth their extra messages."""


@dataclass
class Channel:
    """A transport with what the schedules need to know and keep: the host of each rank, buffers."""

    transport: Transport
    hosts: tuple[int, ...]
    buffers: Buffers
    lanes: int = 1
    """Parts in which a large reduction is overlapped: the same number on every rank."""

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def lanes_for(self, schedule: Schedule, nbytes: int) -> int:
        """In how many parts a reduction of so many bytes is overlapped: only large chunks are."""
        large = nbytes // schedule.cut(self.size, self.hosts) >= LARGE
        return self.lanes if schedule.laned and large else 1


def allreduce(channel: Channel, tensor: Tensor, op: Op, schedule: Schedule, lanes: int | None = None) -> None:
    """Reduce in place on every rank; the same bits everywhere.

    With more than one lane, parts of the data combine while others are on the wire, at the price of more messages.
    Without a number the channel's own is taken where chunks are large.
    """
    lanes = lanes or channel.lanes_for(schedule, tensor.numel() * tensor.element_size())
    _reduction(channel, tensor, op, schedule, 0, lanes)


def reduce(channel: Channel, tensor: Tensor, op: Op, root: int, schedule: Schedule) -> None:
    """Reduce in place on the root; the others' tensors are left in some state between."""
    _reduction(channel, tensor, op, schedule, root, 1)


def broadcast(channel: Channel, tensor: Tensor, root: int, schedule: Schedule) -> None:
    """Copy the root's tensor to every rank."""
    _reduction(channel, tensor, "sum", schedule, root, 1)


def reduce_scatter(channel: Channel, tensor: Tensor, edges: Sequence[int], op: Op, schedule: Schedule) -> None:
    """Reduce chunk i, from edges[i] to edges[i + 1], in place on rank i; the rest is left in some state between."""
    setting = schedule.setting(channel.size, hosts=channel.hosts)
    carrier = DenseCarrier(tensor, edges, op, channel.buffers)
    channel.transport.monitor.enter(_name(schedule, tensor))
    execute(channel.transport, [(schedule.rounds(channel.rank, setting), carrier)])


def meet(channel: Channel) -> None:
    """Return when every rank of the channel has called it; the last to call it returns almost at once."""
    allreduce(channel, torch.zeros(1, dtype=torch.uint8), "sum", build("allreduce", "recursive_doubling"))


def exchange(
    channel: Channel, operation: Operation, pieces: Mapping[int, Tensor], algorithm: str, root: int = 0
) -> None:
    """Move pieces by chunk number: all-gather, all-to-all, gather and scatter of any sizes."""
    schedule = build(operation, algorithm)
    setting = schedule.setting(channel.size, root, channel.hosts)
    channel.transport.monitor.enter(f"{operation} by {schedule}")
    execute(channel.transport, [(schedule.rounds(channel.rank, setting), PiecesCarrier(pieces))])


def _reduction(channel: Channel, tensor: Tensor, op: Op, schedule: Schedule, root: int, lanes: int) -> None:
    setting = schedule.setting(channel.size, root, channel.hosts)
    flat = tensor.view(-1)
    parts = bounds(flat.numel(), lanes)
    work: list[tuple[Iterator[Round], Carrier]] = []
    for lane in range(lanes):
        part = flat[parts[lane] : parts[lane + 1]]
        work.append(
            (
                schedule.rounds(channel.rank, setting),
                DenseCarrier(part, bounds(part.numel(), setting.chunks), op, channel.buffers),
            )
        )
    channel.transport.monitor.enter(_name(schedule, tensor))
    execute(channel.transport, work)


def _name(schedule: Schedule, tensor: Tensor) -> str:
    return f"{schedule.operation} of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} by {schedule}"
