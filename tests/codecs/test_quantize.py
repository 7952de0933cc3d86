"""Quantisation: right on average, within a level, zeros kept, and nothing odd from odd scales or odd bytes."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import RngKey, TensorSlice
from syncline.codecs.quantize import Quantize
from syncline.errors import DivergedError, ProtocolError, SpecError

BITS = range(2, 9)


def there_and_back(codec: Quantize, values: Tensor, rng: RngKey | None = None) -> Tensor:
    body = torch.zeros(codec.body_bytes(values.numel()), dtype=torch.uint8)
    codec.write(TensorSlice(values), body, rng or RngKey())
    out = torch.empty_like(values)
    codec.read(body, out, accumulate=False)
    return out


def level(codec: Quantize, values: Tensor) -> float:
    """How far apart levels are, where all share a bucket."""
    scale = float(values.abs().max() if codec.norm == "max" else values.double().norm())
    return scale / ((1 << (codec.bits - 1)) - 1)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_mean_of_many_encodings(bits: int, norm: str) -> None:
    """Of 10⁴: within 4 σ, for values at, just beside and between levels, and with tiny fractions.

    The variance is that of going up with the fraction f as its probability, f (1 − f) level²; a fair coin would
    show at once. Each seed is another rng, so elements are judged one by one.
    """
    codec, repeats = Quantize(bits, norm=norm), 10_000
    most = 2 ** (bits - 1) - 1
    fractions = torch.tensor([0.0, 1e-3, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999])
    values = torch.cat([fractions, -fractions, fractions + most - 1, torch.tensor([float(most)])])
    step = level(codec, values)
    total, body, out = (
        torch.zeros(values.numel()).double(),
        torch.zeros(200, dtype=torch.uint8),
        torch.empty_like(values),
    )
    body = body[: codec.body_bytes(values.numel())]
    for seed in range(repeats):
        codec.write(TensorSlice(values), body, RngKey(seed))
        codec.read(body, out, accumulate=False)
        total += out
    exact = values.double() / step
    fraction = exact - exact.floor()
    sigma = step * (fraction * (1 - fraction) / repeats).sqrt()
    error = (total / repeats - values).abs()
    assert bool((error <= 4 * sigma + 1e-6 * step * most).all()), (error / sigma).tolist()


def test_up_has_the_fraction_as_its_probability() -> None:
    """In one draw of many equal values too: neighbours are independent."""
    values = torch.full((200_001,), 0.3)
    values[0] = 7.0
    codec = Quantize(4, bucket=values.numel())
    up = float(there_and_back(codec, values)[1:].mean())
    assert abs(up - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 200_000)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_at_most_a_level(bits: int, norm: str, stochastic: bool) -> None:
    """Half of one where the nearest is taken; and the largest of a bucket arrives as it is."""
    codec = Quantize(bits, norm=norm, stochastic=stochastic)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(bits))
    decoded = there_and_back(codec, values)
    allowed = level(codec, values) * (1.0 if stochastic else 0.5)
    assert float((decoded - values).abs().max()) <= allowed * (1 + 1e-5)
    if norm == "max":
        top = values.abs().argmax()
        assert decoded[top] == values[top]


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zero(bits: int, norm: str) -> None:
    """Among others, and a bucket of nothing else."""
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    values[::3] = 0.0
    values[1024:2048] = 0.0
    for seed in range(5):
        decoded = there_and_back(Quantize(bits, norm=norm), values, RngKey(seed))
        assert bool((decoded[::3] == 0).all())
        assert bool((decoded[1024:2048] == 0).all())


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 5e-20, 2e19, 1e30, 3.4e38])
def test_scales_at_the_ends_of_float32(bits: int, norm: str, scale: float) -> None:
    """Whose reciprocals, squares or multiples float32 does not have."""
    values = scale * torch.tensor([1.0, -1.0, 0.0, 0.5, -0.25])
    codec = Quantize(bits, norm=norm)
    decoded = there_and_back(codec, values)
    assert bool(decoded.isfinite().all())
    if norm == "max":
        assert torch.equal(decoded[:3], values[:3])
    assert float((decoded.double() - values.double()).abs().max()) <= level(codec, values) * (1 + 1e-5) + 1.5e-45


def test_many_huge_values_have_a_finite_norm() -> None:
    """√1000 · 3e38 is more than float32 has: the scale ends at its largest, and all values are below it."""
    values = torch.full((1000,), 3e38)
    decoded = there_and_back(Quantize(4, norm="l2"), values)
    assert bool(decoded.isfinite().all())
    assert float((decoded.double() - 3e38).abs().max()) < 3.5e38 / 7


def test_the_bytes_of_a_body() -> None:
    """Scale 7, then plane after plane: codes 14, 0, 8, 7 (of levels 7, −7, 1, 0) are, from the lowest bit, 0001, …"""
    codec = Quantize(4, stochastic=False)
    body = torch.zeros(codec.body_bytes(4), dtype=torch.uint8)
    codec.write(TensorSlice(torch.tensor([7.0, -7.0, 1.0, 0.0])), body, RngKey())
    planes = body[4:].tolist()
    assert struct.unpack("<f", bytes(body[:4].tolist())) == (7.0,)
    assert len(planes) == 4
    codes = [14, 0, 8, 7]  # m = 1: the codes of a byte are neighbours
    assert planes == [sum((code >> p & 1) << k for k, code in enumerate(codes)) for p in range(4)]


@pytest.mark.parametrize("bits", BITS)
def test_bits_are_bits(bits: int) -> None:
    """2^20 values: a scale for each 1024, and no more than the bits."""
    assert Quantize(bits).body_bytes(2**20) == 4 * 2**10 + bits * 2**20 // 8
    assert Quantize(bits).body_bytes(0) == 0
    assert Quantize(bits, bucket=2**30).body_bytes(9) == 4 + 2 * bits


def test_it_differs_by_seed_and_not_by_run() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    codec = Quantize(4)
    assert torch.equal(there_and_back(codec, values, RngKey(1)), there_and_back(codec, values, RngKey(1)))
    assert not torch.equal(there_and_back(codec, values, RngKey(1)), there_and_back(codec, values, RngKey(2)))
    assert not torch.equal(there_and_back(codec, values, RngKey(1)), there_and_back(codec, values, RngKey(1, rank=1)))


def test_nothing_is_lost_over_many_steps() -> None:
    """Σ sent + residual = Σ gradients."""
    codec = Quantize(2, stochastic=False)
    assert codec.keeps_residual
    residual, balance = torch.zeros(3000), torch.zeros(3000).double()
    body, out = torch.zeros(codec.body_bytes(3000), dtype=torch.uint8), torch.empty(3000)
    for step in range(50):
        gradient = torch.randn(3000, generator=torch.Generator().manual_seed(step))
        codec.write(TensorSlice(gradient, residual=residual), body, RngKey(step))
        codec.read(body, out, accumulate=False)
        balance += gradient.double() - out.double()
    assert float((balance - residual).abs().max()) < 1e-4


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0])
def test_a_scale_that_cannot_be(scale: float) -> None:
    """The second of three: nothing is written, not even what comes before."""
    codec, out = Quantize(4), torch.full((3000,), 5.0)
    body = torch.zeros(codec.body_bytes(3000), dtype=torch.uint8)
    codec.write(TensorSlice(torch.randn(3000)), body, RngKey())
    body[4:8] = torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="a scale that is NaN, Inf or of the wrong sign"):
        codec.read(body, out, accumulate=True)
    assert bool((out == 5.0).all())


@pytest.mark.parametrize("bits", BITS)
def test_a_code_that_no_level_has(bits: int) -> None:
    """All bits set; in the last bucket, and nothing is written."""
    codec, out = Quantize(bits), torch.full((1100,), 5.0)
    body = torch.zeros(codec.body_bytes(1100), dtype=torch.uint8)
    codec.write(TensorSlice(torch.randn(1100)), body, RngKey())
    body[-(bits * 10) :] |= 1
    with pytest.raises(ProtocolError, match="a code without a value"):
        codec.read(body, out, accumulate=False)
    assert bool((out == 5.0).all())


@pytest.mark.parametrize("change", [-1, 1])
def test_a_body_of_another_length(change: int) -> None:
    codec = Quantize(4)
    with pytest.raises(ProtocolError, match=r"are not the 56 B of 100 values of quantize\(4\)"):
        codec.read(torch.zeros(56 + change, dtype=torch.uint8), torch.zeros(100), accumulate=False)


def test_a_residual_that_overflows() -> None:
    part = TensorSlice(torch.full((4,), 3e38), "weight", residual=torch.full((4,), 3e38))
    with pytest.raises(DivergedError, match="'weight' add up to Inf"):
        Quantize(4).write(part, torch.zeros(Quantize(4).body_bytes(4), dtype=torch.uint8), RngKey())


@pytest.mark.parametrize(
    "arguments",
    [
        *({"bits": bits} for bits in (1, 9, 0, -4, 4.0, "4", True, None)),
        *({"bucket": bucket} for bucket in (0, 2**30 + 1, -1, 1.5, True, None)),
        *({"norm": norm} for norm in ("l1", 2, None)),
        *({"stochastic": value} for value in (1, None)),
        *({"feedback": value} for value in (0, "yes")),
    ],
    ids=str,
)
def test_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"not {next(iter(arguments.values()))!r}"):
        Quantize(**arguments)


def test_its_spec() -> None:
    assert repr(Quantize()) == "quantize(4)"
    assert repr(Quantize(2, norm="l2", stochastic=False)) == "quantize(2, norm='l2', stochastic=False)"
    assert not Quantize(4).traits.biased
    assert not Quantize(4).keeps_residual
    assert Quantize(4, feedback=True).keeps_residual
    assert Quantize(4, stochastic=False).traits.biased
