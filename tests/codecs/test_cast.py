"""Half precision: rounded like torch or at random, never Inf, and summed in one round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import RngKey, TensorSlice
from syncline.codecs.cast import Cast
from syncline.codecs.kernels.random_bits import random_bits
from syncline.errors import DivergedError, ProtocolError, SpecError

TYPES = ["fp16", "bf16"]
LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}


def body_of(codec: Cast, values: Tensor, residual: Tensor | None = None, seed: int = 0) -> Tensor:
    body = torch.zeros(codec.body_bytes(values.numel()), dtype=torch.uint8)
    codec.write(TensorSlice(values, "weight", residual=residual), body, RngKey(seed))
    return body


def there_and_back(codec: Cast, values: Tensor, seed: int = 0) -> Tensor:
    out = torch.empty_like(values)
    codec.read(body_of(codec, values, seed=seed), out, accumulate=False)
    return out


def steps(codec: Cast, values: Tensor) -> tuple[Tensor, Tensor]:
    """The halves below and above each value, as float64."""
    near = values.to(codec.dtype)
    near = torch.where(near.float().abs() > values.abs(), (near.view(torch.int16) - 1).view(codec.dtype), near)
    away = (near.view(torch.int16) + 1).view(codec.dtype)  # the next one further from zero
    both = torch.stack([near.double(), torch.where(near.double() == values.double(), near.double(), away.double())])
    return both.amin(0), both.amax(0)


@pytest.mark.parametrize("to", TYPES)
def test_the_nearest_is_torchs(to: str) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 4, 5000)
    codec = Cast(to)
    assert torch.equal(there_and_back(codec, values), values.to(codec.dtype).float())
    assert codec.body_bytes(5000) == 10_000


@pytest.mark.parametrize("to", TYPES)
def test_at_random_it_is_right_on_average(to: str) -> None:
    """Of 10⁴: within 4 σ, σ² = f (1 − f) step²; at, just beside and between the steps, and below the normal numbers."""
    codec, repeats = Cast(to, stochastic=True), 10_000
    base = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-13, 1.0001, 1.9999, 0.1, 1e-5, 3e-8, 1e-8, 6e-5, 2**-14, 1e-12, 0.0])
    values = torch.cat([base, -base, torch.tensor([60_000.1, -777.7])])
    total, count = torch.zeros(values.numel()).double(), torch.zeros(values.numel()).double()
    low, high = steps(codec, values)
    for seed in range(repeats):
        got = there_and_back(codec, values, seed).double()
        total += got
        count += (got == low) | (got == high)
    assert bool((count == repeats).all()), "something else than a neighbour"
    fraction = torch.where(high > low, (values.double() - low) / (high - low), 0.0)
    sigma = (high - low) * (fraction * (1 - fraction) / repeats).sqrt()
    error = (total / repeats - values.double()).abs()
    assert bool((error <= 4 * sigma + 1e-7 * (high - low)).all()), (error / sigma).tolist()


@pytest.mark.parametrize("to", TYPES)
def test_at_random_every_half_stays_what_it_is(to: str) -> None:
    """All 2^16 of them that are finite."""
    codec = Cast(to, stochastic=True)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(codec.dtype)
    values = halves[halves.isfinite()].float()
    assert torch.equal(there_and_back(codec, values).view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("to", TYPES)
def test_beyond_the_largest(to: str, stochastic: bool) -> None:
    """It ends there; what is cut off stays in the residual, and nothing becomes Inf."""
    values = torch.tensor([3.4028234663852886e38, -3.4028234663852886e38, 65504.0, 65519.0, -65536.0, 1e6] * 50)
    residual, out = torch.zeros_like(values), torch.empty_like(values)
    codec = Cast(to, stochastic=stochastic, feedback=True)
    codec.read(body_of(codec, values, residual), out, accumulate=False)
    assert bool((out.abs() <= LARGEST[to]).all())
    assert out[:2].tolist() == [LARGEST[to], -LARGEST[to]]
    assert torch.equal(residual, values - out)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("to", TYPES)
def test_a_sum_in_one_round(to: str, stochastic: bool) -> None:
    """All parts in one tensor; each rank's residual has what it did not send, and all decode the same."""
    codec, size = Cast(to, stochastic=stochastic, feedback=True), 3
    assert codec.traits.allreducible
    ranks, wires, given = [], [], []
    for rank in range(size):
        generator = torch.Generator().manual_seed(rank)
        parts = [
            TensorSlice(torch.randn(n, generator=generator), name, residual=torch.randn(n))
            for n, name in ((5, "a"), (70, "b"))
        ]
        given.append(torch.cat([p.flat + p.residual for p in parts if p.residual is not None]))
        running = codec.reduce_rounds(parts, RngKey(1, rank=rank), size)
        wires.append(next(running))
        ranks.append((parts, running))
    assert all(wire.dtype == codec.dtype and wire.shape == (75,) for wire in wires)
    for (parts, _), wire, whole in zip(ranks, wires, given, strict=True):
        left = torch.cat([p.residual for p in parts if p.residual is not None])
        assert torch.equal(left, whole - wire.float())
    total = wires[0] + wires[1] + wires[2]
    for (parts, running), wire in zip(ranks, wires, strict=True):
        wire.copy_(total)
        assert next(running, None) is None
        assert torch.equal(torch.cat([p.flat for p in parts]), total.float())
    assert list(codec.reduce_rounds([], RngKey(), size)) == []


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("to", TYPES)
def test_a_sum_of_the_largest_is_finite(to: str, size: int, stochastic: bool) -> None:
    """Each rank sends no more than its share of what the type has, and not much less: each addition may round up."""
    codec = Cast(to, stochastic=stochastic)
    wire = next(codec.reduce_rounds([TensorSlice(torch.full((40,), 3.4e38))], RngKey(), size))
    total = wire.clone()
    for _ in range(size - 1):
        total += wire
    assert bool(total.isfinite().all())
    share, step = LARGEST[to] / size, 1 + torch.finfo(codec.dtype).eps
    assert bool((wire.double() <= share).all())
    assert bool((wire.double() >= share / step ** (size + 1)).all())


@pytest.mark.parametrize("to", TYPES)
def test_a_body_at_an_odd_byte(to: str) -> None:
    """Behind bytes of others, as in a chain."""
    codec, values = Cast(to), torch.randn(9)
    whole = torch.zeros(19, dtype=torch.uint8)
    codec.write(TensorSlice(values), whole[1:], RngKey())
    assert torch.equal(whole[1:], body_of(codec, values))
    out = torch.ones(9)
    codec.read(whole[1:], out, accumulate=True)
    assert torch.equal(out, 1 + values.to(codec.dtype).float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("to", TYPES)
def test_values_that_are_no_numbers(to: str, value: float) -> None:
    codec, out = Cast(to), torch.full((100,), 5.0)
    body = torch.zeros(100, dtype=codec.dtype)
    body[77] = value
    with pytest.raises(ProtocolError, match="holds NaN or Inf"):
        codec.read(body.view(torch.uint8), out, accumulate=True)
    assert bool((out == 5.0).all())


@pytest.mark.parametrize("length", [0, 199, 201])
def test_a_body_of_another_length(length: int) -> None:
    with pytest.raises(ProtocolError, match=rf"{length} B are not the 200 B of 100 values of cast\('fp16'\)"):
        Cast("fp16").read(torch.zeros(length, dtype=torch.uint8), torch.zeros(100), accumulate=False)


def test_a_residual_that_overflows() -> None:
    with pytest.raises(DivergedError, match="'weight' add up to Inf"):
        body_of(Cast("bf16"), torch.full((4,), 3e38), residual=torch.full((4,), 3e38))


def test_it_uses_the_bits_of_its_draw() -> None:
    """Between 1 and the next half, up is where the random bits are beyond the rest."""
    values = torch.full((1000,), 1 + 2**-8 * 0.25)
    up = there_and_back(Cast("bf16", stochastic=True), values, seed=3) > 1
    assert torch.equal(up, (random_bits(RngKey(3).key, 0, 1000) >> 16) >= 2**16 - 2**13)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"to": to} for to in ("fp8", "float16", 16, None)),
        *({"stochastic": value} for value in (1, None)),
        *({"feedback": value} for value in (1, "no")),
    ],
    ids=str,
)
def test_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"not {next(iter(arguments.values()))!r}"):
        Cast(**arguments)


def test_its_spec() -> None:
    assert repr(Cast("fp16")) == "cast('fp16')"
    assert repr(Cast("bf16", stochastic=True)) == "cast('bf16', stochastic=True)"
    assert not Cast("fp16").traits.biased
    assert not Cast("fp16").keeps_residual
    assert Cast("fp16", feedback=True).keeps_residual
