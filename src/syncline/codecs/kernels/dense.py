"""The dense kernels on tensors: the fused ones where they serve, the reference elsewhere.

A body is that of a codec, whole: its scales first, which the kernels check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syncline.codecs.kernels import dense_reference as reference
from syncline.codecs.kernels.dispatch import fused

__all__ = [
    "cast_stochastic",
    "decode_onebit",
    "decode_quantize",
    "decode_ternary",
    "encode_onebit",
    "encode_quantize",
    "encode_ternary",
]

FAULTS = {
    reference.FINE: "",
    reference.BAD_SCALE: "a scale that is NaN, Inf or of the wrong sign",
    reference.BAD_CODE: "a code that stands for nothing",
}


def encode_quantize(
    flat: Tensor,
    residual: Tensor | None,
    body: Tensor,
    *,
    bits: int,
    bucket: int,
    euclid: bool,
    stochastic: bool,
    start: int,
    key: int,
) -> bool:
    """Write scales and packed codes; a residual is added first, and then holds the rest. False: it is not finite."""
    tensors = (flat, _left(flat, residual), body)
    return bool(_run("encode_quantize", tensors, bits, _most(bucket, flat), euclid, stochastic, start, key))


def decode_quantize(body: Tensor, out: Tensor, *, bits: int, bucket: int, accumulate: bool) -> str:
    """Write or add; otherwise what is wrong, and nothing is written."""
    return FAULTS[_run("decode_quantize", (body, out), bits, _most(bucket, out), accumulate)]


def encode_onebit(flat: Tensor, residual: Tensor | None, body: Tensor, *, bucket: int) -> bool:
    """Write means and signs; a residual is added first, and then holds the rest. False: it is not finite."""
    return bool(_run("encode_onebit", (flat, _left(flat, residual), body), _most(bucket, flat)))


def decode_onebit(body: Tensor, out: Tensor, *, bucket: int, accumulate: bool) -> str:
    """Write or add; otherwise what is wrong, and nothing is written."""
    return FAULTS[_run("decode_onebit", (body, out), _most(bucket, out), accumulate)]


def encode_ternary(
    flat: Tensor,
    residual: Tensor | None,
    body: Tensor,
    *,
    block: int,
    shared: bool,
    clip: float,
    start: int,
    key: int,
) -> bool:
    """Write one scale if `shared`, or one for each block, and digits; `clip` of 0 stands for none.

    A residual is added first, and then holds the rest. False: it is not finite.
    """
    tensors = (flat, _left(flat, residual), body)
    return bool(_run("encode_ternary", tensors, _most(block, flat), shared, float(clip), start, key))


def decode_ternary(body: Tensor, out: Tensor, *, block: int, shared: bool, accumulate: bool) -> str:
    """Write or add; otherwise what is wrong, and nothing is written."""
    return FAULTS[_run("decode_ternary", (body, out), _most(block, out), shared, accumulate)]


def cast_stochastic(values: Tensor, halves: Tensor, *, limit: int, start: int, key: int) -> None:
    """Round to half precision at random, so that the mean is right; never further from zero than the bits `limit`."""
    brain, bits = halves.dtype == torch.bfloat16, halves.view(torch.int16)
    if fused(values):
        from syncline.codecs.kernels import cast_fused

        cast_fused.cast_stochastic(values.detach().numpy(), bits.numpy(), brain, limit, start, key)
    else:
        reference.cast_stochastic(values, bits, brain, limit, start, key)


def _left(flat: Tensor, residual: Tensor | None) -> Tensor:
    return flat[:0] if residual is None else residual


def _most(block: int, flat: Tensor) -> int:
    """A block no longer than the part: the kernels make room for one."""
    return max(1, min(block, flat.numel()))


def _run(name: str, tensors: tuple[Tensor, ...], *arguments: Any) -> Any:
    if fused(tensors[0]):
        from syncline.codecs.kernels import dense_fused

        return getattr(dense_fused, name)(*(each.detach().numpy() for each in tensors), *arguments)
    return getattr(reference, name)(*tensors, *arguments)
