"""randomk: the same elements everywhere, each equally often, and values that add up on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import RngKey, TensorSlice
from syncline.codecs.kernels.dispatch import reference_only
from syncline.codecs.randomk import RandomK
from syncline.errors import DivergedError, ProtocolError, SpecError


def test_repr_is_the_spec() -> None:
    assert repr(RandomK(0.01)) == "randomk(0.01)"
    assert RandomK(0.01).traits.allreducible
    assert RandomK(0.01).keeps_residual


@pytest.mark.parametrize("bad", [0, 0.0, 1.1, -0.5, True, "0.1", None, float("nan")])
def test_bad_ratios_are_refused(bad: Any) -> None:
    with pytest.raises(SpecError, match=r"fraction in \(0, 1\]"):
        RandomK(bad)


@pytest.mark.parametrize("numel", [0, 1, 2, 10, 999, 5000])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_indices_are_sorted_unlike_and_enough(numel: int, ratio: float) -> None:
    codec = RandomK(ratio)
    for step in range(20):
        indices, values = codec.select(TensorSlice(torch.arange(numel).float()), RngKey(step=step))
        assert len(indices) == codec.max_selected(numel)
        assert indices.tolist() == sorted(set(indices.tolist()))
        assert torch.equal(indices.float(), values)


def test_every_rank_chooses_alike_and_every_step_anew() -> None:
    part, codec = TensorSlice(torch.randn(1000, generator=torch.Generator().manual_seed(0))), RandomK(0.05)
    first = codec.select(part, RngKey(step=1, rank=0))[0]
    assert torch.equal(first, codec.select(part, RngKey(step=1, rank=5))[0])
    for other in (RngKey(step=2), RngKey(step=1, seed=1), RngKey(step=1, name="w"), RngKey(step=1, start=1000)):
        assert not torch.equal(first, codec.select(part, other)[0])


def test_each_element_is_drawn_equally_often() -> None:
    """3 of 10, whose stretches are unlike: 4000 rngs, each within 5σ; neighbours come together as well."""
    codec, part, drawn, together = RandomK(0.3), TensorSlice(torch.zeros(10)), torch.zeros(10), 0
    for step in range(4000):
        indices = codec.select(part, RngKey(step=step))[0]
        drawn[indices] += 1
        together += bool((indices[1:] - indices[:-1] == 1).any())
    sigma = (4000 * 0.3 * 0.7) ** 0.5
    assert bool(((drawn - 1200).abs() < 5 * sigma).all())
    assert together > 0


@pytest.mark.parametrize("numel", [0, 1, 3000])
def test_a_payload_says_which(numel: int) -> None:
    """The decoder needs no RngKey: the key is in the body."""
    flat, codec = torch.randn(numel, generator=torch.Generator().manual_seed(1)), RandomK(0.1)
    rng = RngKey(seed=3, step=9)
    payload = codec.encode(flat, rng)
    out = codec.decode(payload, torch.empty(numel))
    indices, values = codec.select(TensorSlice(flat), rng)
    assert torch.equal(out[indices], values)
    assert int((out != 0).sum()) == codec.max_selected(numel)
    assert payload.numel() == codec.max_bytes(numel)
    with reference_only():
        assert torch.equal(codec.encode(flat, rng), payload)


def test_nothing_is_lost() -> None:
    codec, residual, generator = RandomK(0.2), torch.zeros(100), torch.Generator().manual_seed(0)
    given, sent = torch.zeros(100), torch.zeros(100)
    for step in range(30):
        flat = torch.randn(100, generator=generator)
        given += flat
        sent += codec.decode(codec.encode(flat, RngKey(step=step), residual), torch.empty(100))
    torch.testing.assert_close(sent + residual, given, rtol=0, atol=1e-4)


def _summed(codec: RandomK, ranks: list[list[TensorSlice]], step: int, wire: torch.dtype) -> None:
    """Play the rounds of all ranks, with a sum in between."""
    rounds = [
        codec.reduce_rounds(parts, RngKey(step=step, rank=rank), len(ranks), wire=wire)
        for rank, parts in enumerate(ranks)
    ]
    while sent := [tensor for each in rounds if (tensor := next(each, None)) is not None]:
        whole: Tensor = torch.stack(sent).sum(dim=0)
        for tensor in sent:
            assert tensor.dtype == wire
            tensor.copy_(whole)


@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
def test_values_add_up_on_the_wire(wire: torch.dtype) -> None:
    """Every rank gets the sum at the drawn places and 0 elsewhere; Σ sums + Σ residuals = Σ gradients."""
    codec, generator = RandomK(0.25), torch.Generator().manual_seed(0)
    sizes = {"a": 40, "empty": 0, "b": 7}
    ranks = [[TensorSlice(torch.zeros(n), name=k, residual=torch.zeros(n)) for k, n in sizes.items()] for _ in range(3)]
    given, sums = torch.zeros(47), torch.zeros(47)
    for step in range(25):
        for parts in ranks:
            for part in parts:
                part.flat = torch.randn(part.numel, generator=generator)
                given[:40] += part.flat if part.name == "a" else 0
                given[40:] += part.flat if part.name == "b" else 0
        _summed(codec, ranks, step, wire)
        got = [torch.cat([part.flat for part in parts]) for parts in ranks]
        assert torch.equal(got[0], got[1])
        assert torch.equal(got[0], got[2])
        assert int((got[0] != 0).sum()) <= 10 + 2
        sums += got[0]
    left = sum(torch.cat([p.residual for p in parts if p.residual is not None]) for parts in ranks)
    # half precision rounds the sum itself, which no residual sees
    torch.testing.assert_close(sums + left, given, rtol=0, atol=1e-3 if wire == torch.float32 else 0.3)


def test_what_half_precision_cannot_say_is_kept() -> None:
    parts = [TensorSlice(torch.tensor([1e6]), residual=torch.zeros(1))]
    _summed(RandomK(1.0), [parts, [TensorSlice(torch.tensor([1.0]), residual=torch.zeros(1))]], 0, torch.float16)
    assert bool(torch.isfinite(parts[0].flat).all())
    assert parts[0].residual is not None
    assert 1e6 - 65504 / 2 <= float(parts[0].residual) < 1e6


def test_a_sum_that_is_not_finite_is_told() -> None:
    rounds = RandomK(1.0).reduce_rounds([TensorSlice(torch.ones(2))], RngKey(), 2)
    next(rounds).fill_(torch.inf)
    with pytest.raises(DivergedError, match="the sum over 2 ranks"):
        next(rounds)


def test_no_parts_no_round() -> None:
    assert list(RandomK(0.5).reduce_rounds([], RngKey(), 2)) == []


@pytest.mark.parametrize("nbytes", [0, 3, 4, 4 + 4 * 9, 4 + 4 * 10 + 1])
def test_bodies_of_another_length_are_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError):
        RandomK(0.1).read(torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(100), False)
