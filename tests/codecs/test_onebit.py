"""One bit: the two means, what is left in the residual, and bytes that cannot be."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import RngKey, TensorSlice
from syncline.codecs.onebit import OneBit
from syncline.errors import DivergedError, ProtocolError, SpecError


def body_of(codec: OneBit, values: Tensor, residual: Tensor | None = None) -> Tensor:
    body = torch.zeros(codec.body_bytes(values.numel()), dtype=torch.uint8)
    codec.write(TensorSlice(values, "weight", residual=residual), body, RngKey())
    return body


def there_and_back(codec: OneBit, values: Tensor) -> Tensor:
    out = torch.empty_like(values)
    codec.read(body_of(codec, values), out, accumulate=False)
    return out


def test_the_means_of_each_bucket() -> None:
    """Two buckets, worked out by hand; zero counts as not negative."""
    values = torch.tensor([1.0, 0.0, -2.0, 5.0, -4.0, 10.0, 20.0])
    assert there_and_back(OneBit(5), values).tolist() == [2.0, 2.0, -3.0, 2.0, -3.0, 15.0, 15.0]


def test_means_and_signs_by_plain_torch() -> None:
    values = torch.randn(2500, generator=torch.Generator().manual_seed(0))
    decoded = there_and_back(OneBit(), values)
    for first in (0, 1024, 2048):
        rows, got = values[first : first + 1024], decoded[first : first + 1024]
        assert torch.equal(rows < 0, got < 0)
        for sign in (rows < 0, rows >= 0):
            torch.testing.assert_close(got[sign], rows[sign].double().mean().float().expand(int(sign.sum())))


def test_the_sum_of_a_bucket_is_kept() -> None:
    """What makes two means better than ±1: the bucket's sum arrives."""
    values = torch.randn(1024, generator=torch.Generator().manual_seed(2)) + 0.3
    assert abs(float((there_and_back(OneBit(), values) - values).double().sum())) < 1e-3


@pytest.mark.parametrize("values", [[0.0] * 9, [-0.0] * 9, [3.0] * 9, [-3.0] * 9, [1e-45] * 9, [-3.4e38] * 9])
def test_buckets_of_one_kind(values: list[float]) -> None:
    """No mean of nothing: such buckets come back as they are."""
    assert torch.equal(there_and_back(OneBit(), torch.tensor(values)), torch.tensor(values))


def test_the_bytes_of_a_body() -> None:
    body = body_of(OneBit(), torch.tensor([1.0, -2.0, 3.0, -4.0]))
    assert bytes(body.tolist()) == struct.pack("<ff", 2.0, -3.0) + bytes([0b1010])


def test_a_bit_is_a_bit() -> None:
    assert OneBit().body_bytes(2**20) == 8 * 2**10 + 2**17
    assert OneBit().body_bytes(0) == 0
    assert OneBit(2**30).body_bytes(9) == 8 + 2


def test_nothing_is_lost_over_many_steps() -> None:
    """Σ sent + residual = Σ gradients, and the residual does not grow without bound."""
    codec = OneBit()
    assert codec.traits.biased
    assert codec.keeps_residual
    residual, balance, out = torch.zeros(3000), torch.zeros(3000).double(), torch.empty(3000)
    for step in range(100):
        gradient = torch.randn(3000, generator=torch.Generator().manual_seed(step))
        codec.read(body_of(codec, gradient, residual), out, accumulate=False)
        balance += gradient.double() - out.double()
    assert float((balance - residual).abs().max()) < 1e-4
    assert float(residual.abs().mean()) < 10


@pytest.mark.parametrize(("which", "mean"), [(0, math.nan), (1, math.inf), (0, -1.0), (1, 1.0), (1, math.nan)])
def test_a_mean_that_cannot_be(which: int, mean: float) -> None:
    """In the second bucket; nothing is written."""
    codec, out = OneBit(), torch.full((2000,), 5.0)
    body = body_of(codec, torch.randn(2000))
    body[8 + 4 * which : 12 + 4 * which] = torch.tensor(list(struct.pack("<f", mean)), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="a scale that is NaN, Inf or of the wrong sign"):
        codec.read(body, out, accumulate=True)
    assert bool((out == 5.0).all())


@pytest.mark.parametrize("length", [0, 20, 22])
def test_a_body_of_another_length(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} B are not the 21 B of 100 values of onebit"):
        OneBit().read(torch.zeros(length, dtype=torch.uint8), torch.zeros(100), accumulate=False)


def test_a_residual_that_overflows() -> None:
    with pytest.raises(DivergedError, match="'weight' add up to Inf"):
        body_of(OneBit(), torch.full((4,), 3e38), residual=torch.full((4,), 3e38))


@pytest.mark.parametrize(
    "arguments",
    [*({"bucket": bucket} for bucket in (0, 2**30 + 1, -5, 2.0, True, None)), {"feedback": 1}, {"feedback": "no"}],
    ids=str,
)
def test_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"not {next(iter(arguments.values()))!r}"):
        OneBit(**arguments)


def test_its_spec() -> None:
    assert repr(OneBit()) == "onebit"
    assert repr(OneBit(64, feedback=False)) == "onebit(bucket=64, feedback=False)"
    assert not OneBit(feedback=False).keeps_residual
