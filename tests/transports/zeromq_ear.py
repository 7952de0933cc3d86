"""One side of a talk between ZeroMQ nodes, without a socket, and bounds that a few messages reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError
from syncline.runtime import RealRuntime
from syncline.transports.frames import HEADER_BYTES, Header
from syncline.transports.mailbox import Mailbox, Posted
from syncline.transports.zeromq.protocol import KINDS, Link

SMALL = {
    "AT_ONCE": 8,
    "ROOM": 64,
    "ROOM_MESSAGES": 12,
    "PART_BYTES": 16,
    "ON_THE_WAY": 64,
    "MOST_OFFERS": 6,
}
"""Bounds that a few messages reach."""


def blank(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8)


def loss(posted: Posted) -> PeerLostError:
    return PeerLostError("rank 1 is gone", peer=1)


class Ear:
    """Rank 0's link to rank 1, and what it says."""

    def __init__(self) -> None:
        self.box = Mailbox(RealRuntime())
        self.said: list[tuple[int, int, int]] = []
        self.link = Link(RealRuntime(), 0, 1, self.note, lambda channel: self.box)

    def note(self, frames: Sequence[Any]) -> None:
        header = Header.read(bytes(frames[0])[:HEADER_BYTES], 0, KINDS)
        self.said.append((header.kind, header.number, header.length))

    def hears(self, kind: int, number: int = 0, length: int = 0, body: bytes = b"") -> None:
        self.link.receive(Header(1, 0, length, number, kind), memoryview(body))

    def post(self, room: int) -> Posted:
        return self.box.post(blank(room), 1, 0, False)


def refused(ear: Ear, match: str, kind: int, number: int = 0, length: int = 0, body: bytes = b"") -> None:
    with pytest.raises(ProtocolError, match=f"rank 1 broke the protocol: .*{match}") as caught:
        ear.hears(kind, number, length, body)
    assert caught.value.peer == 1
