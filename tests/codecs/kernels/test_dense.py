"""The dense kernels: numba's give the same bits as plain torch, and the random bits are those that are written down."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice
from syncline.codecs.cast import Cast
from syncline.codecs.kernels import dispatch
from syncline.codecs.kernels.dispatch import fused, reference_only
from syncline.codecs.kernels.random_bits import random_bits
from syncline.codecs.onebit import OneBit
from syncline.codecs.quantize import Quantize
from syncline.codecs.ternary import Ternary

SIZES = (0, 1, 2, 7, 8, 63, 64, 65, 1023, 1024, 1025, 5000)
CASES = [*((size, 1.0) for size in SIZES), *((1025, scale) for scale in (1e-42, 1e-20, 1e20, 1e38))]
CODECS = [
    *(Quantize(bits) for bits in range(2, 9)),
    *(Quantize(bits, bucket=100, norm="l2") for bits in range(2, 9)),
    *(Quantize(4, bucket=bucket, norm=norm, stochastic=False) for bucket in (3, 64, 1024) for norm in ("max", "l2")),
    *(OneBit(bucket) for bucket in (3, 100, 1024)),
    *(Ternary(clip=clip, bucket=bucket) for clip in (None, 0.5, 2.5) for bucket in (None, 33, 1024)),
    *(Cast(to, stochastic=True) for to in ("fp16", "bf16")),
]

needs_numba = pytest.mark.skipif(not fused(torch.zeros(1)), reason="needs numba")


@dataclass
class Trip:
    """A part encoded and decoded: everything that a kernel has written."""

    body: Tensor
    residual: Tensor | None
    out: Tensor
    added: Tensor

    def bits(self) -> Tensor:
        written = [self.body, self.out, self.added] + ([] if self.residual is None else [self.residual])
        return torch.cat([each.view(torch.uint8) for each in written])


def trip(codec: PayloadCodec, values: Tensor, residual: Tensor | None) -> Trip:
    part = TensorSlice(values.clone(), "w", residual=None if residual is None else residual.clone())
    whole = torch.full((3 + codec.body_bytes(part.numel) + 5,), 0xA5, dtype=torch.uint8)
    body = whole[3:-5]  # where no float begins
    assert codec.write(part, body, RngKey(1, 2, 3, "w", start=17)) == body.numel()
    assert torch.equal(part.flat, values)
    assert whole[:3].tolist() + whole[-5:].tolist() == [0xA5] * 8
    made = Trip(body, part.residual, torch.full_like(values, 9.0), values.flip(0).contiguous())
    codec.read(body, made.out, accumulate=False)
    codec.read(body, made.added, accumulate=True)
    return made


@needs_numba
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_fused_is_the_reference_bit_for_bit(codec: PayloadCodec) -> None:
    for size, scale in CASES:
        generator = torch.Generator().manual_seed(size)
        values = (scale * torch.randn(size, generator=generator)).clamp(-2e38, 2e38)
        residual = (scale * torch.randn(size, generator=generator)).clamp(-1e38, 1e38)
        values[::5] = 0.0
        values[1::7] = -0.0
        residual[::10] = 0.0
        for kept in (None, residual):
            with reference_only():
                slow = trip(codec, values, kept)
            assert torch.equal(trip(codec, values, kept).bits(), slow.bits()), f"{size} elements of about {scale}"


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_the_body_does_not_say_is_left(codec: PayloadCodec) -> None:
    """Exactly: e − decode(body), as float32 gives it; and adding is adding."""
    generator = torch.Generator().manual_seed(3)
    values, residual = torch.randn(2, 2500, generator=generator)
    made = trip(codec, values, residual)
    assert made.residual is not None
    assert torch.equal(made.residual, (residual + values) - made.out)
    assert torch.equal(made.added, values.flip(0) + made.out)


def test_random_bits_as_they_are_written_down() -> None:
    """By plain whole numbers, over the place where 32 bits end."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    start, key = 2**32 - 5, 0xDEADBEEF
    wanted = [mix((((start + j) & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF) ^ key) for j in range(20)]
    assert random_bits(key, start, 20).tolist() == wanted


def test_random_bits_are_uniform() -> None:
    """A sixteenth of them in each sixteenth, for neighbours of one key and for one position over many keys."""
    count = 160_000
    over_keys = torch.cat([random_bits(RngKey(seed).key, 5, 1) for seed in range(2000)]) >> 28
    for found in (random_bits(1234, 0, count) >> 28, over_keys):
        expected = found.numel() / 16
        counts = torch.bincount(found, minlength=16)
        assert bool(((counts - expected).abs() < 5 * expected**0.5).all()), counts


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("codec", [Cast("bf16", stochastic=True), Quantize(4), Ternary(bucket=1024)], ids=repr)
def test_the_slice_of_a_part_gets_its_own_bits(codec: PayloadCodec, plain: bool) -> None:
    """Drawn with `start`, a slice is rounded as within the whole."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))

    def decoded(row: Tensor, start: int) -> Tensor:
        body, out = torch.zeros(codec.body_bytes(row.numel()), dtype=torch.uint8), torch.empty(row.numel())
        codec.write(TensorSlice(row), body, RngKey(5, start=start))
        codec.read(body, out, accumulate=False)
        return out

    with reference_only() if plain else nullcontext():
        assert torch.equal(decoded(values, 0)[2048:], decoded(values[2048:], 2048))


def test_without_numba_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    dispatch.has_numba.cache_clear()
    try:
        assert not fused(torch.zeros(3))
        made = trip(Quantize(4, stochastic=False), torch.tensor([7.0, -7.0, 1.0]), None)
        assert made.out.tolist() == [7.0, -7.0, 1.0]
    finally:
        monkeypatch.undo()
        dispatch.has_numba.cache_clear()


def test_reference_only_ends_with_its_context() -> None:
    before = fused(torch.zeros(1))
    with reference_only():
        assert not fused(torch.zeros(1))
    assert fused(torch.zeros(1)) == before
    assert not fused(torch.zeros(1, device="meta"))


@needs_numba
def test_where_nothing_can_be_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba refuses to cache without a place for it: then it compiles without."""
    import numba

    from syncline.codecs.kernels.dense_fused import jit

    asked = []

    def njit(**options: bool) -> Callable[[Any], Any]:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", njit)
    assert jit(len)("four") == 4
    assert asked == [{"nogil": True, "cache": True}, {"nogil": True}]
