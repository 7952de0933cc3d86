"""Three values: right on average, clipped or not, and bytes that are not five digits."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import RngKey, TensorSlice
from syncline.codecs.ternary import Ternary
from syncline.errors import DivergedError, ProtocolError, SpecError


def body_of(codec: Ternary, values: Tensor, residual: Tensor | None = None, seed: int = 0) -> Tensor:
    body = torch.zeros(codec.body_bytes(values.numel()), dtype=torch.uint8)
    codec.write(TensorSlice(values, "weight", residual=residual), body, RngKey(seed))
    return body


def there_and_back(codec: Ternary, values: Tensor, seed: int = 0) -> Tensor:
    out = torch.empty_like(values)
    codec.read(body_of(codec, values, seed=seed), out, accumulate=False)
    return out


def test_the_mean_of_many_encodings() -> None:
    """Of 10⁴: within 4 σ, σ² = s² p (1 − p) with p = |x|/s."""
    repeats = 10_000
    values = torch.tensor([2.0, -2.0, 0.0, 1.0, -1.0, 1e-3, -1e-3, 0.02, 1.98, -1.999, 0.5, -1.5])
    total, codec = torch.zeros(values.numel()).double(), Ternary()
    for seed in range(repeats):
        total += there_and_back(codec, values, seed)
    chance = values.abs().double() / 2
    sigma = 2 * (chance * (1 - chance) / repeats).sqrt()
    error = (total / repeats - values).abs()
    assert bool((error <= 4 * sigma + 1e-6).all()), (error / sigma).tolist()


@pytest.mark.parametrize("bucket", [None, 100])
def test_three_values_and_no_others(bucket: int | None) -> None:
    """−s, 0 and s, with the sign of x; zeros stay zero, and the largest arrives as it is."""
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    values[::4] = 0.0
    decoded = there_and_back(Ternary(bucket=bucket), values)
    for first in range(0, 5000, bucket or 5000):
        x, y = values[first : first + (bucket or 5000)], decoded[first : first + (bucket or 5000)]
        scale = float(x.abs().max())
        assert set(y.abs().tolist()) <= {0.0, scale}
        assert bool((y * x >= 0).all())
        assert bool((y[x == 0] == 0).all())
        assert y[x.abs().argmax()] == x[x.abs().argmax()]


@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-30, 5e-20, 2e19, 3e38])
def test_scales_at_the_ends_of_float32(scale: float, clip: float | None) -> None:
    values = scale * torch.tensor([1.0, -1.0, 0.0, 1.0])
    assert there_and_back(Ternary(clip=clip), values).tolist() == values.tolist()


def test_clipped_at_so_many_sigma() -> None:
    """σ is √mean(x²); what lies beyond goes to the scale, always."""
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    values[5] = 50.0
    sigma = float(values.double().square().mean().sqrt())
    decoded = there_and_back(Ternary(clip=2.5), values)
    scale = float(decoded.abs().max())
    assert scale == pytest.approx(2.5 * sigma, rel=1e-6)
    beyond = values.abs() >= scale
    assert int(beyond.sum()) > 1
    assert torch.equal(decoded[beyond], values[beyond].sign() * scale)


def test_clipped_bucket_by_bucket() -> None:
    """Each by its own σ; the last one is shorter."""
    values = torch.ones(250)
    values[100:200], values[200:] = 2.0, 3.0
    values[0], values[249] = 90.0, -90.0
    decoded = there_and_back(Ternary(clip=1.0, bucket=100), values)
    for first in (0, 100, 200):
        x, y = values[first : first + 100], decoded[first : first + 100]
        assert float(y.abs().max()) == pytest.approx(float(x.double().square().mean().sqrt()), rel=1e-6)


@pytest.mark.parametrize("clip", [2.5, 1.0])
def test_equal_values_are_not_clipped_away(clip: float) -> None:
    """Their deviation from their mean is nothing, but not from zero."""
    assert there_and_back(Ternary(clip=clip), torch.full((7,), 3.0)).tolist() == [3.0] * 7


def test_the_bytes_of_a_body() -> None:
    """2, −2 and 0 are the digits 2, 0, 1; behind them 1 stands for nothing: 2 + 0·3 + 1·9 + 1·27 + 1·81."""
    body = body_of(Ternary(), torch.tensor([2.0, -2.0, 0.0]))
    assert bytes(body.tolist()) == struct.pack("<f", 2.0) + bytes([119])


def test_five_to_a_byte() -> None:
    assert Ternary().body_bytes(1280 * 100) == 4 + 256 * 100
    assert Ternary(bucket=1000).body_bytes(10_000) == 10 * (4 + 200)
    assert Ternary().body_bytes(0) == Ternary(bucket=3).body_bytes(0) == 0
    assert Ternary(bucket=2**30).body_bytes(6) == 4 + 2


@pytest.mark.parametrize("codec", [Ternary(feedback=True), Ternary(clip=2.5), Ternary(clip=2.5, bucket=512)], ids=repr)
def test_nothing_is_lost_over_many_steps(codec: Ternary) -> None:
    """Σ sent + residual = Σ gradients."""
    assert codec.keeps_residual
    residual, balance, out = torch.zeros(3000), torch.zeros(3000).double(), torch.empty(3000)
    moved = 0.0
    for step in range(40):
        gradient = torch.randn(3000, generator=torch.Generator().manual_seed(step))
        codec.read(body_of(codec, gradient, residual, seed=step), out, accumulate=False)
        balance += gradient.double() - out.double()
        moved += float(out.abs().max())
    assert float((balance - residual).abs().max()) < 1e-6 * moved


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0])
def test_a_scale_that_cannot_be(scale: float) -> None:
    codec, out = Ternary(), torch.full((2000,), 5.0)
    body = body_of(codec, torch.randn(2000))
    body[:4] = torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="a scale that is NaN, Inf or of the wrong sign"):
        codec.read(body, out, accumulate=True)
    assert bool((out == 5.0).all())


@pytest.mark.parametrize("byte", [243, 255])
def test_a_byte_that_is_not_five_digits(byte: int) -> None:
    """The last: nothing is written, not even what comes before."""
    codec, out = Ternary(), torch.full((2000,), 5.0)
    body = body_of(codec, torch.randn(2000))
    body[-1] = byte
    with pytest.raises(ProtocolError, match="a code without a value"):
        codec.read(body, out, accumulate=False)
    assert bool((out == 5.0).all())
    body[-1] = 242
    codec.read(body, out, accumulate=False)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("length", [0, 23, 25])
def test_a_body_of_another_length(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} B are not the 24 B of 100 values of ternary"):
        Ternary().read(torch.zeros(length, dtype=torch.uint8), torch.zeros(100), accumulate=False)


@pytest.mark.parametrize("clip", [None, 2.5])
def test_a_residual_that_overflows(clip: float | None) -> None:
    with pytest.raises(DivergedError, match="'weight' add up to Inf"):
        body_of(Ternary(clip=clip), torch.full((4,), 3e38), residual=torch.full((4,), 3e38))


@pytest.mark.parametrize(
    "arguments",
    [
        *({"clip": clip} for clip in (0, -1.0, math.inf, "2.5", True)),
        *({"bucket": bucket} for bucket in (0, 2**30 + 1, -1, 2.0, True)),
        *({"feedback": value} for value in (1, "no")),
    ],
    ids=str,
)
def test_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"not {next(iter(arguments.values()))!r}"):
        Ternary(**arguments)


def test_a_clip_that_is_no_number() -> None:
    with pytest.raises(SpecError, match="not nan"):
        Ternary(clip=math.nan)


def test_its_spec() -> None:
    assert repr(Ternary()) == "ternary"
    assert repr(Ternary(clip=2.5, bucket=512)) == "ternary(clip=2.5, bucket=512)"
    assert not Ternary().traits.biased
    assert Ternary(clip=2.5).traits.biased
