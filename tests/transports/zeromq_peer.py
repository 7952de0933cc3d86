"""One side of the protocol between two ZeroMQ nodes, without a socket, and limits that a few messages reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError
from syncline.runtime import RealRuntime
from syncline.transports.messages import HEADER_BYTES, Mailbox, MessageHeader, PostedReceive
from syncline.transports.zeromq.connection import FRAME_KINDS, PeerConnection

SMALL = {
    "MAX_EAGER_BYTES": 8,
    "CREDIT_BYTES": 64,
    "CREDIT_MESSAGES": 12,
    "PART_BYTES": 16,
    "MAX_INFLIGHT_BYTES": 64,
    "MAX_OFFERS": 6,
}
"""Limits that a few messages reach."""


def blank(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8)


def loss(posted: PostedReceive) -> PeerLostError:
    return PeerLostError("rank 1 is gone", peer=1)


class Ear:
    """The connection from rank 0 to rank 1, and the frames that it sends."""

    def __init__(self) -> None:
        self.box = Mailbox(RealRuntime())
        self.said: list[tuple[int, int, int]] = []
        self.connection = PeerConnection(RealRuntime(), 0, 1, self.note, lambda channel: self.box)

    def note(self, frames: Sequence[Any]) -> None:
        header = MessageHeader.read(bytes(frames[0])[:HEADER_BYTES], 0, FRAME_KINDS)
        self.said.append((header.kind, header.number, header.length))

    def hears(self, kind: int, number: int = 0, length: int = 0, body: bytes = b"") -> None:
        self.connection.receive(MessageHeader(1, 0, length, number, kind), memoryview(body))

    def post(self, room: int) -> PostedReceive:
        return self.box.post(blank(room), 1, 0, False)


def refused(ear: Ear, match: str, kind: int, number: int = 0, length: int = 0, body: bytes = b"") -> None:
    with pytest.raises(ProtocolError, match=f"rank 1 broke the protocol: .*{match}") as caught:
        ear.hears(kind, number, length, body)
    assert caught.value.peer == 1
