"""What every codec does with NaN, Inf and the edges of float32: the fused and the plain kernels do the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from syncline.codecs import PayloadCodec, RngKey, TensorSlice, build_codec
from syncline.codecs.base import pack, unpack
from syncline.codecs.kernels import sparse_fused, sparse_reference
from syncline.codecs.kernels.dispatch import reference_only

NUMEL = 9_000
"""More than the 8,192 elements up to which the fused top-k counts every magnitude."""
CODECS = [
    "cast('fp16')",
    "cast('bf16', stochastic=True, feedback=True)",
    "quantize(4)",
    "quantize(4, norm='l2')",
    "quantize(4, stochastic=False)",
    "onebit",
    "onebit(feedback=False)",
    "ternary",
    "ternary(clip=2.5)",
    "ternary(clip=2.5, feedback=False)",
    "ternary(bucket=512, clip=2.5)",
    "topk(0.01)",
    "topk(0.01, feedback=False)",
    "topk(16, bucket=512)",
    "topk(0.01, momentum=0.9)",
    "topk(0.01, momentum=0.9, masking=True)",
    "topk(0.01, momentum=0.9, clip=1.0)",
    "topk(0.01)|quantize(4)",
    "topk(0.01)|quantize(4, norm='l2')|lossless",
    "topk(0.01, momentum=0.9)|quantize(4)",
    "topk(0.01, momentum=0.9, masking=True)|quantize(4)",
    "topk(0.01)|onebit",
    "topk(0.01)|cast('fp16')",
    "threshold(0.5)",
    "threshold(0.5)|quantize(4)",
    "randomk(1.0)",
    "quantize(4)|lossless",
]
NAN, INF = float("nan"), float("inf")


def _normal(seed: int = 0) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def _with(value: float, base: Tensor) -> Tensor:
    base[7_777] = value
    return base


NOT_FINITE: dict[str, Callable[[], Tensor]] = {
    "one NaN": lambda: _with(NAN, _normal()),
    "one NaN with a sign": lambda: _with(-NAN, _normal()),
    "NaN among denormals": lambda: _with(NAN, _normal() * 1e-40),
    "NaN among equals": lambda: _with(NAN, torch.full((NUMEL,), 0.7)),
    "all NaN": lambda: torch.full((NUMEL,), NAN),
    "minus Inf": lambda: _with(-INF, _normal()),
    "Inf among zeros": lambda: _with(INF, torch.zeros(NUMEL)),
}
FINITE: dict[str, Callable[[], Tensor]] = {
    "denormal": lambda: _normal() * 1e-40,
    "smallest": lambda: torch.full((NUMEL,), 1e-45),
    "equal": lambda: torch.full((NUMEL,), -0.7),
    "zero": lambda: torch.zeros(NUMEL),
    "minus zero": lambda: -torch.zeros(NUMEL),
    "huge": lambda: _normal().sign() * 3e38,
}


@dataclass
class Step:
    """What one step gave: whether it was refused, its payload, and the state that it left."""

    refused: bool
    payload: Tensor
    state: list[Tensor]


def _steps(codec: PayloadCodec, second: Tensor, plain: bool) -> list[Step]:
    """Three steps. The first and the last one have ordinary values."""
    residual = torch.zeros(NUMEL) if codec.keeps_residual else None
    memory: dict[str, Tensor] = {}
    found = []
    with reference_only() if plain else nullcontext():
        for number, values in enumerate((_normal(1) * 0.1, second, _normal(2) * 0.1)):
            part, broken = TensorSlice(values.clone(), "p", residual=residual, memory=memory), list[TensorSlice]()
            payload = pack(codec, [part], RngKey(1, number), broken.append)
            unpack(codec, payload, [torch.empty(NUMEL)], accumulate=False, step=number)  # it can be read
            kept = [memory[key] for key in sorted(memory)] + ([] if residual is None else [residual])
            found.append(Step(bool(broken), payload, [row.clone() for row in kept]))
    return found


def _bits(tensors: list[Tensor]) -> list[bytes]:
    return [bytes(tensor.view(torch.uint8).numpy()) for tensor in tensors]


@pytest.mark.parametrize("spec", CODECS)
def test_what_is_not_finite_is_refused_and_changes_no_state(spec: str) -> None:
    codec = build_codec(spec)
    assert isinstance(codec, PayloadCodec)
    for name, make in NOT_FINITE.items():
        fused, plain = (_steps(codec, make(), each) for each in (False, True))
        for steps in (fused, plain):
            assert [step.refused for step in steps] == [False, True, False], name
            assert _bits(steps[1].state) == _bits(steps[0].state), name
        assert [_bits([step.payload, *step.state]) for step in fused] == [
            _bits([step.payload, *step.state]) for step in plain
        ], name


@pytest.mark.parametrize("plain", [False, True])
def test_an_overflow_with_the_state_leaves_it_finite(plain: bool) -> None:
    """Finite values that add up to Inf with what was left unsent: reported, and no later step is NaN by it."""
    for spec in CODECS:
        codec = build_codec(spec)
        assert isinstance(codec, PayloadCodec)
        large = torch.full((NUMEL,), 3e38)
        part = TensorSlice(large.clone(), "p", residual=large.clone() if codec.keeps_residual else None)
        with reference_only() if plain else nullcontext():
            pack(codec, [part], RngKey(1), lambda part: None)
        kept = [*part.memory.values(), *([] if part.residual is None else [part.residual])]
        assert all(bool(torch.isfinite(each).all()) for each in kept), spec


@pytest.mark.parametrize("spec", CODECS)
def test_both_kernels_give_the_same_bits_at_the_edges_of_float32(spec: str) -> None:
    codec = build_codec(spec)
    assert isinstance(codec, PayloadCodec)
    for name, make in FINITE.items():
        fused, plain = (_steps(codec, make(), each) for each in (False, True))
        assert [step.refused for step in fused] == [step.refused for step in plain], name
        assert not fused[1].refused or name == "huge"
        assert [_bits([step.payload, *step.state]) for step in fused] == [
            _bits([step.payload, *step.state]) for step in plain
        ], name
        assert all(bool(torch.isfinite(row).all()) for step in fused for row in step.state), name


def test_kernels_choose_nan_like_a_largest_value() -> None:
    flat = _with(NAN, _normal())
    for run in (sparse_fused, sparse_reference):
        for indices, values in (
            run.largest(flat, None, 10),
            run.largest_of_buckets(flat, None, 2, 512),
            run.at_least(flat, None, 1.0),
            run.at_least(flat, None, 1e-3),
        ):
            assert 7_777 in indices.tolist()
            assert not bool(torch.isfinite(values).all())
