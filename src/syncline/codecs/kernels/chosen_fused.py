"""Chosen elements with quantised values in one call: many small parts and many ranks' payloads cost little Python.

The loops are those of `sparse_fused` and `dense_fused`, so the bits are too. numba compiles them into the code that it
keeps on disk for this file, and compiles again only when this file changes: change it with them.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from syncline.codecs.kernels.compiled import Number, jit
from syncline.codecs.kernels.dense_fused import decode_quantize, encode_quantize
from syncline.codecs.kernels.indices import BITMAP, Layout
from syncline.codecs.kernels.sparse_fused import STILL, _arrays, _get_bits, _largest, _pack, _room, _set_bits, _unpack

__all__ = ["NOT_FINITE", "read_rows", "write_largest"]

COUNT = 4
"""Bytes of the count before the indices."""
NOT_FINITE = -1


def write_largest(
    flat: Tensor,
    residual: Tensor | None,
    body: Tensor,
    k: int,
    plan: Layout,
    quantizer: tuple[int, int, bool, bool],
    start: int,
    key: int,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
) -> int:
    """Choose, write count, indices and values, and leave in the residual what they do not say; 0 or `NOT_FINITE`.

    A velocity needs a residual.

    `quantizer` is bits, bucket, whether the norm is Euclid's, and whether rounding is stochastic.
    """
    total, added = _arrays(flat, residual)
    indices, values = _room(flat.numel(), k)
    bits, bucket, euclid, stochastic = quantizer
    arrays = (added, total, residual is not None, indices.numpy(), values.numpy(), body.numpy())
    moving = STILL if velocity is None else velocity.numpy()
    layout = (plan.low, plan.first, plan.nbytes)
    found: int = _write(*arrays, *layout, bits, bucket, euclid, stochastic, start, key, moving, np.float32(momentum))
    return found


def read_rows(rows: Tensor, out: Tensor, count: int, plan: Layout, bits: int, bucket: int, scale: float) -> int:
    """The sum of what rows of bodies say, `scale` times; 0, or a row's number and one more where it cannot be."""
    found: int = _read(
        rows.numpy(), out.numpy(), count, plan.low, plan.first, plan.nbytes, bits, bucket, np.float32(scale)
    )
    return found


@jit
def _write(
    added: Number,
    total: Number,
    both: bool,
    indices: Number,
    values: Number,
    body: Number,
    low: int,
    first: int,
    nbytes: int,
    bits: int,
    bucket: int,
    euclid: bool,
    stochastic: bool,
    start: int,
    key: int,
    velocity: Number,
    momentum: Number,
) -> int:
    k = indices.size
    _largest(added, total, both, k, indices, values, velocity, momentum)
    finite = True
    for j in range(k):
        finite &= np.isfinite(values[j])
    if not finite:
        if both:  # as it was before, as far as it can be known
            for j in range(k):
                total[indices[j]] = values[j]
            more = velocity if velocity.size else added
            for i in range(total.size):
                was = np.float32(total[i] - more[i])
                total[i] = was if np.isfinite(was) else np.float32(0)
            for i in range(velocity.size):
                was = np.float32(np.float32(velocity[i] - added[i]) / momentum)
                velocity[i] = was if np.isfinite(was) else np.float32(0)
        return NOT_FINITE
    for place in range(4):
        body[place] = np.uint8((k >> (8 * place)) & 255)
    packed = body[COUNT : COUNT + nbytes]
    packed[:] = 0
    if low == BITMAP:
        _set_bits(indices, packed)
    else:
        _pack(indices, low, first, packed)
    unsaid = np.zeros(k if both else 0, np.float32)
    encode_quantize(
        values, unsaid, body[COUNT + nbytes :], bits, max(1, min(bucket, k)), euclid, stochastic, start, key
    )
    for j in range(unsaid.size):
        total[indices[j]] = unsaid[j]
    return 0


@jit
def _read(
    rows: Number,
    out: Number,
    count: int,
    low: int,
    first: int,
    nbytes: int,
    bits: int,
    bucket: int,
    scale: Number,
) -> int:
    indices, values = np.empty(count, np.int32), np.empty(count, np.float32)
    out[:] = 0
    for row in range(rows.shape[0]):
        body = rows[row]
        told = np.int64(0)
        for place in range(4):
            told |= np.int64(body[place]) << (8 * place)
        packed = body[COUNT : COUNT + nbytes]
        if told != count:
            return row + 1
        read = _get_bits(packed, out.size, indices) if low == BITMAP else _unpack(packed, out.size, low, first, indices)
        if read != count:
            return row + 1
        if decode_quantize(body[COUNT + nbytes :], values, bits, max(1, min(bucket, count)), False) != 0:
            return row + 1
        if row == 0:
            for j in range(count):
                out[indices[j]] = np.float32(values[j] * scale)
        else:
            for j in range(count):
                out[indices[j]] += np.float32(values[j] * scale)
    return 0
