"""The loops of quantize, onebit, ternary, stochastic cast and powersgd for the CPU, compiled by numba.

They give the same bits as `dense_reference.py`, where the formulas and layouts are written down, and as `powersgd.py`.
A block stays in the first-level cache. Whole numbers are cast after each step, because numba widens them to 64 bits,
and a loop over wide numbers is four times slower. Imported only if numba is installed: see `dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Number",
    "cast_stochastic",
    "decode_onebit",
    "decode_quantize",
    "decode_ternary",
    "encode_onebit",
    "encode_quantize",
    "encode_ternary",
    "jit",
    "orthonormal",
    "product",
]

F = TypeVar("F", bound=Callable[..., Any])
Number = Any
"""A numpy scalar. Its dtype is inferred by numba; numpy's annotations lose it at the first operation."""
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

LANES = 64
SAFE_SCALE = np.float32(2.0**64)
LITTLE = np.float32(2.0**-64)
LARGEST = np.float64(3.4028234663852886e38)
ONES = np.uint64(0x0101010101010101)
FINE, BAD_SCALE, BAD_CODE = 0, 1, 2


def jit(function: F) -> F:
    """Compile at the first call, without the GIL. The code is cached on disk if a folder is writable."""
    try:
        return cast("F", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # neither beside the source nor in the home directory: compile in each process
        return cast("F", numba.njit(nogil=True)(function))


@jit
def mix32(x: Number) -> Number:
    """As in `random_bits.py`. Each step is cast back, because numba widens integers."""
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@jit
def bits_of(place: Number, key: Number) -> Number:
    """The 32 random bits of an element."""
    return mix32(np.uint32(np.uint32(place * np.uint32(0x9E3779B1)) ^ key))


@jit
def put_floats(values: Floats, body: Bytes) -> bool:
    """Write floats byte by byte, since a body may begin anywhere. Returns True if all are finite."""
    bits = values.view(np.uint32)
    finite = True
    for b in range(len(bits)):
        finite &= np.uint32(bits[b] & np.uint32(0x7FFFFFFF)) < np.uint32(0x7F800000)
        for k in range(4):
            body[4 * b + k] = np.uint8(np.uint32(bits[b] >> np.uint32(8 * k)))
    return finite


@jit
def get_floats(body: Bytes, count: int) -> Floats:
    """The inverse of `put_floats`."""
    values = np.empty(count, dtype=np.float32)
    bits = values.view(np.uint32)
    for b in range(count):
        low = np.uint32(np.uint32(body[4 * b]) | np.uint32(np.uint32(body[4 * b + 1]) << np.uint32(8)))
        high = np.uint32(np.uint32(body[4 * b + 2]) | np.uint32(np.uint32(body[4 * b + 3]) << np.uint32(8)))
        bits[b] = np.uint32(low | np.uint32(high << np.uint32(16)))
    return values


@jit
def are_scales(values: Floats) -> bool:
    """True if all are finite and not negative."""
    good = True
    for b in range(len(values)):
        good &= np.float32(0) <= values[b] < np.float32(np.inf)
    return good


@jit
def take(flat: Floats, residual: Floats, buffer: Floats) -> Floats:
    """residual + flat, in `buffer`; `flat` itself if there is no residual."""
    if len(residual) == 0:
        return flat
    block = buffer[: len(flat)]
    for j in range(len(flat)):
        block[j] = residual[j] + flat[j]
    return block


@jit
def largest(block: Floats, into: Floats) -> None:
    """max|x|, by the bits: without the sign they compare like whole numbers, and such a loop is vectorised."""
    bits = block.view(np.int32)
    found = np.int32(0)
    for j in range(len(bits)):
        found = max(found, np.int32(bits[j] & np.int32(0x7FFFFFFF)))
    into.view(np.int32)[0] = found


@jit
def fold(lanes: Doubles) -> Number:
    """Add the lanes in halves."""
    half = len(lanes) // 2
    while half:
        for k in range(half):
            lanes[k] += lanes[k + half]
        half //= 2
    return lanes[0]


@jit
def squares(block: Floats, lanes: Doubles) -> Number:
    """Σx², added up in lanes, so that several can be added at once and always in the same order."""
    lanes[:] = 0.0
    for i in range(0, len(block), LANES):
        row = block[i : i + LANES]
        for k in range(len(row)):
            x = np.float64(row[k])
            lanes[k] += x * x
    return fold(lanes)


@jit
def fit(scale: Number) -> Number:
    """The power of two that brings a scale to where its reciprocal, and 2^30 times it, are normal numbers."""
    if scale < LITTLE:
        return SAFE_SCALE
    return LITTLE if scale > SAFE_SCALE else np.float32(1)


@jit
def pack_planes(codes: Bytes, bits: int, planes: Bytes) -> None:
    """One bit of each code after the other, 8 codes to a byte and 8 bytes at a time; both are of whole words."""
    words, into = codes.view(np.uint64), planes.view(np.uint64)
    m = len(words) // 8
    for p in range(bits):
        plane = into[p * m : (p + 1) * m]
        shift = np.uint64(p)
        plane[:] = np.uint64(0)
        for k in range(8):
            row = words[k * m : (k + 1) * m]
            place = np.uint64(k)
            for j in range(m):
                plane[j] |= ((row[j] >> shift) & ONES) << place


@jit
def unpack_planes(planes: Bytes, bits: int, codes: Bytes) -> None:
    """The inverse of `pack_planes`."""
    words, source = codes.view(np.uint64), planes.view(np.uint64)
    m = len(words) // 8
    words[:] = np.uint64(0)
    for k in range(8):
        row = words[k * m : (k + 1) * m]
        place = np.uint64(k)
        for p in range(bits):
            plane = source[p * m : (p + 1) * m]
            shift = np.uint64(p)
            for j in range(m):
                row[j] |= ((plane[j] >> place) & ONES) << shift


@jit
def put_planes(codes: Bytes, n: int, bits: int, rows: Bytes, planes: Bytes, body: Bytes) -> int:
    """Pack a block's n codes into a body. Returns the number of bytes. Codes behind the last are zero."""
    m = (n + 7) // 8
    wide = (m + 7) // 8 * 8
    source = codes
    if n < 8 * wide:  # the end of a part, or an odd block: move the rows to where words begin
        rows[:] = np.uint8(0)
        for k in range(8):
            row = codes[min(k * m, n) : min((k + 1) * m, n)]
            for j in range(len(row)):
                rows[k * wide + j] = row[j]
        source = rows
    pack_planes(source[: 8 * wide], bits, planes)
    for p in range(bits):
        for j in range(m):
            body[p * m + j] = planes[p * wide + j]
    return bits * m


@jit
def get_planes(codes: Bytes, n: int, bits: int, rows: Bytes, planes: Bytes, body: Bytes) -> int:
    """Unpack a block's n codes from a body. Returns the number of bytes."""
    m = (n + 7) // 8
    wide = (m + 7) // 8 * 8
    for p in range(bits):
        for j in range(m):
            planes[p * wide + j] = body[p * m + j]
    into = codes if n == 8 * wide else rows
    unpack_planes(planes, bits, into[: 8 * wide])
    if n < 8 * wide:
        for k in range(8):
            row = codes[min(k * m, n) : min((k + 1) * m, n)]
            for j in range(len(row)):
                row[j] = rows[k * wide + j]
    return bits * m


@jit
def round_levels(block: Floats, codes: Bytes, scale: Number, most: int, stochastic: bool, start: int, key: int) -> None:
    """Codes of the levels, in fixed point with 23 bits after the point."""
    factor = fit(scale)
    top = np.int32(most << 23)
    each = np.float32(np.float32(top) / np.float32(scale * factor)) if scale > 0 else np.float32(0)
    middle, first, mark = np.int32(most), np.uint32(start), np.uint32(key)
    up = np.int32(1 << 22)
    for j in range(np.int32(len(block))):
        level = np.int32(np.float32(np.float32(block[j] * factor) * each))
        level = np.int32(min(max(level, np.int32(-top)), top))
        if stochastic:
            up = np.int32(bits_of(np.uint32(first + np.uint32(j)), mark) >> np.uint32(9))
        codes[j] = np.uint8(np.int32(np.int32(level + up) >> np.int32(23)) + middle)


@jit
def level_of(code: Number, most: Number, share: Number, scale: Number) -> Number:
    """The value of a code."""
    return np.float32(np.float32(np.float32(np.int32(np.int32(code) - most)) * share) * scale)


@jit
def encode_quantize(
    flat: Floats,
    residual: Floats,
    body: Bytes,
    bucket: int,
    bits: int,
    euclid: bool,
    stochastic: bool,
    start: int,
    key: int,
) -> bool:
    """Scales and codes of a part. No residual: it is empty. Returns False if a scale is not finite."""
    scales = np.empty((len(flat) + bucket - 1) // bucket, dtype=np.float32)
    most = np.int32((1 << (bits - 1)) - 1)
    share = np.float32(np.float32(1) / np.float32(most))
    lanes = np.empty(LANES, dtype=np.float64)
    buffer = np.empty(min(bucket, len(residual)), dtype=np.float32)
    codes = np.empty((bucket + 63) // 64 * 64, dtype=np.uint8)
    rows, planes = np.empty_like(codes), np.empty_like(codes)
    at = 4 * len(scales)
    for b in range(len(scales)):
        lo = b * bucket
        hi = min(lo + bucket, len(flat))
        left = residual[lo:hi]
        block = take(flat[lo:hi], left, buffer)
        if euclid:
            scales[b] = np.float32(min(np.sqrt(squares(block, lanes)), LARGEST))
        else:
            largest(block, scales[b : b + 1])
        scale = scales[b]
        round_levels(block, codes, scale, most, stochastic, start + lo, key)
        for j in range(len(left)):
            left[j] = block[j] - level_of(codes[j], most, share, scale)
        at += put_planes(codes, hi - lo, bits, rows, planes, body[at:])
    return put_floats(scales, body)


@jit
def spare_code(body: Bytes, numel: int, bits: int, bucket: int) -> bool:
    """True if a body has a code with all bits set, which no level has."""
    full = np.empty((bucket + 7) // 8, dtype=np.uint8)
    found = np.uint8(0)
    at = 0
    for lo in range(0, numel, bucket):
        m = (min(bucket, numel - lo) + 7) // 8
        for j in range(m):
            full[j] = body[at + j]
        for p in range(1, bits):
            plane = body[at + p * m : at + (p + 1) * m]
            for j in range(m):
                full[j] &= plane[j]
        for j in range(m):
            found |= full[j]
        at += bits * m
    return bool(found != 0)


@jit
def decode_quantize(body: Bytes, out: Floats, bucket: int, bits: int, accumulate: bool) -> int:
    """Write or add what the codes say; nothing is written where the body is not `FINE`."""
    scales = get_floats(body, (len(out) + bucket - 1) // bucket)
    at = 4 * len(scales)
    if not are_scales(scales):
        return BAD_SCALE
    if spare_code(body[at:], len(out), bits, bucket):
        return BAD_CODE
    most = np.int32((1 << (bits - 1)) - 1)
    share = np.float32(np.float32(1) / np.float32(most))
    codes = np.empty((bucket + 63) // 64 * 64, dtype=np.uint8)
    rows, planes = np.empty_like(codes), np.zeros_like(codes)
    for b in range(len(scales)):
        row = out[b * bucket : min((b + 1) * bucket, len(out))]
        at += get_planes(codes, len(row), bits, rows, planes, body[at:])
        scale = scales[b]
        if accumulate:
            for j in range(len(row)):
                row[j] += level_of(codes[j], most, share, scale)
        else:
            for j in range(len(row)):
                row[j] = level_of(codes[j], most, share, scale)
    return FINE


@jit
def two_means(block: Floats, upper: Doubles, lower: Doubles, means: Floats) -> None:
    """The mean of those that are not negative, and of those that are."""
    upper[:] = 0.0
    lower[:] = 0.0
    for i in range(0, len(block), LANES):
        row = block[i : i + LANES]
        for k in range(len(row)):
            x = np.float64(row[k])
            upper[k] += 0.0 if x < 0 else x
            lower[k] += x if x < 0 else 0.0
    negative = np.int32(0)
    for j in range(len(block)):
        negative += np.int32(block[j] < np.float32(0))
    means[0] = np.float32(fold(upper) / max(len(block) - negative, 1))
    means[1] = np.float32(fold(lower) / max(negative, 1))


@jit
def encode_onebit(flat: Floats, residual: Floats, body: Bytes, bucket: int) -> bool:
    """Two means for each block, and signs. No residual: it is empty. Returns False if a mean is not finite."""
    means = np.empty((len(flat) + bucket - 1) // bucket * 2, dtype=np.float32)
    upper, lower = np.empty(LANES, dtype=np.float64), np.empty(LANES, dtype=np.float64)
    buffer = np.empty(min(bucket, len(residual)), dtype=np.float32)
    codes = np.empty((bucket + 63) // 64 * 64, dtype=np.uint8)
    rows, planes = np.empty_like(codes), np.empty_like(codes)
    at = 4 * len(means)
    for b in range(len(means) // 2):
        lo = b * bucket
        hi = min(lo + bucket, len(flat))
        left = residual[lo:hi]
        block = take(flat[lo:hi], left, buffer)
        two_means(block, upper, lower, means[2 * b : 2 * b + 2])
        above, below = means[2 * b], means[2 * b + 1]
        for j in range(len(block)):
            codes[j] = np.uint8(block[j] < np.float32(0))
        for j in range(len(left)):
            left[j] = block[j] - (below if block[j] < np.float32(0) else above)
        at += put_planes(codes, hi - lo, 1, rows, planes, body[at:])
    return put_floats(means, body)


@jit
def decode_onebit(body: Bytes, out: Floats, bucket: int, accumulate: bool) -> int:
    """Write or add the mean of each sign; nothing is written where the body is not `FINE`."""
    means = get_floats(body, (len(out) + bucket - 1) // bucket * 2)
    for b in range(1, len(means), 2):
        means[b] = -means[b]
    if not are_scales(means):
        return BAD_SCALE
    codes = np.empty((bucket + 63) // 64 * 64, dtype=np.uint8)
    rows, planes = np.empty_like(codes), np.zeros_like(codes)
    at = 4 * len(means)
    for b in range(len(means) // 2):
        row = out[b * bucket : min((b + 1) * bucket, len(out))]
        at += get_planes(codes, len(row), 1, rows, planes, body[at:])
        above, below = means[2 * b], -means[2 * b + 1]
        if accumulate:
            for j in range(len(row)):
                row[j] += below if codes[j] else above
        else:
            for j in range(len(row)):
                row[j] = below if codes[j] else above
    return FINE


@jit
def ternary_scales(flat: Floats, residual: Floats, block_size: int, shared: bool, clip: float) -> Floats:
    """The scale of each block, or of all; `clip` 0: no clipping."""
    count = (len(flat) + block_size - 1) // block_size
    tops = np.empty(count, dtype=np.float32)
    wide = 1
    while wide < count:
        wide *= 2
    sums = np.zeros(wide, dtype=np.float64)
    lanes = np.empty(LANES, dtype=np.float64)
    buffer = np.empty(min(block_size, len(residual)), dtype=np.float32)
    for b in range(count):
        lo = b * block_size
        hi = min(lo + block_size, len(flat))
        block = take(flat[lo:hi], residual[lo:hi], buffer)
        largest(block, tops[b : b + 1])
        if clip > 0:
            sums[b] = squares(block, lanes)
            if not shared:
                tops[b] = min(tops[b], np.float32(clip * np.sqrt(sums[b] / (hi - lo))))
    if not shared or count == 0:
        return tops
    largest(tops, tops[:1])
    if clip > 0:
        tops[0] = min(tops[0], np.float32(clip * np.sqrt(fold(sums) / len(flat))))
    return tops[:1]


@jit
def put_threes(codes: Bytes, n: int, body: Bytes) -> int:
    """Five digits of base 3 to a byte. Returns the number of bytes. Digits behind the last stand for zero."""
    m = (n + 4) // 5
    for j in range(n, 5 * m):
        codes[j] = np.uint8(1)
    c0, c1, c2, c3, c4 = codes[:m], codes[m : 2 * m], codes[2 * m : 3 * m], codes[3 * m : 4 * m], codes[4 * m : 5 * m]
    for j in range(m):
        body[j] = np.uint8(c0[j] + 3 * c1[j] + 9 * c2[j] + 27 * c3[j] + 81 * c4[j])
    return m


@jit
def get_threes(codes: Bytes, n: int, digits: Bytes, body: Bytes) -> int:
    """The inverse of `put_threes`."""
    m = (n + 4) // 5
    for j in range(m):
        digits[j] = body[j]
    for k in range(5):
        row = codes[k * m : (k + 1) * m]
        for j in range(m):
            third = np.uint8(np.uint16(np.uint16(digits[j]) * np.uint16(171)) >> np.uint16(9))
            row[j] = np.uint8(digits[j] - np.uint8(third * np.uint8(3)))
            digits[j] = third
    return m


@jit
def encode_ternary(
    flat: Floats, residual: Floats, body: Bytes, block_size: int, shared: bool, clip: float, start: int, key: int
) -> bool:
    """Scales and digits of a part. No residual: it is empty. Returns False if a scale is not finite."""
    scales = ternary_scales(flat, residual, block_size, shared, clip)
    if not put_floats(scales, body):
        return False
    buffer = np.empty(min(block_size, len(residual)), dtype=np.float32)
    codes = np.empty(block_size + 4, dtype=np.uint8)
    mark = np.uint32(key)
    at = 4 * len(scales)
    for b in range((len(flat) + block_size - 1) // block_size):
        lo = b * block_size
        hi = min(lo + block_size, len(flat))
        left = residual[lo:hi]
        block = take(flat[lo:hi], left, buffer)
        scale = scales[0 if shared else b]
        factor = fit(scale)
        each = np.float32(np.float32(1 << 24) / np.float32(scale * factor)) if scale > 0 else np.float32(0)
        first = np.uint32(start + lo)
        for j in range(np.int32(len(block))):
            chance = np.float32(np.float32(abs(block[j]) * factor) * each)
            chance = chance if chance < np.float32(1 << 24) else np.float32(1 << 24)
            random = np.int32(bits_of(np.uint32(first + np.uint32(j)), mark) >> np.uint32(8))
            kept = np.int32(random < np.int32(chance))
            codes[j] = np.uint8(np.int32(1) + (-kept if block[j] < np.float32(0) else kept))
        for j in range(len(left)):
            left[j] = block[j] - np.float32(np.float32(np.int32(codes[j]) - np.int32(1)) * scale)
        at += put_threes(codes, hi - lo, body[at:])
    return True


@jit
def decode_ternary(body: Bytes, out: Floats, block_size: int, shared: bool, accumulate: bool) -> int:
    """Write or add what the digits say; nothing is written where the body is not `FINE`."""
    count = (len(out) + block_size - 1) // block_size
    scales = get_floats(body, min(count, 1) if shared else count)
    if not are_scales(scales):
        return BAD_SCALE
    at = 4 * len(scales)
    most = np.uint8(0)
    for j in range(at, len(body)):
        most = max(most, body[j])
    if most > np.uint8(242):
        return BAD_CODE
    codes = np.empty(block_size + 4, dtype=np.uint8)
    digits = np.empty((block_size + 4) // 5, dtype=np.uint8)
    for b in range(count):
        row = out[b * block_size : min((b + 1) * block_size, len(out))]
        at += get_threes(codes, len(row), digits, body[at:])
        scale = scales[0 if shared else b]
        if accumulate:
            for j in range(len(row)):
                row[j] += np.float32(np.float32(np.int32(codes[j]) - np.int32(1)) * scale)
        else:
            for j in range(len(row)):
                row[j] = np.float32(np.float32(np.int32(codes[j]) - np.int32(1)) * scale)
    return FINE


@jit
def cast_stochastic(
    values: NDArray[np.float32], halves: NDArray[np.int16], brain: bool, limit: int, start: int, key: int
) -> None:
    """The bits of half-precision neighbours, up with the probability that makes the mean right."""
    bits = values.view(np.uint32)
    top = np.uint32(limit)
    for j in range(len(values)):
        sign = np.uint32(np.uint32(bits[j] >> np.uint32(16)) & np.uint32(0x8000))
        size = np.uint32(bits[j] & np.uint32(0x7FFFFFFF))
        random = bits_of(np.uint32(start + j), np.uint32(key))
        if brain:
            half = np.uint32(np.uint32(size + np.uint32(random >> np.uint32(16))) >> np.uint32(16))
        else:
            half = np.uint32(
                np.uint32(np.uint32(size + np.uint32(random >> np.uint32(19))) >> np.uint32(13)) - np.uint32(112 << 10)
            )
            if size < np.uint32(113 << 23):  # below fp16's normal numbers the steps are 2^-24 wide
                steps = np.float32(abs(values[j]) * np.float32(2.0**24))
                low = np.int32(steps)
                rest = np.int32(np.float32(steps - np.float32(low)) * np.float32(1 << 24))
                half = np.uint32(low + np.int32(np.int32(random >> np.uint32(8)) < rest))
        halves[j] = np.int16(np.uint16(min(half, top) | sign))


def orthonormal(columns: Tensor, dependent: float) -> None:
    """Modified Gram-Schmidt of the rows of a float64 tensor, in place."""
    _orthonormal(columns.numpy(), dependent)


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Σ_k left[k]ᵀ right[k] into `out`, the terms of an element in the order of k."""
    _product(left.numpy(), right.numpy(), out.numpy())


@jit
def _total(row: Number) -> Number:
    """Pairwise summation; overwrites `row`."""
    count = row.shape[0]
    if count == 0:
        return 0.0
    while count > 1:
        half = (count + 1) // 2
        for index in range(count - half):
            row[index] += row[half + index]
        count = half
    return row[0]


@jit
def _orthonormal(columns: Number, dependent: Number) -> None:
    count, length = columns.shape
    scratch = np.empty(length, np.float64)
    for index in range(count):
        column = columns[index]
        for place in range(length):
            scratch[place] = column[place] * column[place]
        before = _total(scratch)
        for earlier in range(index):
            other = columns[earlier]
            for place in range(length):
                scratch[place] = other[place] * column[place]
            shared = _total(scratch)
            for place in range(length):
                column[place] -= shared * other[place]
        for place in range(length):
            scratch[place] = column[place] * column[place]
        after = _total(scratch)
        if after <= dependent * dependent * before:
            column[:] = 0.0
        else:
            norm = np.sqrt(after)
            for place in range(length):
                column[place] /= norm


@jit
def _product(left: Number, right: Number, out: Number) -> None:
    for row in range(out.shape[0]):
        into = out[row]
        first, factor = right[0], left[0, row]
        for place in range(into.shape[0]):
            into[place] = factor * first[place]
        for index in range(1, left.shape[0]):
            other, factor = right[index], left[index, row]
            for place in range(into.shape[0]):
                into[place] += factor * other[place]
