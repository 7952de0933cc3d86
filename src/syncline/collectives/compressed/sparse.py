"""SparCML's sparse all-reduce: three algorithms that sum selected elements, as generators of requests.

`sparse_doubling`: partners at distance 1, 2, 4, … exchange all they have and merge it. Ranks beyond a power of two fold
into a partner first. A rank's own selection is sent as the codec's payload, which both ends decode; sums as float32::

    rank    0     1     2     3     4          5 ranks, ⇄ both send
    fold    ◄ 4   ·     ·     ·     ► 0
    1       ⇄ 1   ⇄ 0   ⇄ 3   ⇄ 2   ·
    2       ⇄ 2   ⇄ 3   ⇄ 0   ⇄ 1   ·
    unfold  ► 4   ·     ·     ·     ◄ 0

`sparse_split`: each rank owns 1/p of the elements, receives what all selected of them, sums it in rank order, and
sends the sum to all. `sparse_split_dense`: the same, but sums are dense, and encoded if a codec is given::

    counts ──► all-gather ──► streams cut at the shards ──► all-to-all ──► owner sums ──► all-gather, sparse or dense

A sum is sparse until it has more than δ = N·v/(i + v) of its N elements; then it becomes dense. Ranks that hold the
same sum decide alike. Each message has a trailer that names its kind::

    body │ 0 … │ control bytes of some ranks │ length of the body u64 │ kind u8 │ 0 × 7

Paper: Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: High-Performance Sparse Communication for Machine
Learning", SC 2019.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from syncline.codecs.base import (
    HEADER,
    Codec,
    PayloadCodec,
    RngKey,
    TensorSlice,
    all_finite,
    floats_of,
    pack,
    split_bodies,
    write_bytes,
)
from syncline.codecs.chain import Chain
from syncline.codecs.kernels.dispatch import sparse_kernels
from syncline.codecs.kernels.indices import layout
from syncline.codecs.raw import Raw
from syncline.codecs.sparse import SparseCodec, index_dtype, read_indices, write_indices
from syncline.collectives.base import largest_power_of_two
from syncline.collectives.compressed.gather_split import (
    OwnerResiduals,
    broadcast_sums,
    gather_numbers,
    reclaim_residuals,
    shard_edges,
    shards,
)
from syncline.collectives.compressed.requests import IDLE, AllGatherRequest, AllToAllRequest, Reduction, SendRecvRequest
from syncline.errors import DivergedError, IncompatibleError, ProtocolError

__all__ = [
    "SparseStream",
    "is_sparse",
    "max_sparse_count",
    "packed_bytes",
    "selector",
    "sparse_doubling",
    "sparse_split",
    "sparse_split_dense",
    "stream_bytes",
]

STREAM_HEADER = struct.Struct("<IQ")
"""Of a packed stream: count u32 │ elements u64 │ indices (see `kernels/indices.py`) │ values float32."""
TRAILER = struct.Struct("<QB7x")
ENCODED, SPARSE, DENSE, OVERFLOW = 1, 2, 3, 4
MAX_PADDING_BYTES = 16 << 10
"""If padding sums to their maximum length costs at most this, lengths are not gathered: a round costs more."""


@dataclass(frozen=True)
class SparseStream:
    """Selected elements of a row of `numel`; the others are 0."""

    numel: int
    indices: Tensor
    """Sorted and unique; int32, or int64 from 2^31 elements on."""
    values: Tensor
    """float32, one for each index."""

    @property
    def count(self) -> int:
        return self.indices.numel()

    def merge(self, other: SparseStream) -> SparseStream:
        """The sum of two streams over the same elements.

        >>> one = SparseStream(9, torch.tensor([1, 4], dtype=torch.int32), torch.tensor([1.0, 2.0]))
        >>> two = SparseStream(9, torch.tensor([4, 8], dtype=torch.int32), torch.tensor([0.5, 3.0]))
        >>> both = one.merge(two)
        >>> both.indices.tolist(), both.values.tolist()
        ([1, 4, 8], [1.0, 2.5, 3.0])
        """
        assert self.numel == other.numel, f"streams over {self.numel} and {other.numel} elements do not add up"
        indices, values = sparse_kernels(self.values).merge((self.indices, other.indices), (self.values, other.values))
        return SparseStream(self.numel, indices, values)

    def split(self, edges: Sequence[int]) -> list[SparseStream]:
        """The intervals between edges, from 0 to `numel`. The indices of each count from its start.

        >>> whole = SparseStream(9, torch.tensor([1, 4, 8], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]))
        >>> [part.indices.tolist() for part in whole.split([0, 4, 9])]
        [[1], [0, 4]]
        """
        assert (edges[0], edges[-1]) == (0, self.numel), f"edges {list(edges)} do not span {self.numel} elements"
        bounds = torch.tensor(list(edges), dtype=self.indices.dtype, device=self.indices.device)
        cuts = torch.searchsorted(self.indices, bounds).tolist()
        return [
            SparseStream(
                stop - start,
                (self.indices[first:last] - start).to(index_dtype(stop - start)),
                self.values[first:last],
            )
            for (start, stop), (first, last) in zip(pairwise(edges), pairwise(cuts), strict=True)
        ]

    @staticmethod
    def join(streams: Sequence[SparseStream]) -> SparseStream:
        """Concatenate intervals: the inverse of `split`.

        >>> whole = SparseStream(9, torch.tensor([1, 4, 8], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]))
        >>> SparseStream.join(whole.split([0, 4, 9])).indices.tolist()
        [1, 4, 8]
        """
        numel = sum(stream.numel for stream in streams)
        indices, start = [], 0
        for stream in streams:
            indices.append(stream.indices.to(index_dtype(numel)) + start)
            start += stream.numel
        return SparseStream(numel, torch.cat(indices), torch.cat([stream.values for stream in streams]))

    def to_dense(self) -> Tensor:
        """The dense row.

        >>> SparseStream(3, torch.tensor([1], dtype=torch.int32), torch.tensor([5.0])).to_dense()
        tensor([0., 5., 0.])
        """
        out = torch.zeros(self.numel, device=self.values.device, dtype=torch.float32)
        sparse_kernels(out).scatter(out, self.indices, self.values, accumulate=False)
        return out

    def to_bytes(self) -> Tensor:
        """A stream as bytes."""
        count, numel = self.count, self.numel
        out = torch.empty(packed_bytes(numel, count), dtype=torch.uint8, device=self.values.device)
        write_bytes(out, 0, STREAM_HEADER.pack(count, numel))
        last = out.numel() - 4 * count
        write_indices(out[STREAM_HEADER.size : last], numel, self.indices)
        out[last:].copy_(self.values.contiguous().view(torch.uint8))
        return out

    @staticmethod
    def from_bytes(packed: Tensor, numel: int) -> SparseStream:
        """Parse untrusted bytes into a stream of `numel` elements. Invalid bytes are a `ProtocolError`.

        >>> stream = SparseStream(9, torch.tensor([1, 4], dtype=torch.int32), torch.tensor([1.0, 2.0]))
        >>> SparseStream.from_bytes(stream.to_bytes(), 9).indices.tolist()
        [1, 4]
        """
        if packed.numel() < STREAM_HEADER.size:
            raise ProtocolError(f"a stream of {packed.numel()} B is too short: it is truncated")
        count, elements = STREAM_HEADER.unpack(bytes(packed[: STREAM_HEADER.size].cpu().numpy()))
        if elements != numel:
            raise ProtocolError(f"a stream is over {elements} elements, and {numel} are expected")
        if count > numel or packed.numel() != packed_bytes(numel, count):
            raise ProtocolError(
                f"a stream of {packed.numel()} B does not hold {count} of {numel} elements: it is corrupt"
            )
        last = packed.numel() - 4 * count
        indices = read_indices(packed[STREAM_HEADER.size : last], numel, count)
        values = floats_of(packed[last:])
        if not all_finite(values):
            raise ProtocolError("a stream holds NaN or Inf")
        return SparseStream(numel, indices, values)


Report: TypeAlias = Callable[[TensorSlice], None]
"""Called with a slice that holds NaN or Inf; zeros are sent in its place."""
PartialSum: TypeAlias = SparseStream | Tensor | None
"""A sum as a sparse stream or a dense row. None: it overflows float32; every rank is informed."""


def sparse_doubling(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    extra: Tensor,
    *,
    report: Report | None = None,
) -> Reduction[Tensor]:
    """Sum the selected elements in place, in log₂p rounds (two more if p is not a power of two). For small data.

    Returns the `extra` of all ranks, as bytes[p, n]. A slice that cannot be encoded is passed to `report`, which may
    still change `extra`.
    """
    selection, rank = _Selection(codec, parts, rng, report), rng.rank
    power = largest_power_of_two(size)
    partner = rank + power if rank < power else rank - power
    control = torch.zeros(size, extra.numel(), dtype=torch.uint8, device=extra.device)
    control[rank] = extra
    everyone = list(range(size))
    total: PartialSum = selection.stream
    merged = False
    if size > power and rank < size - power:
        received = yield SendRecvRequest(partner, None, selection.max_message(1, extra.numel()))
        other_sum, control[[partner]] = selection.parse_message(received, [partner], extra.numel(), partner)
        total, merged = _add(total, other_sum), True
    elif size > power:
        yield (
            SendRecvRequest(partner, _message(selection.payload, control[[rank]], ENCODED), 0)
            if rank >= power
            else IDLE
        )
    for distance in (1 << level for level in range(power.bit_length() - 1)):
        if rank >= power:
            yield IDLE
            continue
        peer = rank ^ distance
        mine, others = _ranks_in_sum(rank, distance, power, size), _ranks_in_sum(peer, distance, power, size)
        data = _message(total, control[mine]) if merged else _message(selection.payload, control[mine], ENCODED)
        received = yield SendRecvRequest(peer, data, selection.max_message(len(others), len(others) * extra.numel()))
        other_sum, control[others] = selection.parse_message(received, others, extra.numel(), peer)
        total, merged = _add(total, other_sum), True
    if size > power and rank < size - power:
        yield SendRecvRequest(partner, _message(total, control), 0)
    elif size > power and rank >= power:
        received = yield SendRecvRequest(partner, None, selection.max_message(size, control.numel()))
        total, control = selection.parse_message(received, everyone, extra.numel(), partner)
    elif size > power:
        yield IDLE
    _place(total, parts)
    return control


def sparse_split(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    extra: Tensor,
    *,
    report: Report | None = None,
) -> Reduction[Tensor]:
    """Sum the selected elements in place: owners sum shards and send sparse sums. Returns all ranks' `extra`."""
    selection = _Selection(codec, parts, rng, report)
    pieces = shards(parts, size)
    sizes = [sum(piece.numel for piece in shard) for shard in pieces]
    total, counts, extras = yield from _to_owners(selection, sizes, size, rng.rank, extra)
    data = _message(total, extra[:0])
    room, least = _max_shard_message(sizes, counts.sum(0)), _max_shard_message(sizes, counts.amax(0))
    if (size - 1) * (room - least) > MAX_PADDING_BYTES:
        lengths, _ = yield from gather_numbers(torch.tensor([data.numel()]), extra[:0], size)
        announced = [int(length) for length in lengths[:, 0]]
        wrong = [owner for owner, length in enumerate(announced) if not TRAILER.size <= length <= room]
        if wrong:
            raise ProtocolError(
                f"rank {wrong[0]} announces {announced[wrong[0]]} B; at most {room} B are valid", peer=wrong[0]
            )
        room = max(announced)
    rows = yield AllGatherRequest(_padded(data, room))
    sums = [_parse_message(row, sizes[owner], None, owner) for owner, row in enumerate(rows)]
    for total, shard in zip(sums, pieces, strict=True):
        _place(total, shard)
    return extras


def sparse_split_dense(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    extra: Tensor,
    owner_residuals: OwnerResiduals,
    quantize: PayloadCodec | None = None,
    *,
    report: Report | None = None,
) -> Reduction[Tensor]:
    """Sum the selected elements in place: owners sum shards and send dense sums, encoded by `quantize` if given.

    `owner_residuals` keeps what that encoding loses, if `quantize` keeps residuals. Returns all ranks' `extra`.
    """
    pieces = shards(parts, size)
    own = pieces[rng.rank]
    reclaim_residuals(owner_residuals, parts, own)
    selection = _Selection(codec, parts, rng, report)
    sizes = [sum(piece.numel for piece in shard) for shard in pieces]
    total, _, extras = yield from _to_owners(selection, sizes, size, rng.rank, extra)
    if total is None:
        for piece in own:
            piece.flat.fill_(torch.inf)  # `broadcast_sums` informs the others
    else:
        _place(total, own)
    yield from broadcast_sums(quantize or Raw(), pieces, rng, size, owner_residuals)
    return extras


def is_sparse(codec: Codec) -> bool:
    """True if the codec's payload holds selected elements, so that payloads can be merged as sparse streams."""
    return isinstance(codec.first if isinstance(codec, Chain) else codec, SparseCodec)


def selector(codec: PayloadCodec) -> tuple[SparseCodec, PayloadCodec]:
    """The codec that selects elements, and the codec of their values."""
    first, values = (codec.first, codec.rest) if isinstance(codec, Chain) else (codec, Raw())
    if not isinstance(first, SparseCodec):
        raise IncompatibleError(
            f"{codec!r} does not choose elements, so it has no sparse all-reduce; use gather or split"
        )
    return first, values


def stream_bytes(numel: int, count: int) -> int:
    """Maximum size in bytes of a sum in a message, with up to `count` of `numel` elements.

    >>> stream_bytes(1_000_000, 10_000), stream_bytes(1_000_000, 900_000)
    (50715, 4000000)
    """
    kept = min(count, max_sparse_count(numel))
    sparse = packed_bytes(numel, kept)
    return max(4 * numel, sparse) if count > kept else sparse


class _Selection:
    """What this rank has selected of a bucket: the payload, and its content as one stream over all slices."""

    def __init__(self, codec: PayloadCodec, parts: Sequence[TensorSlice], rng: RngKey, report: Report | None) -> None:
        self.codec, self.step = codec, rng.step
        self.first, self.values = selector(codec)
        self.sizes = [part.numel for part in parts]
        self.total = sum(self.sizes)
        self.payload = pack(codec, parts, rng, report)
        self.stream = self.read(self.payload)

    def max_message(self, ranks: int, control: int) -> int:
        """Maximum size of a message with the sum of `ranks` ranks and `control` control bytes."""
        most = sum(self.first.max_selected(numel, self.step) for numel in self.sizes)
        coded = HEADER.size + sum(4 + self.codec.body_bytes(numel, self.step) for numel in self.sizes)
        return max(_max_message(self.total, ranks * most, control), _aligned(coded + control))

    def parse_message(self, data: Tensor, ranks: Sequence[int], each: int, peer: int) -> tuple[PartialSum, Tensor]:
        """The sum in a message, and the control bytes of `ranks` in it."""
        data = data.to(self.payload.device)  # a rank that only receives does not know the device
        end = data.numel() - TRAILER.size
        low = end - len(ranks) * each
        if low < 0:
            raise ProtocolError(f"a message from rank {peer} of {data.numel()} B is truncated", peer=peer)
        return _parse_message(data, self.total, self, peer, low), data[low:end].view(len(ranks), each)

    def read(self, payload: Tensor) -> SparseStream:
        """Decode a payload of the same codec and sizes into one stream. The result is the same on every rank."""
        nothing = torch.zeros(0, device=payload.device, dtype=torch.float32)
        found = [SparseStream(0, nothing.to(torch.int32), nothing)]
        for numel, body in zip(self.sizes, split_bodies(self.codec, payload, self.sizes, self.step), strict=True):
            found.append(SparseStream(numel, *self.first.read_stream(body, numel, self.values)))
        return SparseStream.join(found)


def _to_owners(
    selection: _Selection, sizes: Sequence[int], size: int, rank: int, extra: Tensor
) -> Reduction[tuple[PartialSum, Tensor, Tensor]]:
    """The first phase of a split: the sum of this rank's shard, the counts [source, owner], and all ranks' `extra`."""
    cut = selection.stream.split(shard_edges(selection.total, size))
    counts, extras = yield from gather_numbers(torch.tensor([piece.count for piece in cut]), extra, size)
    for source, row in enumerate(counts.tolist()):
        if any(not 0 <= count <= numel for count, numel in zip(row, sizes, strict=True)):
            raise ProtocolError(f"rank {source} announces {row} elements in shards of {list(sizes)}", peer=source)
    room = _max_shard_message(sizes, counts.amax(0))
    received = yield AllToAllRequest(
        torch.stack([_padded(_message(_compact(piece), extra[:0]), room) for piece in cut])
    )
    total = _parse_message(received[0], sizes[rank], None, 0)
    for source in range(1, size):
        total = _add(total, _parse_message(received[source], sizes[rank], None, source))
    return total, counts, extras


def _ranks_in_sum(rank: int, distance: int, power: int, size: int) -> list[int]:
    """The ranks whose sum a rank holds before its exchange at a distance."""
    core = range(rank // distance * distance, (rank // distance + 1) * distance)
    return [*core, *(member + power for member in core if member + power < size)]


def _compact(stream: SparseStream) -> SparseStream | Tensor:
    """A stream, made dense if it has more than δ elements."""
    return stream.to_dense() if stream.count > max_sparse_count(stream.numel) else stream


def _add(a: PartialSum, b: PartialSum) -> PartialSum:
    """The sum; may change a dense operand in place. The order of operands does not change the bits."""
    if a is None or b is None:
        return None
    total: SparseStream | Tensor
    if isinstance(a, SparseStream) and isinstance(b, SparseStream):
        total = _compact(a.merge(b))
    else:
        dense, other = (b, a) if isinstance(a, SparseStream) else (a, b)
        assert isinstance(dense, Tensor), "one of them is"
        if isinstance(other, SparseStream):
            sparse_kernels(dense).scatter(dense, other.indices, other.values, accumulate=True)
        else:
            dense.add_(other)
        total = dense
    numbers = total.values if isinstance(total, SparseStream) else total
    return total if all_finite(numbers) else None


def _place(total: PartialSum, parts: Sequence[TensorSlice]) -> None:
    """Write a sum into the slices that it covers."""
    if total is None:
        raise DivergedError(
            "the sum of the gradients is too large for float32, though each gradient is finite",
            remedy="clip the gradients, or lower the learning rate",
        )
    cuts = [0]
    for part in parts:
        cuts.append(cuts[-1] + part.numel)
    if isinstance(total, Tensor):
        for part, (low, high) in zip(parts, pairwise(cuts), strict=True):
            part.flat.copy_(total[low:high])
        return
    for part, piece in zip(parts, total.split(cuts), strict=True):
        part.flat.zero_()
        sparse_kernels(part.flat).scatter(part.flat, piece.indices, piece.values, accumulate=False)


def _message(total: PartialSum, control: Tensor, kind: int = 0) -> Tensor:
    """A sum, or a payload if `kind` is ENCODED, with the control bytes of some ranks, as bytes."""
    if total is None:
        kind, body = OVERFLOW, control.new_zeros(0)
    elif isinstance(total, SparseStream):
        kind, body = SPARSE, total.to_bytes()
    else:
        kind, body = kind or DENSE, total.view(torch.uint8)
    end = torch.frombuffer(bytearray(TRAILER.pack(body.numel(), kind)), dtype=torch.uint8).to(body.device)
    filling = body.new_zeros(_aligned(body.numel() + control.numel()) - body.numel() - control.numel() - TRAILER.size)
    return torch.cat([body, filling, control.reshape(-1), end])


def _parse_message(
    data: Tensor, numel: int, selection: _Selection | None, peer: int, low: int | None = None
) -> PartialSum:
    """The sum of `numel` elements in a message. Its body ends before `low`."""
    length, kind = TRAILER.unpack(bytes(data[data.numel() - TRAILER.size :].tolist()))
    if length > (data.numel() - TRAILER.size if low is None else low):
        raise ProtocolError(f"a message from rank {peer} of {data.numel()} B has no {length} B of body", peer=peer)
    body = data[:length]
    if kind == OVERFLOW:
        return None
    if kind == DENSE and length == 4 * numel:
        row = floats_of(body)
        if not all_finite(row):
            raise ProtocolError(f"a message from rank {peer} holds NaN or Inf", peer=peer)
        return row
    try:
        if (
            kind == ENCODED
            and selection is not None
            and torch.equal(body[: HEADER.size], selection.payload[: HEADER.size])
        ):
            return selection.read(body)
        if kind == SPARSE:
            return SparseStream.from_bytes(body, numel)
    except ProtocolError as error:
        raise ProtocolError(f"{error} (from rank {peer})", peer=peer) from error
    raise ProtocolError(
        f"a message from rank {peer} (kind {kind}, {length} B) is no sum of {numel} elements: another codec or bucket",
        peer=peer,
    )


def _padded(data: Tensor, room: int) -> Tensor:
    """Pad a message to `length` bytes. Its trailer stays at the end."""
    if data.numel() == room:
        return data
    body, end = data[: -TRAILER.size], data[-TRAILER.size :]
    return torch.cat([body, data.new_zeros(room - data.numel()), end])


def _max_shard_message(sizes: Sequence[int], counts: Tensor) -> int:
    """Maximum size of a message for any shard, with up to `counts` elements each."""
    return max(_max_message(numel, min(numel, count), 0) for numel, count in zip(sizes, counts.tolist(), strict=True))


def _max_message(numel: int, count: int, control: int) -> int:
    """Maximum size of a message with a sum of up to `count` of `numel` elements and `control` control bytes."""
    return _aligned(stream_bytes(numel, count) + control)


def _aligned(count: int) -> int:
    """Size of a message with `count` bytes of body and control: a multiple of 16, so that rows are aligned."""
    return -(-(count + TRAILER.size) // 16) * 16


def max_sparse_count(numel: int) -> int:
    """The largest number of elements of a sparse sum: δ = N·v / (i + v), with i = v = 4 bytes."""
    return numel // 2


def packed_bytes(numel: int, count: int) -> int:
    """Size in bytes of a packed stream of `count` of `numel` elements."""
    return STREAM_HEADER.size + layout(numel, count).nbytes + 4 * count
