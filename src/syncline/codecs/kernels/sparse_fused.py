"""The loops of sparse codecs for the CPU, in one pass over memory where possible; same bits as `sparse_reference`.

It imports numba, so it is imported only where `dispatch.fused` is true. Compiled code is kept on disk.
`write_largest` and `read_rows` handle selected elements with quantised values in one call: many small slices and many
ranks' payloads then need few Python calls. They inline the loops of `dense_fused`, and numba compiles this file again
only when it changes: change it together with `dense_fused`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.codecs.kernels.dense_fused import Number, decode_quantize, encode_quantize, jit
from syncline.codecs.kernels.indices import BITMAP, IndexLayout, broken
from syncline.errors import IncompatibleError

__all__ = [
    "NOT_FINITE",
    "at_least",
    "largest",
    "largest_of_buckets",
    "merge",
    "pack_indices",
    "read_rows",
    "scatter",
    "unpack_indices",
    "write_largest",
]

STRETCH = 2048
"""Elements handled at once: they and what is noted of them stay in the nearest cache."""
SAMPLE = 16384
MAX_EXACT_COUNT_ELEMENTS = 8192
"""Up to here every magnitude is counted: a sample would save nothing."""
MAGNITUDE = np.int32(0x7FFFFFFF)
STILL = np.empty(0, np.float32)
"""No velocity."""
COUNT_BYTES = 4
NOT_FINITE = -1


def largest(flat: Tensor, residual: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k of largest magnitude, in order; of equal ones the first."""
    total, added = _arrays(flat, residual)
    indices, values = _new_stream(flat.numel(), k)
    _largest(added, total, residual is not None, k, indices.numpy(), values.numpy(), STILL, np.float32(0))
    return indices, values


def largest_of_buckets(flat: Tensor, residual: Tensor | None, k: int, bucket: int) -> tuple[Tensor, Tensor]:
    """The k of largest magnitude of every `bucket`, in order."""
    total, added = _arrays(flat, residual)
    whole, rest = divmod(flat.numel(), bucket)
    count = whole * min(k, bucket) + min(k, rest)
    indices, values = _new_stream(flat.numel(), count + 1)  # one is noted before it is known whether it stays
    _largest_of_buckets(added, total, residual is not None, k, bucket, indices.numpy(), values.numpy())
    return indices[:count], values[:count]


def at_least(flat: Tensor, residual: Tensor | None, threshold: float) -> tuple[Tensor, Tensor]:
    """All of at least this magnitude, and NaN, in order."""
    total, added = _arrays(flat, residual)
    limit, both = np.float32(threshold), residual is not None
    found, values = _new_stream(flat.numel(), flat.numel() // 16 + 8)
    count = _gather(added, total, both, limit, found.numpy(), STILL, np.float32(0))
    if count > found.numel() - 8:
        found, values = _new_stream(flat.numel(), _count(total, limit) + 8)
        count = _gather(total, total, False, limit, found.numpy(), STILL, np.float32(0))
    found, values = found[:count], values[:count]
    _lift(total, both, found.numpy(), values.numpy())
    return found, values


def pack_indices(indices: Tensor, low: int, first: int, out: Tensor) -> None:
    """Write indices as `indices.IndexLayout` lays them out into `out`, zeroed."""
    if low == BITMAP:
        _set_bits(indices.numpy(), out.numpy())
    else:
        _pack(indices.numpy(), low, first, out.numpy())


def unpack_indices(packed: Tensor, numel: int, count: int, low: int, first: int, out: Tensor) -> None:
    """Read indices into `out`, `count` of them; `ProtocolError` where they cannot be."""
    if low == BITMAP:
        read = _get_bits(packed.numpy(), numel, out.numpy())
    else:
        read = _unpack(packed.numpy(), numel, low, first, out.numpy())
    if read != count:
        raise broken(numel, count)


def scatter(out: Tensor, indices: Tensor, values: Tensor, accumulate: bool) -> None:
    """Put values at indices, which are in range and unlike each other, or add them there."""
    _scatter(out.numpy(), indices.numpy(), values.numpy(), accumulate)


def merge(indices: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two sorted streams as one; what both hold is added."""
    most = indices[0].numel() + indices[1].numel()
    places, sums = torch.empty(most, dtype=indices[0].dtype), torch.empty(most, dtype=torch.float32)
    count = _merge(
        indices[0].numpy(), values[0].numpy(), indices[1].numpy(), values[1].numpy(), places.numpy(), sums.numpy()
    )
    return places[:count], sums[:count]


def _arrays(flat: Tensor, residual: Tensor | None) -> tuple[Any, Any]:
    """The memory of the sum, and what is added to it. Without a residual the gradient is the sum already."""
    total = flat if residual is None else residual
    if total.shape != flat.shape or total.dtype != torch.float32 or not total.is_contiguous():
        # compiled code checks no bounds
        raise IncompatibleError(
            f"a residual is a contiguous row of {flat.numel()} float32, not {total.dtype}{list(total.shape)}"
        )
    return total.numpy(), flat.numpy()


def _new_stream(numel: int, count: int) -> tuple[Tensor, Tensor]:
    indices = torch.empty(count, dtype=torch.int32 if numel < 2**31 else torch.int64)
    return indices, torch.empty(count, dtype=torch.float32)


@jit
def _gather(added: Any, total: Any, both: bool, threshold: Any, found: Any, velocity: Any, momentum: Any) -> int:
    """Add, and collect values from the threshold on: in order, at most 8 less than the capacity. NaN counts as larger.

    With a velocity that is what is added, once momentum times it and `added` have become the new one.
    Comparing a stretch into bytes is vectorised; then eight of them are looked at as one word, and most are 0.
    """
    capacity, count = found.size - 8, 0
    hits = np.zeros(STRETCH, np.uint8)
    words = hits.view(np.uint64)
    for start in range(0, total.size, STRETCH):
        here = total[start : start + STRETCH]
        if both:
            more = added[start : start + STRETCH]
            if velocity.size:
                more = _moved(more, velocity[start : start + STRETCH], momentum)
            for i in range(here.size):
                here[i] = here[i] + more[i]
        for i in range(here.size):
            hits[i] = np.uint8(not (abs(here[i]) < threshold))  # `>=` would leave NaN out
        for i in range(here.size, STRETCH):
            hits[i] = 0
        for word in range(words.size):
            if words[word] != 0 and count <= capacity:
                for i in range(8 * word, 8 * word + 8):
                    found[count] = start + i
                    count += np.int64(hits[i])
    return count


@jit
def _moved(added: Any, velocity: Any, momentum: Any) -> Any:
    for i in range(velocity.size):
        velocity[i] = np.float32(momentum * velocity[i]) + added[i]
    return velocity


@jit
def _count(total: Any, threshold: Any) -> int:
    count = 0
    for i in range(total.size):
        count += np.int64(not (abs(total[i]) < threshold))
    return count


@jit
def _lift(total: Any, both: bool, indices: Any, values: Any) -> None:
    """Take values out; with error feedback nothing of them stays."""
    for j in range(indices.size):
        values[j] = total[indices[j]]
        if both:
            total[indices[j]] = 0.0


@jit
def _kth(bits: Any, k: int) -> tuple[Any, int]:
    """The k-th largest magnitude as an integer, and how many equal to it belong to the k largest.

    Counts of the upper 11 bits say in which of 2048 ranges it lies; then the next 10 bits of those, and the last 10.
    """
    kth, need = np.int32(0), k
    for shift, above, size in ((20, 31, 2048), (10, 20, 1024), (0, 10, 1024)):
        counts = np.zeros((4, 2048), np.int64)  # four of each, because adding to the one just added to waits for it
        for i in range(bits.size):
            magnitude = bits[i] & MAGNITUDE
            if magnitude >> above == kth >> above:
                counts[i & 3, (magnitude >> shift) & (size - 1)] += 1
        place = size - 1
        for lane in (1, 2, 3):
            for i in range(size):
                counts[0, i] += counts[lane, i]
        while counts[0, place] < need:
            need -= counts[0, place]
            place -= 1
        kth |= np.int32(place << shift)
    return kth, need


@jit
def _sampled(added: Any, total: Any, both: bool, k: int, velocity: Any, momentum: Any) -> Any:
    """A magnitude that somewhat more than k will reach, from a sample spread over all."""
    bits, size = np.empty(SAMPLE, np.float32), total.size
    for j in range(SAMPLE):
        place = j * size // SAMPLE
        place += (j * 40503 & 0xFFFF) * ((j + 1) * size // SAMPLE - place) >> 16  # never the same column of a matrix
        more = added[place] if both else np.float32(0)
        if velocity.size:
            more = np.float32(momentum * velocity[place]) + more
        bits[j] = total[place] + more
    hope = SAMPLE * k / size
    kth, _ = _kth(bits.view(np.int32), min(SAMPLE, int(hope + 4 * np.sqrt(hope) + 8)))
    single = np.empty(1, np.int32)
    single[0] = kth
    return single.view(np.float32)[0]


@jit
def _largest(
    added: Any, total: Any, both: bool, k: int, indices: Any, values: Any, velocity: Any, momentum: Any
) -> None:
    bits, count = total.view(np.int32), 0
    candidates = np.empty(0, np.int32)
    found = indices
    if total.size > MAX_EXACT_COUNT_ELEMENTS:
        found = np.empty(min(total.size, 8 * k + total.size // 512) + 8, indices.dtype)
        threshold = _sampled(added, total, both, k, velocity, momentum)
        count = _gather(added, total, both, threshold, found, velocity, momentum)
    elif both:
        more = _moved(added, velocity, momentum) if velocity.size else added
        for i in range(total.size):
            total[i] = total[i] + more[i]
    near = k <= count <= found.size - 8  # otherwise the sample misled, and all are candidates
    if near:
        candidates = np.empty(count, np.int32)
        for j in range(count):
            candidates[j] = bits[found[j]]
    among = candidates if near else bits
    kth, need = _kth(among, k)
    at = 0
    for j in range(among.size):
        magnitude = among[j] & MAGNITUDE
        if magnitude > kth or (magnitude == kth and need > 0):
            need -= np.int64(magnitude == kth)
            indices[at] = found[j] if near else j
            at += 1
            if at == k:
                break
    _lift(total, both, indices, values)


@jit
def _reach(bits: Any, size: int, limit: Any) -> Any:
    count = np.int32(0)
    for i in range(size):
        count += np.int32(bits[i] >= limit)
    return count


@jit
def _last_kept(bits: Any, size: int, keep: int, guess: int) -> tuple[int, int]:
    """A magnitude that the `keep` largest reach and, where they are unlike, no other; and how many reach it.

    Counting the magnitudes that reach a limit is vectorised, so limits are tried: near the guess, then further away,
    then by bisection.
    """
    low, high, reach, tried, stride = np.int64(0), np.int64(1 << 31), np.int64(size), np.int64(guess), np.int64(1 << 19)
    while reach > keep and high - low > 1:
        if tried <= low or tried >= high or high - low <= 2 * stride:
            tried = (low + high) >> 1
        count = np.int64(_reach(bits, size, np.int32(tried)))
        stride *= 2
        if count >= keep:
            low, reach, tried = tried, count, tried + stride
        else:
            high, tried = tried, tried - stride
    return low, reach


@jit
def _largest_of_buckets(added: Any, total: Any, both: bool, k: int, bucket: int, indices: Any, values: Any) -> None:
    bits, magnitudes, at, kth = total.view(np.int32), np.empty(bucket, np.int32), 0, np.int64(0)
    hits = np.zeros(-(-bucket // 8) * 8, np.uint8)
    words = hits.view(np.uint64)
    for start in range(0, total.size, bucket):
        here, those = total[start : start + bucket], bits[start : start + bucket]
        if both:
            more = added[start : start + bucket]
            for i in range(here.size):
                here[i] = here[i] + more[i]
        size, keep = here.size, min(k, here.size)
        for i in range(size):
            magnitudes[i] = those[i] & MAGNITUDE
        kth, reach = _last_kept(magnitudes, size, keep, kth)
        limit = np.int32(kth)
        for i in range(size):
            hits[i] = np.uint8(magnitudes[i] >= limit)
        for i in range(size, hits.size):
            hits[i] = 0
        spare, i = reach - keep, size - 1  # equal to the last that is kept, and after it
        while spare > 0:
            if magnitudes[i] == limit:
                hits[i] = 0
                spare -= 1
            i -= 1
        for word in range(words.size):
            if words[word] != 0:
                for i in range(8 * word, 8 * word + 8):
                    indices[at] = start + i
                    at += np.int64(hits[i])
    _lift(total, both, indices[:at], values)


@jit
def _set_bits(indices: Any, out: Any) -> None:
    for j in range(indices.size):
        place = np.int64(indices[j])
        out[place >> 3] |= np.uint8(1 << (place & 7))


@jit
def _get_bits(packed: Any, numel: int, out: Any) -> int:
    """The places of the bits that are set; -1 if `out` has another size, or a place is beyond `numel`."""
    count, capacity = 0, out.size
    places = np.empty(capacity + 8, out.dtype)
    for at in range(packed.size):
        byte = np.int64(packed[at])
        if byte != 0:
            if count > capacity:
                return -1
            for bit in range(8):
                places[count] = 8 * at + bit
                count += (byte >> bit) & 1
    if count != capacity or (capacity > 0 and places[capacity - 1] >= numel):
        return -1
    for j in range(capacity):  # numba takes seconds to compile the same as slices
        out[j] = places[j]
    return count


@jit
def _pack(indices: Any, low: int, first: int, out: Any) -> None:
    mask, waiting, held, at = np.int64((1 << low) - 1), np.int64(0), 0, first
    for j in range(indices.size):
        index = np.int64(indices[j])
        place = (index >> low) + j
        out[place >> 3] |= np.uint8(1 << (place & 7))
        waiting |= (index & mask) << held
        held += low
        while held >= 8:
            out[at] = np.uint8(waiting & 255)
            waiting >>= 8
            held -= 8
            at += 1
    if held > 0:
        out[at] = np.uint8(waiting)


@jit
def _unpack(packed: Any, numel: int, low: int, first: int, out: Any) -> int:
    """How many indices were read; -1 where they are not as many, not increasing, or too large."""
    mask, waiting, held, at, last = np.int64((1 << low) - 1), np.int64(0), 0, first, np.int64(-1)
    places = np.empty(out.size, np.int64)
    if _get_bits(packed[:first], 8 * first, places) < 0:
        return -1
    bad = False
    for j in range(out.size):
        while held < low:
            waiting |= np.int64(packed[at]) << held
            held += 8
            at += 1
        index = ((places[j] - j) << low) | (waiting & mask)
        waiting >>= low
        held -= low
        bad |= index <= last or index >= numel
        last = index
        out[j] = index
    return -1 if bad else out.size


@jit
def _scatter(out: Any, indices: Any, values: Any, accumulate: bool) -> None:
    if accumulate:
        for j in range(indices.size):
            out[indices[j]] += values[j]
    else:
        for j in range(indices.size):
            out[indices[j]] = values[j]


@jit
def _merge(indices: Any, values: Any, others: Any, theirs: Any, places: Any, sums: Any) -> int:
    a, b, at = 0, 0, 0
    while a < indices.size and b < others.size:
        one, two = indices[a], others[b]
        places[at] = min(one, two)
        if one == two:
            sums[at] = values[a] + theirs[b]
        else:
            sums[at] = values[a] if one < two else theirs[b]
        a += np.int64(one <= two)
        b += np.int64(two <= one)
        at += 1
    for j in range(a, indices.size):
        places[at] = indices[j]
        sums[at] = values[j]
        at += 1
    for j in range(b, others.size):
        places[at] = others[j]
        sums[at] = theirs[j]
        at += 1
    return at


def write_largest(
    flat: Tensor,
    residual: Tensor | None,
    body: Tensor,
    k: int,
    plan: IndexLayout,
    quantizer: tuple[int, int, bool, bool],
    start: int,
    key: int,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
) -> int:
    """Choose, write count, indices and values, and leave the rest in the residual. Returns 0 or `NOT_FINITE`.

    A velocity needs a residual.

    `quantizer` is bits, bucket, True for the Euclidean norm, and True for stochastic rounding.
    """
    total, added = _arrays(flat, residual)
    indices, values = _new_stream(flat.numel(), k)
    bits, bucket, euclid, stochastic = quantizer
    arrays = (added, total, residual is not None, indices.numpy(), values.numpy(), body.numpy())
    moving = STILL if velocity is None else velocity.numpy()
    layout = (plan.low, plan.first, plan.nbytes)
    found: int = _write(*arrays, *layout, bits, bucket, euclid, stochastic, start, key, moving, np.float32(momentum))
    return found


def read_rows(rows: Tensor, out: Tensor, count: int, plan: IndexLayout, bits: int, bucket: int, scale: float) -> int:
    """Decode `scale` times the sum of all bodies, one per row. Returns 0, or the number of an invalid row plus 1."""
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
        if both:  # restore it, as far as it is known
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
    packed = body[COUNT_BYTES : COUNT_BYTES + nbytes]
    packed[:] = 0
    if low == BITMAP:
        _set_bits(indices, packed)
    else:
        _pack(indices, low, first, packed)
    lost = np.zeros(k if both else 0, np.float32)
    encode_quantize(
        values, lost, body[COUNT_BYTES + nbytes :], max(1, min(bucket, k)), bits, euclid, stochastic, start, key
    )
    for j in range(lost.size):
        total[indices[j]] = lost[j]
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
        announced = np.int64(0)
        for place in range(4):
            announced |= np.int64(body[place]) << (8 * place)
        packed = body[COUNT_BYTES : COUNT_BYTES + nbytes]
        if announced != count:
            return row + 1
        read = _get_bits(packed, out.size, indices) if low == BITMAP else _unpack(packed, out.size, low, first, indices)
        if read != count:
            return row + 1
        if decode_quantize(body[COUNT_BYTES + nbytes :], values, max(1, min(bucket, count)), bits, False) != 0:
            return row + 1
        if row == 0:
            for j in range(count):
                out[indices[j]] = np.float32(values[j] * scale)
        else:
            for j in range(count):
                out[indices[j]] += np.float32(values[j] * scale)
    return 0
