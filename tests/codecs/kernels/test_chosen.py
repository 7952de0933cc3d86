"""Choosing and quantising in one call, and reading all ranks' payloads in one: the bits of doing it step by step."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from syncline.codecs import RngKey, TensorSlice, build_codec
from syncline.codecs.base import PayloadCodec, pack, unpack, unpack_all
from syncline.codecs.kernels.dispatch import reference_only
from syncline.errors import DivergedError, ProtocolError

SPECS = [
    "topk(0.01)|quantize(4)",
    "topk(0.1, momentum=0.9, whole=64)|quantize(3)",
    "topk(4, bucket=32)|quantize(4)",
    "topk(0.5, feedback=False)|quantize(2, norm='l2')",
    "topk(0.2)|quantize(8, bucket=16, stochastic=False)",
    "topk(0.05)",
    "quantize(4)",
    "onebit",
]
RANKS = 3


def payload_codec(spec: str) -> PayloadCodec:
    codec = build_codec(spec)
    assert isinstance(codec, PayloadCodec)
    return codec


def lives(codec: PayloadCodec, numel: int, steps: int = 3) -> list[Tensor]:
    """Means over three ranks in some steps, and what is left at the end."""
    made = [torch.zeros(numel) if codec.keeps_residual else None for _ in range(RANKS)]
    parts = [TensorSlice(torch.zeros(numel), "a", residual=residual) for residual in made]
    rng, found = torch.Generator().manual_seed(numel), []
    for step in range(steps):
        rows = []
        for rank, part in enumerate(parts):
            part.flat = torch.randn(numel, generator=rng)
            rows.append(pack(codec, [part], RngKey(0, step, rank)))
        out = torch.full((numel,), 7.0)
        unpack_all(codec, torch.stack(rows), [out], step, 1 / RANKS)
        found.append(out)
    return found + [part.residual for part in parts if part.residual is not None]


@pytest.mark.parametrize("numel", [1, 2, 7, 64, 1000, 70_000])
@pytest.mark.parametrize("spec", SPECS)
def test_the_bits_of_the_reference(spec: str, numel: int) -> None:
    codec = payload_codec(spec)
    fused = lives(codec, numel)
    with reference_only():
        plain = lives(codec, numel)
    assert all(torch.equal(one, other) for one, other in zip(fused, plain, strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_all_at_once_is_one_after_the_other(spec: str) -> None:
    codec, rng = payload_codec(spec), torch.Generator().manual_seed(3)
    rows = torch.stack(
        [pack(codec, [TensorSlice(torch.randn(500, generator=rng))], RngKey(rank=rank)) for rank in range(4)]
    )
    at_once, in_turn = torch.empty(500), torch.empty(500)
    unpack_all(codec, rows, [at_once], 0, 1.0)
    for rank, row in enumerate(rows):
        unpack(codec, row, [in_turn], rank > 0)
    assert torch.equal(at_once, in_turn)


@pytest.mark.parametrize(
    "spec",
    ["topk(0.1)|quantize(4)", "topk(0.1)", "topk(0.1, momentum=0.5)|quantize(4)", "topk(0.1, momentum=0.5, clip=1e39)"],
)
@pytest.mark.parametrize("plain", [False, True])
def test_an_overflow_leaves_the_state_as_it_was(spec: str, plain: bool) -> None:
    before = torch.randn(200, generator=torch.Generator().manual_seed(0))
    flat = torch.randn(200, generator=torch.Generator().manual_seed(1))
    before[[3, 77]] = flat[[3, 77]] = torch.tensor([3e38, -3e38])
    residual, velocity = before.clone(), before.clone() * 1.1
    part = TensorSlice(flat, residual=residual, memory={"velocity": velocity})
    with reference_only() if plain else nullcontext(), pytest.raises(DivergedError, match="add up to Inf"):
        pack(payload_codec(spec), [part], RngKey())
    known = flat.abs() < 1e38
    torch.testing.assert_close(residual[known], before[known], rtol=0, atol=1e-6)
    assert residual[~known].tolist() == [0.0, 0.0]
    torch.testing.assert_close(velocity[known], 1.1 * before[known], rtol=0, atol=1e-5)
    assert bool(torch.isfinite(velocity).all())


@pytest.mark.parametrize("spec", ["topk(0.05)|quantize(4)", "topk(4, bucket=32)|quantize(4)", "quantize(4)"])
def test_rows_that_were_tampered_with(spec: str) -> None:
    codec, rng, luck = payload_codec(spec), torch.Generator().manual_seed(5), random.Random(5)
    rows = torch.stack(
        [pack(codec, [TensorSlice(torch.randn(900, generator=rng))], RngKey(rank=rank)) for rank in range(3)]
    )
    refused = 0
    for _ in range(400):
        tampered = rows.clone()
        for _ in range(luck.choice((1, 1, 2, 20))):
            tampered[luck.randrange(3), luck.randrange(rows.shape[1])] ^= 1 << luck.randrange(8)
        room = torch.full((940,), 7.0)
        try:
            unpack_all(codec, tampered, [room[20:920]], 0, 1 / 3)
            assert bool(torch.isfinite(room).all())
        except ProtocolError:
            refused += 1
        assert room[:20].tolist() == room[920:].tolist() == [7.0] * 20
    assert 20 < refused < 400
