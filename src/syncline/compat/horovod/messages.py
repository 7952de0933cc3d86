"""Bodies of the messages between ranks and their coordinator."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.compat.horovod.negotiation import Answer
from syncline.compat.horovod.requests import Departure, Failed, Plan, Reader, Request, Writer

__all__ = [
    "as_tensor",
    "pack_answer",
    "pack_departure",
    "pack_requests",
    "read_answer",
    "read_departure",
    "read_requests",
]

_COUNTS = struct.Struct("<II")


def as_tensor(data: bytes | bytearray) -> Tensor:
    """Bytes, as transports take them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pack_requests(requests: Sequence[Request]) -> bytearray:
    """Requests one after the other."""
    writer = Writer()
    for request in requests:
        request.pack(writer)
    return writer.data


def read_requests(body: bytes, source: int) -> list[Request]:
    """What a rank asks for in full."""
    reader, found = Reader(body, source), []
    while reader.left():
        found.append(Request.read(reader))
    return found


def pack_answer(answer: Answer) -> bytearray:
    """What is not said by bits; nothing where bits say it all."""
    writer = Writer()
    if answer.plans or answer.failures:
        writer.put(_COUNTS, len(answer.plans), len(answer.failures))
        for plan in answer.plans:
            plan.pack(writer)
        for failure in answer.failures:
            failure.pack(writer)
    return writer.data


def read_answer(mask: int, body: bytes) -> Answer:
    """What the coordinator has told."""
    answer = Answer(mask)
    if body:
        reader = Reader(body, 0)
        plans, failures = reader.take(_COUNTS)
        answer.plans = [Plan.read(reader) for _ in range(plans)]
        answer.failures = [Failed.read(reader) for _ in range(failures)]
    return answer


def pack_departure(departure: Departure) -> bytearray:
    """Encode a rank's goodbye message."""
    writer = Writer()
    departure.pack(writer)
    return writer.data


def read_departure(body: bytes, source: int) -> Departure:
    """Decode a rank's goodbye message."""
    return Departure.read(Reader(body, source))
