"""Headers: what is packed is read again, and nothing else is."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ProtocolError
from syncline.server import protocol
from syncline.server.protocol import REPLY_BYTES, REQUEST_BYTES, ReplyHeader, RequestHeader
from tests.server.handler_client import body_of, handler_with

U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
U32, U16 = st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
requests = st.builds(
    RequestHeader, kind=st.sampled_from(protocol.KINDS), flags=st.integers(0, protocol.ALL_FLAGS), dtype=U16,
    state_slot=U16, space=U32, handler=U32, seed=U32, clock=I64, min_clock=I64, number=U64, after=U64,
    acked=U64, first=U64, count=U64,
    rate=st.floats(allow_nan=False), scale=st.floats(allow_nan=False), digest=U64, length=U64, replica=U32,
    reply_from=U32,
)  # fmt: skip
replies = st.builds(
    ReplyHeader, status=st.integers(protocol.OK, protocol.ORPHANED), flags=U16, live=U16, handler=U16, space=U32,
    number=U64, staleness=I64, min_clock=I64, steps=U64, length=U64,
)  # fmt: skip


@given(requests)
def test_a_request_is_read_as_it_was_packed(request: RequestHeader) -> None:
    data = request.pack()
    assert len(data) == REQUEST_BYTES
    assert RequestHeader.read(data + b"body") == request


@given(replies)
def test_a_reply_is_read_as_it_was_packed(reply: ReplyHeader) -> None:
    data = reply.pack()
    assert len(data) == REPLY_BYTES
    assert ReplyHeader.read(data) == reply


@given(st.binary(max_size=2 * REQUEST_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    for kind in (RequestHeader, ReplyHeader):
        with pytest.raises(ProtocolError):
            kind.read(data)


@given(requests, st.integers(0, 8 * (REQUEST_BYTES - 4) - 1))
def test_a_flipped_bit_is_noticed(request: RequestHeader, bit: int) -> None:
    data = bytearray(request.pack())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        RequestHeader.read(bytes(data))


@given(requests, st.integers(0, REQUEST_BYTES - 1))
def test_a_truncated_header_is_noticed(request: RequestHeader, length: int) -> None:
    with pytest.raises(ProtocolError, match="shorter than its header"):
        RequestHeader.read(request.pack()[:length])


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, b"X", "not a Syncline message"), (4, b"\x09", "it has version 9"), (5, b"\x63", "unknown kind 99"),
     (7, b"\x80", "unknown kind")],
)  # fmt: skip
def test_fields_are_checked_after_the_checksum(at: int, value: bytes, message: str) -> None:
    data = bytearray(RequestHeader(protocol.PULL).pack()[:-8])
    data[at : at + 1] = value
    whole = bytes(data) + zlib.crc32(bytes(data)).to_bytes(4, "little") + bytes(4)
    with pytest.raises(ProtocolError, match=message):
        RequestHeader.read(whole)


def test_any_fields_get_a_reply_or_a_refusal() -> None:
    """The handler raises nothing, a refused request changes nothing, and other clients are served afterwards."""
    draw = random.Random(7)
    mine, other = handler_with(0, 1, rules=("adagrad(0.5)",), codec=None)
    other.push(torch.ones(8))
    extremes = [0, 1, 2, 3, 7, 8, 9, 255, 2**16 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
    most = {
        "flags": protocol.ALL_FLAGS,
        "dtype": 2**16 - 1,
        "state_slot": 2**16 - 1,
        "handler": 2**32 - 1,
        "clock": 2**63 - 1,
    }
    names = [*most, "seed", "min_clock", "after", "acked", "first", "count", "digest"]
    most |= {"clock": 2**63 - 1, "seed": 2**32 - 1, "min_clock": 2**63 - 1}
    refused = 0
    for _ in range(3000):
        chosen = draw.sample(names, draw.randint(1, 3))
        fields: dict[str, Any] = {name: min(draw.choice(extremes), most.get(name, 2**64 - 1)) for name in chosen}
        fields |= {"rate": draw.choice([float("nan"), float("inf"), 1.0]), "scale": draw.choice([float("-inf"), 1.0])}
        kind = draw.choice([protocol.PUSH, protocol.PULL, protocol.PUSH_PULL, protocol.CONTROL])
        length = draw.choice([0, 4, 8, 12, 32, 96])
        body = torch.tensor([draw.randrange(256) for _ in range(length)], dtype=torch.uint8)
        before = mine.space.weights.clone()
        answers = mine.send(RequestHeader(kind, **fields), body, number=draw.choice([None, None, 2**40]))
        statuses = {answer.header.status for answer in answers}
        if statuses <= {protocol.REFUSED, protocol.NEED_KEYS}:  # or parked, and then nothing is changed either
            refused += 1
            assert torch.equal(mine.space.weights.nan_to_num(7.0), before.nan_to_num(7.0)), fields
        mine.acked = mine.handler.sessions[mine.description.space_id, 0].applied
    assert refused > 1000
    first = mine.space.weights[:4].clone()
    assert (
        other.ask(RequestHeader(protocol.PUSH, first=4, count=4), body_of(torch.ones(4))).header.status == protocol.OK
    )
    assert torch.equal(mine.space.weights[:4].nan_to_num(7.0), first.nan_to_num(7.0))
