"""Lossless: every bit comes back, and a body that lies about itself is refused before anything is made room for."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
import torch
import zstandard
from torch import Tensor

from syncline.codecs.base import RngKey, TensorSlice
from syncline.codecs.lossless import Lossless
from syncline.errors import ProtocolError, SpecError


def body_of(values: Tensor, residual: Tensor | None = None, level: int = 1) -> Tensor:
    codec = Lossless(level)
    body = torch.zeros(codec.body_bytes(values.numel()), dtype=torch.uint8)
    return body[: codec.write(TensorSlice(values, residual=residual), body, RngKey())]


def as_body(how: int, data: bytes) -> Tensor:
    return torch.tensor([how, *data], dtype=torch.uint8)


@pytest.mark.parametrize("level", [1, 3, 19])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 1024, 5000])
def test_every_bit_comes_back(size: int, level: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    values[::3] = -0.0
    values[1::5] = 1e-45
    values[2::7] = 3.4028234663852886e38
    out = torch.ones(size)
    Lossless(level).read(body_of(values, level=level), out, accumulate=False)
    assert torch.equal(out.view(torch.int32), values.view(torch.int32))


def test_it_adds() -> None:
    values, out = torch.randn(100), torch.ones(100)
    Lossless().read(body_of(values), out, accumulate=True)
    assert torch.equal(out, 1 + values)


def test_gradients_shrink_and_noise_does_not_grow() -> None:
    """Exponents of one size compress; random bytes are stored, with one byte before them."""
    gradients = 0.01 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert body_of(gradients).numel() < 0.9 * 4 * gradients.numel()
    noise = torch.frombuffer(bytearray(random.Random(0).randbytes(4096)), dtype=torch.uint8)
    body = torch.zeros(Lossless.max_body_bytes(4096), dtype=torch.uint8)
    assert Lossless.compress(noise, body, width=1) == 4097 == Lossless.max_body_bytes(4096)
    assert torch.equal(Lossless.decompress(body, 4096, width=1), noise)


def test_shuffling_helps() -> None:
    values = (1 + torch.rand(50_000, generator=torch.Generator().manual_seed(0))).view(torch.uint8)
    body = torch.zeros(Lossless.max_body_bytes(values.numel()), dtype=torch.uint8)
    plain = Lossless.compress(values, body, width=1)
    assert Lossless.compress(values, body, width=4) < plain


@pytest.mark.parametrize("width", [1, 2, 4])
def test_numbers_of_any_width(width: int) -> None:
    raw = torch.arange(1000, dtype=torch.int64).view(torch.uint8)
    body = torch.zeros(Lossless.max_body_bytes(8000), dtype=torch.uint8)
    used = Lossless.compress(raw, body, width)
    assert used < 8000
    assert torch.equal(Lossless.decompress(body[:used], 8000, width), raw)


def test_a_residual_is_sent_and_gone() -> None:
    values, residual, out = torch.randn(50), torch.randn(50), torch.empty(50)
    wanted = residual + values
    Lossless().read(body_of(values, residual), out, accumulate=False)
    assert torch.equal(out, wanted)
    assert bool((residual == 0).all())


FRAME = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(4000))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4000))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (torch.zeros(0, dtype=torch.uint8), "begins with 0 or 1, not nothing"),
        (as_body(2, FRAME), "begins with 0 or 1, not 2"),
        (as_body(0, bytes(3999)), "holds 3999 B where 4000 B are expected"),
        (as_body(0, bytes(4001)), "holds 4001 B where 4000 B are expected"),
        (as_body(1, b""), "cannot be decompressed"),
        (as_body(1, b"\x28\xb5\x2f"), "cannot be decompressed"),
        (as_body(1, bytes(50)), "cannot be decompressed"),
        (as_body(1, FRAME[:-1]), "cannot be decompressed"),
        (as_body(1, FRAME[:-1] + bytes([FRAME[-1] ^ 1])), "cannot be decompressed"),
        (as_body(1, FRAME + b"\0"), "cannot be decompressed"),
        (as_body(1, FRAME + FRAME), "cannot be decompressed"),
        (as_body(1, UNSIZED), "where 4000 B are expected"),
        (as_body(1, zstandard.compress(bytes(4001))), "4001 B where 4000 B are expected"),
        (as_body(1, zstandard.compress(bytes(3999))), "3999 B where 4000 B are expected"),
    ],
)
def test_a_body_that_cannot_be(body: Tensor, message: str) -> None:
    out = torch.full((1000,), 5.0)
    with pytest.raises(ProtocolError, match=message):
        Lossless().read(body, out, accumulate=False)
    assert bool((out == 5.0).all())


def test_a_bomb_makes_no_room() -> None:
    """A few kilobytes that are said to hold, and do hold, 256 MB."""
    bomb = as_body(1, zstandard.compress(bytes(1 << 28)))
    assert bomb.numel() < 1 << 15
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="268435456 B where 4000 B are expected"):
            Lossless.decompress(bomb, 4000, width=4)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_holds_more_than_it_says() -> None:
    """Its header says 4000, and its blocks have 256 kB."""
    made = zstandard.ZstdCompressor().compressobj(size=1 << 18)
    long = bytearray(made.compress(bytes(1 << 18)) + made.flush())
    told = zstandard.get_frame_parameters(bytes(long))
    assert told.content_size == 1 << 18
    at = bytes(long).index((1 << 18).to_bytes(4, "little"))
    long[at : at + 4] = (4000).to_bytes(4, "little")
    assert zstandard.get_frame_parameters(bytes(long)).content_size == 4000
    with pytest.raises(ProtocolError, match="cannot be decompressed"):
        Lossless.decompress(as_body(1, bytes(long)), 4000, width=4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers(value: float) -> None:
    """Compressed by somebody else: they end here."""
    with pytest.raises(ProtocolError, match="holds NaN or Inf"):
        Lossless().read(body_of(torch.full((1000,), value)), torch.zeros(1000), accumulate=False)


@pytest.mark.parametrize(
    "arguments",
    [*({"level": level} for level in (0, 20, -1, 1.0, True, None)), {"feedback": 1}],
    ids=str,
)
def test_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"not {next(iter(arguments.values()))!r}"):
        Lossless(**arguments)


def test_its_spec() -> None:
    assert repr(Lossless()) == "lossless"
    assert repr(Lossless(5)) == "lossless(level=5)"
    assert Lossless().traits.exact
    assert not Lossless().keeps_residual
    assert not Lossless().traits.fixed_length
