"""Headers: a packed header is read back, and any other bytes are refused with the peer's rank."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import ProtocolError
from syncline.transports.messages import HEADER_BYTES, MAX_MESSAGE_BYTES, MessageHeader

repeatable = settings(derandomize=True, deadline=None)

u32 = st.integers(0, 2**32 - 1)
headers = st.builds(
    MessageHeader,
    sender=u32,
    tag=u32,
    length=st.integers(0, MAX_MESSAGE_BYTES),
    number=u32,
    kind=st.just(1),
    channel=u32,
)

GOOD = MessageHeader(sender=3, tag=7, length=4096, number=1)


def forged(
    magic: bytes = b"SYNC",
    version: int = 1,
    kind: int = 1,
    reserved: int = 0,
    sender: int = 3,
    tag: int = 7,
    length: int = 4096,
    number: int = 1,
    channel: int = 0,
) -> bytes:
    """A header made by hand from the diagram in messages.py, with a valid checksum for any fields."""
    fields = magic + struct.pack("<BBHIIQII", version, kind, reserved, sender, tag, length, number, channel)
    return fields + struct.pack("<I", zlib.crc32(fields))


def test_the_bytes_are_those_drawn() -> None:
    """Thirty-six bytes, little-endian, each field where the drawing has it."""
    data = GOOD.pack()
    assert HEADER_BYTES == len(data) == 36
    assert data == forged()
    assert data[:4] == b"SYNC"
    assert data[8:12] == bytes([3, 0, 0, 0])
    assert data[16:24] == bytes([0, 16, 0, 0, 0, 0, 0, 0])


@repeatable
@given(headers)
def test_round_trip(header: MessageHeader) -> None:
    """What is packed is read back equal, from the rank that sent it."""
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert MessageHeader.read(data, peer=header.sender) == header


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "0 bytes where 36 were expected", id="nothing"),
        pytest.param(GOOD.pack()[:-1], "35 bytes where 36 were expected", id="short"),
        pytest.param(GOOD.pack() + b"\0", "37 bytes where 36 were expected", id="long"),
        pytest.param(forged(magic=b"HTTP"), "it starts with b'HTTP', not b'SYNC'", id="magic"),
        pytest.param(forged(version=2), "it has version 2, this is version 1", id="version"),
        pytest.param(GOOD.pack()[:-4] + bytes(4), "its checksum does not match", id="checksum"),
        pytest.param(forged(kind=2), "unknown kind 2", id="kind"),
        pytest.param(forged(sender=4), "it claims to come from rank 4", id="sender"),
        pytest.param(forged(length=MAX_MESSAGE_BYTES + 1), f"a length of {MAX_MESSAGE_BYTES + 1} bytes", id="length"),
        pytest.param(forged(length=2**64 - 1), f"a length of {2**64 - 1} bytes", id="huge length"),
        pytest.param(bytes(36), "not a Syncline message", id="zeros"),
    ],
)
def test_refusals(data: bytes, reason: str) -> None:
    """Each possible fault raises a ProtocolError with the reason and the sender."""
    with pytest.raises(ProtocolError) as caught:
        MessageHeader.read(data, peer=3)
    assert str(caught.value).startswith("header from rank 3 refused: ")
    assert reason in str(caught.value)
    assert caught.value.peer == 3


def test_the_longest_length_is_read() -> None:
    """The limit itself is still allowed."""
    assert MessageHeader.read(forged(length=MAX_MESSAGE_BYTES), peer=3).length == MAX_MESSAGE_BYTES


@settings(repeatable, max_examples=300)
@given(
    st.binary(max_size=80)
    | st.binary(min_size=36, max_size=36)
    | st.binary(min_size=31, max_size=31).map(lambda b: b"SYNC\x01" + b)
)
def test_random_bytes_are_refused(data: bytes) -> None:
    """Random bytes are refused, of any length and with any beginning."""
    with pytest.raises(ProtocolError, match="header from rank 5 refused") as caught:
        MessageHeader.read(data, peer=5)
    assert caught.value.peer == 5


@repeatable
@given(headers, st.sets(st.integers(0, 36 * 8 - 1), min_size=1, max_size=5))
def test_flipped_bits_are_refused(header: MessageHeader, bits: set[int]) -> None:
    """A header damaged in a few bits is refused; CRC-32 finds any five in so short a text."""
    data = bytearray(header.pack())
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=f"header from rank {header.sender} refused"):
        MessageHeader.read(bytes(data), peer=header.sender)


def test_every_single_bit_counts() -> None:
    """All 288 headers that differ in one bit are refused."""
    for bit in range(288):
        data = bytearray(GOOD.pack())
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            MessageHeader.read(bytes(data), peer=3)


@settings(repeatable, max_examples=300)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "magic": st.sampled_from([b"SYNC", b"sync", bytes(4)]),
            "version": st.integers(0, 255),
            "kind": st.integers(0, 255),
            "sender": st.integers(0, 5) | u32,
            "tag": u32,
            "length": st.integers(0, 2**64 - 1) | st.integers(MAX_MESSAGE_BYTES - 2, MAX_MESSAGE_BYTES + 2),
            "number": u32,
        },
    )
)
def test_forged_headers(fields: dict[str, Any]) -> None:
    """With a right checksum, a header is read exactly when every field is allowed, and then as it was written."""
    plain: dict[str, Any] = {
        "magic": b"SYNC",
        "version": 1,
        "kind": 1,
        "sender": 3,
        "tag": 7,
        "length": 4096,
        "number": 1,
    } | fields
    must_be = {"magic": b"SYNC", "version": 1, "kind": 1, "sender": 3}
    allowed = all(plain[name] == value for name, value in must_be.items()) and plain["length"] <= MAX_MESSAGE_BYTES
    data = forged(**fields)
    if not allowed:
        with pytest.raises(ProtocolError) as caught:
            MessageHeader.read(data, peer=3)
        assert caught.value.peer == 3
        return
    header = MessageHeader.read(data, peer=3)
    assert {name: getattr(header, name) for name in ("kind", "sender", "tag", "length", "number")} == {
        name: plain[name] for name in ("kind", "sender", "tag", "length", "number")
    }
    assert header.pack() == data
