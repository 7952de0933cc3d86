"""The arithmetic of quantize, onebit, ternary and cast in plain torch, on any device: the fused kernels must equal it.

A part is cut into blocks (`bucket` elements of the codec), and each block is packed by itself. The last block may be
shorter. A block of n codes of b bits becomes b planes of m = ⌈n/8⌉ bytes; padding codes are zero:

    plane p:   byte j holds bit p of codes j, m + j, 2m + j, … 7m + j, from the lowest bit up

so that neighbours in memory are handled alike, and a machine word at a time. Codes of three values go five to a byte,
as digits of base 3 (243 of 256 values; 1.6 bits each instead of 2), m = ⌈n/5⌉:

    byte j = c_j + 3 c_(m+j) + 9 c_(2m+j) + 27 c_(3m+j) + 81 c_(4m+j)

Sums are of float64, in 64 lanes: lane k adds elements k, 64 + k, … in order, and then the lanes are added in halves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from syncline.codecs.kernels.random_bits import random_bits

__all__ = [
    "cast_stochastic",
    "decode_onebit",
    "decode_quantize",
    "decode_ternary",
    "encode_onebit",
    "encode_quantize",
    "encode_ternary",
]

LANES = 64
SAFE_SCALE = 2.0**64
LARGEST = torch.finfo(torch.float32).max
FINE, BAD_SCALE, BAD_CODE = 0, 1, 2


def blocks(numel: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Groups of blocks of one length: where a group begins, how many blocks, of how many elements."""
    count, rest = divmod(numel, size)
    if count:
        yield 0, count, size
    if rest:
        yield count, 1, rest


def halves(sums: Tensor) -> Tensor:
    """Add up the last dimension, its second half to its first until one is left: the same on every device."""
    wide = 1 << max(sums.shape[-1] - 1, 0).bit_length()
    sums = torch.nn.functional.pad(sums, (0, wide - sums.shape[-1]))
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def lane_sums(rows: Tensor) -> Tensor:
    """Σ of each row of float64, in lanes."""
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % LANES)).view(rows.shape[0], -1, LANES)
    lanes = torch.zeros(rows.shape[0], LANES, dtype=torch.float64, device=rows.device)
    for k in range(rows.shape[1]):
        lanes += rows[:, k]
    return halves(lanes)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as rows of bytes."""
    m = -(-codes.shape[1] // 8)
    lanes = torch.nn.functional.pad(codes, (0, 8 * m - codes.shape[1])).view(-1, 1, 8, m)
    planes = (lanes >> torch.arange(bits, device=codes.device).view(-1, 1, 1)) & 1
    return (planes << torch.arange(8, device=codes.device).view(-1, 1)).sum(2).view(-1, bits * m).to(torch.uint8)


def unpack_planes(body: Tensor, bits: int, count: int, numel: int) -> Tensor:
    """`count` rows of bytes as rows of codes, those behind the last of a row included."""
    m = -(-numel // 8)
    planes = body.view(count, bits, 1, m).to(torch.int64)
    lanes = (planes >> torch.arange(8, device=body.device).view(-1, 1)) & 1
    return (lanes << torch.arange(bits, device=body.device).view(-1, 1, 1)).sum(1).view(count, 8 * m)


def fit(scales: Tensor) -> Tensor:
    """The powers of two that bring scales to where their reciprocals, and 2^30 times them, are normal numbers."""
    one = torch.ones_like(scales)
    return torch.where(
        scales < 1 / SAFE_SCALE, one * SAFE_SCALE, torch.where(scales > SAFE_SCALE, one / SAFE_SCALE, one)
    )


def reciprocal(scales: Tensor, factor: Tensor, top: int) -> Tensor:
    """top / scale, of the scale brought near one; zero where it is zero."""
    fitted = torch.where(scales > 0, scales * factor, torch.ones_like(scales))
    return torch.where(scales > 0, torch.full_like(fitted, top) / fitted, 0.0)


def total(flat: Tensor, residual: Tensor) -> Tensor:
    """What is to be sent; an empty residual means that there is none."""
    return residual + flat if residual.numel() else flat


def put_floats(values: Tensor, body: Tensor) -> bool:
    """Write floats as bytes. Returns True if all are finite."""
    body[: 4 * values.numel()].copy_(values.view(-1).view(torch.uint8))
    return bool(values.isfinite().all())


def get_floats(body: Tensor, count: int) -> Tensor:
    """The inverse of `put_floats`. They are copied, because a body may begin anywhere and a float may not."""
    values = torch.empty(count, device=body.device, dtype=torch.float32)
    values.view(torch.uint8).copy_(body[: 4 * count])
    return values


def put(out: Tensor, values: Tensor, accumulate: bool) -> None:
    if accumulate:
        out += values.view(-1)
    else:
        out.copy_(values.view(-1))


def encode_quantize(
    flat: Tensor,
    residual: Tensor,
    body: Tensor,
    bucket: int,
    bits: int,
    euclid: bool,
    stochastic: bool,
    start: int,
    key: int,
) -> bool:
    """code = ⌊x L/s + u⌋ + L, in fixed point with 23 bits after the point; u is random in [0, 1), or ½.

    An empty residual means that there is none. Returns False if a scale is not finite.
    """
    most = (1 << (bits - 1)) - 1
    scales = torch.empty(-(-flat.numel() // bucket), device=flat.device, dtype=torch.float32)
    values, at = total(flat, residual), 4 * scales.numel()
    for first, count, n in blocks(flat.numel(), bucket):
        lo = first * bucket
        rows = values[lo : lo + count * n].view(count, n)
        found = lane_sums(rows.double() ** 2).sqrt().clamp(max=LARGEST).float() if euclid else rows.abs().amax(1)
        scales[first : first + count] = found
        factor = fit(found)
        levels = ((rows * factor[:, None]) * reciprocal(found, factor, most << 23)[:, None]).to(torch.int64)
        levels = levels.clamp(-(most << 23), most << 23)
        if stochastic:
            up = random_bits(key, start + lo, count * n, flat.device).view(count, n) >> 9
        else:
            up = torch.full_like(levels, 1 << 22)
        codes = ((levels + up) >> 23) + most
        packed = pack_planes(codes, bits).view(-1)
        body[at : at + packed.numel()] = packed
        at += packed.numel()
        if residual.numel():
            residual[lo : lo + count * n] = (rows - levels_of(codes, most, found)).view(-1)
    return put_floats(scales, body)


def levels_of(codes: Tensor, most: int, scales: Tensor) -> Tensor:
    """What codes stand for. The share of the scale is rounded first: so the outermost level is the scale itself."""
    share = torch.ones_like(scales[:1]) / torch.full_like(scales[:1], most)
    return ((codes - most).float() * share) * scales[:, None]


def decode_quantize(body: Tensor, out: Tensor, bucket: int, bits: int, accumulate: bool) -> int:
    """x = ((code − L) · 1/L) · s. A code with all bits set is no level.

    Nothing is written where the body is not `FINE`.
    """
    scales = get_floats(body, -(-out.numel() // bucket))
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        return BAD_SCALE
    at, found = 4 * scales.numel(), []
    for first, count, n in blocks(out.numel(), bucket):
        length = count * bits * -(-n // 8)
        codes = unpack_planes(body[at : at + length], bits, count, n)
        if bool((codes == (1 << bits) - 1).any()):
            return BAD_CODE
        found.append((first, count, n, codes[:, :n]))
        at += length
    for first, count, n, codes in found:
        lo = first * bucket
        levels = levels_of(codes, (1 << (bits - 1)) - 1, scales[first : first + count])
        put(out[lo : lo + count * n], levels.reshape(-1), accumulate)
    return FINE


def encode_onebit(flat: Tensor, residual: Tensor, body: Tensor, bucket: int) -> bool:
    """For each block the mean of those that are not negative and of those that are; a set bit is negative.

    An empty residual means that there is none. Returns False if a mean is not finite.
    """
    means = torch.empty(-(-flat.numel() // bucket), 2, device=flat.device, dtype=torch.float32)
    values, at = total(flat, residual), 4 * means.numel()
    for first, count, n in blocks(flat.numel(), bucket):
        lo = first * bucket
        rows = values[lo : lo + count * n].view(count, n)
        negative = rows < 0
        wide, below = rows.double(), negative.sum(1)
        upper = lane_sums(torch.where(negative, 0.0, wide)) / (n - below).clamp(min=1)
        lower = lane_sums(torch.where(negative, wide, 0.0)) / below.clamp(min=1)
        pairs = torch.stack([upper, lower], 1).float()
        means[first : first + count] = pairs
        packed = pack_planes(negative.to(torch.int64), 1).view(-1)
        body[at : at + packed.numel()] = packed
        at += packed.numel()
        if residual.numel():
            sent = torch.where(negative, pairs[:, 1:], pairs[:, :1])
            residual[lo : lo + count * n] = (rows - sent).view(-1)
    return put_floats(means, body)


def decode_onebit(body: Tensor, out: Tensor, bucket: int, accumulate: bool) -> int:
    """The mean of each sign. Nothing is written where the body is not `FINE`."""
    means = get_floats(body, -(-out.numel() // bucket) * 2).view(-1, 2)
    if not bool(means.isfinite().all() & (means[:, 0] >= 0).all() & (means[:, 1] <= 0).all()):
        return BAD_SCALE
    at = 4 * means.numel()
    for first, count, n in blocks(out.numel(), bucket):
        length = count * -(-n // 8)
        codes = unpack_planes(body[at : at + length], 1, count, n)[:, :n]
        pairs = means[first : first + count]
        lo = first * bucket
        put(out[lo : lo + count * n], torch.where(codes == 1, pairs[:, 1:], pairs[:, :1]).reshape(-1), accumulate)
        at += length
    return FINE


def ternary_scales(flat: Tensor, residual: Tensor, block_size: int, shared: bool, clip: float) -> Tensor:
    """s = max|x| of each block, or of all; no more than clip · √mean(x²), where `clip` is not 0."""
    values = total(flat, residual)
    tops = torch.empty(-(-flat.numel() // block_size), device=flat.device, dtype=torch.float32)
    sums, counts = torch.zeros(2, tops.numel(), dtype=torch.float64, device=flat.device)
    for first, count, n in blocks(flat.numel(), block_size):
        lo = first * block_size
        rows = values[lo : lo + count * n].view(count, n)
        tops[first : first + count] = rows.abs().amax(1)
        sums[first : first + count] = lane_sums(rows.double() ** 2)
        counts[first : first + count] = n
    if shared and tops.numel():
        tops, sums, counts = tops.max().view(1), halves(sums).view(1), counts.sum().view(1)
    return torch.minimum(tops, (clip * (sums / counts).sqrt()).float()) if clip else tops


def encode_ternary(
    flat: Tensor, residual: Tensor, body: Tensor, block_size: int, shared: bool, clip: float, start: int, key: int
) -> bool:
    """digit = 1 + sign(x) [u < |x|/s], u of 24 bits.

    An empty residual means that there is none. Returns False if a scale is not finite.
    """
    scales = ternary_scales(flat, residual, block_size, shared, clip)
    if not put_floats(scales, body):
        return False
    values, at = total(flat, residual), 4 * scales.numel()
    powers = torch.tensor([1, 3, 9, 27, 81], device=flat.device).view(-1, 1)
    for first, count, n in blocks(flat.numel(), block_size):
        lo = first * block_size
        rows = values[lo : lo + count * n].view(count, n)
        scale = scales if shared else scales[first : first + count]
        factor = fit(scale)
        chance = (rows.abs() * factor[:, None]) * reciprocal(scale, factor, 1 << 24)[:, None]
        random = random_bits(key, start + lo, count * n, flat.device).view(count, n) >> 8
        kept = (random < chance.clamp(max=float(1 << 24)).to(torch.int64)).to(torch.int64)
        codes = 1 + torch.where(rows < 0, -kept, kept)
        m = -(-n // 5)
        digits = torch.nn.functional.pad(codes, (0, 5 * m - n), value=1).view(count, 5, m)
        body[at : at + count * m] = (digits * powers).sum(1).view(-1).to(torch.uint8)
        at += count * m
        if residual.numel():
            residual[lo : lo + count * n] = (rows - (codes - 1).float() * scale[:, None]).view(-1)
    return True


def decode_ternary(body: Tensor, out: Tensor, block_size: int, shared: bool, accumulate: bool) -> int:
    """x = (digit − 1) s. A byte above 242 is not five digits; nothing is written where the body is not `FINE`."""
    count = -(-out.numel() // block_size)
    scales = get_floats(body, min(count, 1) if shared else count)
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        return BAD_SCALE
    at = 4 * scales.numel()
    if bool((body[at:] > 242).any()):
        return BAD_CODE
    powers = torch.tensor([1, 3, 9, 27, 81], device=out.device).view(-1, 1)
    for first, count, n in blocks(out.numel(), block_size):
        m = -(-n // 5)
        digits = body[at : at + count * m].view(count, 1, m).to(torch.int64) // powers % 3
        scale = scales if shared else scales[first : first + count]
        values = (digits.view(count, 5 * m)[:, :n] - 1).float() * scale[:, None]
        lo = first * block_size
        put(out[lo : lo + count * n], values.reshape(-1), accumulate)
        at += count * m
    return FINE


def cast_stochastic(values: Tensor, halves: Tensor, brain: bool, limit: int, start: int, key: int) -> None:
    """Random bits are added below those that are kept, and the rest is cut off; `limit` is the largest allowed.

    Below fp16's normal numbers its steps are 2^-24 wide, and up is taken with the fraction of a step as probability.
    """
    bits = values.view(torch.int32).to(torch.int64)
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    random = random_bits(key, start, values.numel(), values.device)
    if brain:
        found = (size + (random >> 16)) >> 16
    else:
        steps = values.abs().clamp(max=2.0**-14) * 2.0**24
        low = steps.to(torch.int64)
        rest = ((steps - low.float()) * float(1 << 24)).to(torch.int64)
        small = low + ((random >> 8) < rest).to(torch.int64)
        found = torch.where(size < 113 << 23, small, ((size + (random >> 19)) >> 13) - (112 << 10))
    found = found.clamp(max=limit) | sign
    halves.copy_(torch.where(found > 0x7FFF, found - 0x10000, found).to(torch.int16))
