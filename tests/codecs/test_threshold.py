"""threshold: all that reaches it, and nothing else."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from syncline.codecs.base import RngKey, TensorSlice, max_payload_bytes
from syncline.codecs.kernels.dispatch import reference_only
from syncline.codecs.threshold import Threshold
from syncline.errors import ProtocolError, SpecError


def test_repr_is_the_spec() -> None:
    assert repr(Threshold(0.001)) == "threshold(0.001)"
    assert repr(Threshold(0.5, feedback=False)) == "threshold(0.5, feedback=False)"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, True, "1", None, 1e-60, 1e39])
def test_bad_thresholds_are_refused(bad: Any) -> None:
    with pytest.raises(SpecError, match="magnitude that float32 has"):
        Threshold(bad)


@pytest.mark.parametrize("numel", [0, 1, 100, 5000, 40_000])
@pytest.mark.parametrize("threshold", [0.1, 2.0, 100.0])
def test_all_that_reaches_it_is_sent(numel: int, threshold: float) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    codec = Threshold(threshold)
    payload = codec.encode(flat)
    assert torch.equal(codec.decode(payload, torch.empty(numel)), flat * (flat.abs() >= threshold))
    assert payload.numel() <= max_payload_bytes(codec, [numel])
    with reference_only():
        assert torch.equal(codec.encode(flat), payload)


def test_no_count_takes_more_than_promised() -> None:
    """Bodies of every density fit."""
    codec = Threshold(0.5)
    for numel in (1, 9, 65, 300):
        for kept in range(numel + 1):
            flat = (torch.arange(numel) < kept).float()
            body = torch.zeros(codec.body_bytes(numel), dtype=torch.uint8)
            used = codec.write(TensorSlice(flat), body, RngKey())
            out = torch.empty(numel)
            codec.read(body[:used], out, False)
            assert torch.equal(out, flat)


def test_what_is_small_comes_when_it_has_added_up() -> None:
    codec, residual = Threshold(1.0), torch.zeros(2)
    sent = [codec.decode(codec.encode(torch.tensor([0.5, 0.25]), residual=residual), torch.empty(2)) for _ in range(4)]
    assert [each.tolist() for each in sent] == [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert residual.tolist() == [0.0, 0.0]


def test_fuzzed_bodies_are_tensors_or_refused() -> None:
    rng, refused, codec = random.Random(0), 0, Threshold(1.0)
    whole = torch.zeros(codec.body_bytes(200), dtype=torch.uint8)
    used = codec.write(TensorSlice(torch.randn(200, generator=torch.Generator().manual_seed(0))), whole, RngKey())
    for trial in range(3000):
        body = whole[: used if trial % 3 else rng.randrange(used)].clone()
        for _ in range(trial % 4 if body.numel() else 0):
            body[rng.randrange(body.numel())] ^= 1 << rng.randrange(8)
        out = torch.zeros(200)
        try:
            codec.read(body, out, False)
        except ProtocolError:
            refused += 1
        assert bool(torch.isfinite(out).all())
    assert 1000 < refused < 3000
