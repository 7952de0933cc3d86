"""Channels for tensors as they are between GPUs, in order and without tags, made of the messages of any transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.parallel.boundary import HEADERS_TAG
from syncline.transports import Handle, Transport
from syncline.transports.base import PendingTensor, TensorChannels

BODIES_TAG = HEADERS_TAG - 1


@dataclass
class OrderedBody:
    """A receive that was posted."""

    data: Tensor
    handle: Handle

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.data


class OrderedChannel:
    """One direction between two ranks."""

    def __init__(self, channels: OrderedChannels, peer: int) -> None:
        self.channels, self.peer = channels, peer

    def carries(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()  # integers stand for tensors on another device

    def send(self, data: Tensor, pending: str) -> None:
        self.channels.calls["send"] += 1
        self.channels.transport.send(data, self.peer, BODIES_TAG, exact=True)

    def receive(self, nbytes: int, pending: str) -> PendingTensor:
        self.channels.calls["receive"] += 1
        data = torch.empty(nbytes, dtype=torch.uint8)
        return OrderedBody(data, self.channels.transport.recv(data, self.peer, BODIES_TAG, exact=True))


class OrderedChannels(TensorChannels):
    """The channels of one rank between all pairs that it was made for."""

    def __init__(self, transport: Transport, pairs: Iterable[tuple[int, int]]) -> None:
        self.transport, self.pairs = transport, set(pairs)
        self.calls: Counter[str] = Counter()

    def find(self, source: int, destination: int) -> OrderedChannel | None:
        if (source, destination) not in self.pairs:
            return None
        return OrderedChannel(self, destination if source == self.transport.rank else source)


def ordered_channels(transport: Transport, pairs: Iterable[tuple[int, int]], device: torch.device) -> OrderedChannels:
    """In place of `Transport.tensor_channels`."""
    return OrderedChannels(transport, pairs)
