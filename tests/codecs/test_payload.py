"""The header, and where bodies lie."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import (
    HEADER,
    CodecTraits,
    PayloadCodec,
    RngKey,
    TensorSlice,
    max_payload_bytes,
    pack,
    pack_into,
    unpack,
)
from syncline.codecs.raw import Raw
from syncline.errors import ProtocolError


@dataclass(frozen=True, repr=False)
class Counted(PayloadCodec):
    """Float32 without the zeros at its end: a body whose length varies. It keeps what it was asked to write."""

    name: ClassVar[str] = "counted"
    codec_id: ClassVar[int] = 200

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(fixed_length=False)

    def body_bytes(self, numel: int, step: int = 0) -> int:
        return 4 * numel

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        assert body.numel() == self.body_bytes(part.numel)
        assert (rng.name, rng.start) == (part.name, part.start)
        used = 4 * int(part.flat.count_nonzero())
        body[:used].copy_(part.flat.view(torch.uint8)[:used])
        return used

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        if body.numel() > 4 * out.numel() or body.numel() % 4:
            raise ProtocolError(f"{body.numel()} B do not fit")
        out.zero_()
        out[: body.numel() // 4] = torch.frombuffer(bytearray(body.numpy()), dtype=torch.float32) if len(body) else 0


def parts(*rows: list[float]) -> list[TensorSlice]:
    return [TensorSlice(torch.tensor(row), f"p{index}", start=index) for index, row in enumerate(rows)]


def test_the_layout_of_fixed_bodies() -> None:
    payload = bytes(pack(Raw(), parts([1.0, 2.0], [], [3.0]), RngKey()).numpy())
    head = struct.pack("<HBBIQ", 0x51C7, 1, 10, zlib.crc32(b"raw"), 3)
    assert payload == head + struct.pack("<3f", 1, 2, 3)
    assert len(payload) == max_payload_bytes(Raw(), [2, 0, 1])


def test_the_layout_of_bodies_that_vary() -> None:
    payload = bytes(pack(Counted(), parts([1.0, 0.0], [], [3.0]), RngKey()).numpy())
    head = struct.pack("<HBBIQ", 0x51C7, 1, 200, zlib.crc32(b"counted"), 3)
    assert payload == head + struct.pack("<IfIIf", 4, 1, 0, 4, 3)
    assert len(payload) < max_payload_bytes(Counted(), [2, 0, 1]) == HEADER.size + 3 * 4 + 3 * 4


def test_the_most_that_one_tensor_takes_counts_its_length_too() -> None:
    full = torch.ones(50)
    assert Raw().encode(full).numel() == Raw().max_bytes(50) == HEADER.size + 200
    assert Counted().encode(full).numel() == Counted().max_bytes(50) == HEADER.size + 4 + 200


@pytest.mark.parametrize("codec", [Raw(), Counted()], ids=repr)
def test_parts_come_back(codec: PayloadCodec) -> None:
    given = parts([1.0, 2.0, 0.0], [], [4.0], [5.0, 6.0])
    whole = torch.zeros(max_payload_bytes(codec, [3, 0, 1, 2]) + 10, dtype=torch.uint8)
    used = pack_into(codec, given, RngKey(), whole)
    outs = [torch.full((part.numel,), 9.0) for part in given]
    unpack(codec, whole[:used], outs, accumulate=False)
    assert [out.tolist() for out in outs] == [part.flat.tolist() for part in given]
    assert not whole[used:].any()


def test_no_parts_at_all() -> None:
    payload = pack(Raw(), [], RngKey())
    assert payload.numel() == HEADER.size
    unpack(Raw(), payload, [], accumulate=False)


@pytest.mark.parametrize("codec", [Raw(), Counted()], ids=repr)
def test_every_truncation_is_refused(codec: PayloadCodec) -> None:
    payload = pack(codec, parts([1.0, 2.0], [3.0]), RngKey())
    for length in range(payload.numel()):
        with pytest.raises(ProtocolError, match="truncated"):
            unpack(codec, payload[:length], [torch.empty(2), torch.empty(1)], accumulate=False)


def test_a_length_beyond_the_end_is_refused() -> None:
    payload = pack(Counted(), parts([1.0, 2.0]), RngKey())
    payload[HEADER.size + 3] = 255
    with pytest.raises(ProtocolError, match=r"ends within a body of 4278190088 B at 20: it is truncated"):
        unpack(Counted(), payload, [torch.empty(2)], accumulate=False)


def test_a_byte_too_many_is_refused() -> None:
    payload = pack(Raw(), parts([1.0]), RngKey())
    longer = torch.cat([payload, torch.zeros(1, dtype=torch.uint8)])
    with pytest.raises(ProtocolError, match="1 B too many"):
        unpack(Raw(), longer, [torch.empty(1)], accumulate=False)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, r"not a payload \(it begins with 0x5138, not 0x51c7\)"),
        (2, "version 254, and this is version 1"),
        (3, r"another codec \(kind 245\) than raw \(kind 10\)"),
        (4, r"another codec \(kind 10\) than raw"),
        (8, "holds 254 elements, and 1 are expected"),
        (15, r"holds \d{19,} elements"),
    ],
)
def test_a_foreign_header_is_refused_with_the_sender(at: int, message: str) -> None:
    payload = pack(Raw(), parts([1.0]), RngKey())
    payload[at] ^= 255
    with pytest.raises(ProtocolError, match=message) as caught:
        unpack(Raw(), payload, [torch.empty(1)], accumulate=False, sender=" of rank 3")
    assert "of rank 3" in str(caught.value)


def test_the_same_codec_with_other_settings_is_another() -> None:
    @dataclass(frozen=True, repr=False)
    class Other(Raw):
        bits: int = 3

    with pytest.raises(ProtocolError, match="another codec"):
        unpack(Raw(), pack(Other(bits=4), parts([1.0]), RngKey()), [torch.empty(1)], accumulate=False)


@pytest.mark.parametrize("payload", [torch.zeros(40), torch.zeros(5, 8, dtype=torch.uint8)], ids=["float", "rows"])
def test_what_is_no_row_of_bytes_is_refused(payload: Tensor) -> None:
    with pytest.raises(ProtocolError, match="row of bytes"):
        unpack(Raw(), payload, [torch.empty(1)], accumulate=False)


def test_raw_adds_and_empties_the_residual() -> None:
    residual = torch.tensor([0.5, 1.0])
    payload = Raw().encode(torch.tensor([1.0, 2.0]), residual=residual)
    assert Raw().decode(payload, torch.ones(2), accumulate=True).tolist() == [2.5, 4.0]
    assert residual.tolist() == [0, 0]


def test_raw_refuses_what_is_no_number() -> None:
    payload = Raw().encode(torch.ones(2))
    payload[-1], payload[-2] = 0x7F, 0xC0
    with pytest.raises(ProtocolError, match="NaN or Inf"):
        Raw().decode(payload, torch.empty(2))
