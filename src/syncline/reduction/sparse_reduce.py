"""SparCML's sparse all-reduce: three ways to add up what the ranks have chosen. Pure: generators of requests.

`sparse_doubling`: partners at distance 1, 2, 4, … swap all they have and merge it; ranks beyond a power of two fold
into a partner first. What a rank has chosen travels as the codec's payload, which both ends decode; sums as float32::

    rank    0     1     2     3     4          5 ranks, ⇄ both send
    fold    ◄ 4   ·     ·     ·     ► 0
    1       ⇄ 1   ⇄ 0   ⇄ 3   ⇄ 2   ·
    2       ⇄ 2   ⇄ 3   ⇄ 0   ⇄ 1   ·
    unfold  ► 4   ·     ·     ·     ◄ 0

`sparse_split`: each rank owns a p-th of the elements, gets what all have chosen of them, adds it up in the order of
ranks, and gives the sum to all. `sparse_split_dense`: the same, with the sums dense, and encoded where that is asked::

    counts ──► Gather ──► streams cut at the shards ──► Scatter ──► owner sums ──► Gather, sparse or dense

A sum is a stream until it has more than δ = N·v/(i + v) of its N elements; then it turns dense. Ranks that hold the
same sum turn alike, and each message says which it is, so both ends know::

    body │ 0 … │ control bytes of some ranks │ length of the body u64 │ kind u8 │ 0 × 7

Paper: Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: High-Performance Sparse Communication for Machine
Learning", SC 2019.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from syncline.codecs import streams
from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice
from syncline.codecs.chain import Chain
from syncline.codecs.kernels.sparse import kernels
from syncline.codecs.payload import HEADER, pack
from syncline.codecs.raw import Raw
from syncline.codecs.sparse import SparseCodec
from syncline.codecs.streams import Stream
from syncline.collectives.folding import largest_power_of_two
from syncline.errors import DivergedError, IncompatibleError, ProtocolError
from syncline.reduction.compressed import OwnerResiduals, ask, edges, settle, shards, spread_sums
from syncline.reduction.requests import IDLE, Gather, Reduction, Scatter, Swap

__all__ = ["selector", "sparse_doubling", "sparse_split", "sparse_split_dense", "stream_bytes"]

Broken: TypeAlias = Callable[[TensorSlice], None]
"""Called with a part that holds NaN or Inf; zeros are sent in its place."""
Held: TypeAlias = Stream | Tensor | None
"""What a rank has of a sum: a stream, or a dense row. None: it is lost, for float32 cannot hold it; all hear of it."""

END = struct.Struct("<QB7x")
CODED, SPARSE, DENSE, LOST = 1, 2, 3, 4
NOT_WORTH_A_ROUND = 16 << 10
"""Bytes. Where not knowing how long the sums are costs a rank at most so many, nobody asks: a round costs more."""


def sparse_doubling(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    rank: int,
    extra: Tensor,
    *,
    broken: Broken | None = None,
) -> Reduction[Tensor]:
    """Sum what the ranks choose, in place, in log₂p rounds (two more where p is no power of two); for small data.

    Returns everyone's `extra`, as bytes[p, n]. `broken` is called with each part that cannot be encoded, and may still
    change `extra`.
    """
    chosen = _Selection(codec, parts, rng, broken)
    power = largest_power_of_two(size)
    partner = rank + power if rank < power else rank - power
    control = torch.zeros(size, extra.numel(), dtype=torch.uint8, device=extra.device)
    control[rank] = extra
    everyone = list(range(size))
    held: Held = chosen.stream
    merged = False
    if size > power and rank < size - power:
        came = yield Swap(partner, None, chosen.room(1, extra.numel()))
        theirs, control[[partner]] = chosen.received(came, [partner], extra.numel(), partner)
        held, merged = _add(held, theirs), True
    elif size > power:
        yield Swap(partner, _message(chosen.payload, control[[rank]], CODED), 0) if rank >= power else IDLE
    for distance in (1 << level for level in range(power.bit_length() - 1)):
        if rank >= power:
            yield IDLE
            continue
        peer = rank ^ distance
        mine, others = _covered(rank, distance, power, size), _covered(peer, distance, power, size)
        data = _message(held, control[mine]) if merged else _message(chosen.payload, control[mine], CODED)
        came = yield Swap(peer, data, chosen.room(len(others), len(others) * extra.numel()))
        theirs, control[others] = chosen.received(came, others, extra.numel(), peer)
        held, merged = _add(held, theirs), True
    if size > power and rank < size - power:
        yield Swap(partner, _message(held, control), 0)
    elif size > power and rank >= power:
        came = yield Swap(partner, None, chosen.room(size, control.numel()))
        held, control = chosen.received(came, everyone, extra.numel(), partner)
    elif size > power:
        yield IDLE
    _place(held, parts)
    return control


def sparse_split(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    rank: int,
    extra: Tensor,
    *,
    broken: Broken | None = None,
) -> Reduction[Tensor]:
    """Sum what the ranks choose, in place: each rank sums its shard, and the sums travel sparse. Returns the extras."""
    chosen = _Selection(codec, parts, rng, broken)
    pieces = shards(parts, size)
    sizes = [sum(piece.numel for piece in shard) for shard in pieces]
    held, counts, extras = yield from _to_owners(chosen, sizes, size, rank, extra)
    data = _message(held, extra[:0])
    room, least = _longest(sizes, counts.sum(0)), _longest(sizes, counts.amax(0))
    if (size - 1) * (room - least) > NOT_WORTH_A_ROUND:
        lengths, _ = yield from ask(torch.tensor([data.numel()]), extra[:0], size)
        told = [int(length) for length in lengths[:, 0]]
        wrong = [owner for owner, length in enumerate(told) if not END.size <= length <= room]
        if wrong:
            raise ProtocolError(
                f"rank {wrong[0]} tells of {told[wrong[0]]} B, and at most {room} can be", peer=wrong[0]
            )
        room = max(told)
    rows = yield Gather(_widened(data, room))
    sums = [_received(row, sizes[owner], None, owner) for owner, row in enumerate(rows)]
    for total, shard in zip(sums, pieces, strict=True):
        _place(total, shard)
    return extras


def sparse_split_dense(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    rank: int,
    extra: Tensor,
    owner_residuals: OwnerResiduals,
    quantize: PayloadCodec | None = None,
    *,
    broken: Broken | None = None,
) -> Reduction[Tensor]:
    """Sum what the ranks choose, in place: each rank sums its shard, and the sums travel dense, coded by `quantize`.

    What that loses is kept in `owner_residuals` where `quantize` keeps residuals. Returns everyone's `extra`.
    """
    pieces = shards(parts, size)
    settle(owner_residuals, parts, pieces[rank])
    chosen = _Selection(codec, parts, rng, broken)
    sizes = [sum(piece.numel for piece in shard) for shard in pieces]
    held, _, extras = yield from _to_owners(chosen, sizes, size, rank, extra)
    if held is None:
        for piece in pieces[rank]:
            piece.flat.fill_(torch.inf)  # `spread_sums` tells the others
    else:
        _place(held, pieces[rank])
    yield from spread_sums(quantize or Raw(), pieces, rng, size, rank, owner_residuals)
    return extras


def selector(codec: PayloadCodec) -> tuple[SparseCodec, PayloadCodec]:
    """What chooses the elements, and what codes their values."""
    first, values = (codec.first, codec.rest) if isinstance(codec, Chain) else (codec, Raw())
    if not isinstance(first, SparseCodec):
        raise IncompatibleError(
            f"{codec!r} does not choose elements, so it has no sparse all-reduce; use gather or split"
        )
    return first, values


def stream_bytes(numel: int, count: int) -> int:
    """The most bytes of a sum in a message, with up to `count` of `numel` elements.

    >>> stream_bytes(1_000_000, 10_000), stream_bytes(1_000_000, 900_000)
    (50715, 4000000)
    """
    kept = min(count, streams.limit(numel))
    sparse = streams.most_bytes(numel, kept)
    return max(4 * numel, sparse) if count > kept else sparse


class _Selection:
    """What this rank has chosen of a bucket: its payload, and what that says, as one stream over all parts."""

    def __init__(self, codec: PayloadCodec, parts: Sequence[TensorSlice], rng: RngKey, broken: Broken | None) -> None:
        self.codec, self.step = codec, rng.step
        self.first, self.values = selector(codec)
        self.sizes = [part.numel for part in parts]
        self.total = sum(self.sizes)
        self.payload = pack(codec, parts, rng, broken)
        self.stream = self.read(self.payload)

    def room(self, ranks: int, control: int) -> int:
        """The most bytes of a message with the sum of so many ranks, and so many control bytes."""
        most = sum(self.first.most(numel, self.step) for numel in self.sizes)
        coded = HEADER.size + sum(4 + self.codec.body_bytes(numel, self.step) for numel in self.sizes)
        return max(_room(self.total, ranks * most, control), _aligned(coded + control))

    def received(self, data: Tensor, ranks: Sequence[int], each: int, peer: int) -> tuple[Held, Tensor]:
        """What a message says, and the control bytes of these ranks in it."""
        data = data.to(self.payload.device)  # who only receives has not said where
        end = data.numel() - END.size
        low = end - len(ranks) * each
        if low < 0:
            raise ProtocolError(f"a message from rank {peer} of {data.numel()} B is truncated", peer=peer)
        return _received(data, self.total, self, peer, low), data[low:end].view(len(ranks), each)

    def read(self, payload: Tensor) -> Stream:
        """A payload of the same codec and sizes as one stream: the same on whichever rank."""
        nothing = torch.zeros(0, device=payload.device, dtype=torch.float32)
        found, at = [Stream(0, nothing.to(torch.int32), nothing)], HEADER.size
        for numel in self.sizes:
            length = self.codec.body_bytes(numel, self.step)
            if not self.codec.traits.fixed_length:
                length, at = int.from_bytes(bytes(payload[at : at + 4].tolist()), "little"), at + 4
            if at + length > payload.numel():
                raise ProtocolError(f"a payload of {payload.numel()} B ends within a body of {length} B at {at}")
            found.append(Stream(numel, *self.first.read_stream(payload[at : at + length], numel, self.values)))
            at += length
        if at != payload.numel():
            raise ProtocolError(f"a payload of {payload.numel()} B has {payload.numel() - at} B too many")
        return streams.join(found)


def _to_owners(
    chosen: _Selection, sizes: Sequence[int], size: int, rank: int, extra: Tensor
) -> Reduction[tuple[Held, Tensor, Tensor]]:
    """The first phase of a split: this rank's shard summed; how many elements each rank had for each; all extras."""
    cut = streams.split(chosen.stream, edges(chosen.total, size))
    counts, extras = yield from ask(torch.tensor([piece.count for piece in cut]), extra, size)
    for source, row in enumerate(counts.tolist()):
        if any(not 0 <= count <= numel for count, numel in zip(row, sizes, strict=True)):
            raise ProtocolError(f"rank {source} tells of {row} elements in shards of {list(sizes)}", peer=source)
    room = _longest(sizes, counts.amax(0))
    came = yield Scatter(torch.stack([_widened(_message(_held(piece), extra[:0]), room) for piece in cut]))
    held = _received(came[0], sizes[rank], None, 0)
    for source in range(1, size):
        held = _add(held, _received(came[source], sizes[rank], None, source))
    return held, counts, extras


def _covered(rank: int, distance: int, power: int, size: int) -> list[int]:
    """The ranks whose sum a rank has before it swaps at a distance."""
    core = range(rank // distance * distance, (rank // distance + 1) * distance)
    return [*core, *(member + power for member in core if member + power < size)]


def _held(stream: Stream) -> Stream | Tensor:
    """A stream as it is to be kept: dense where it has more than δ elements."""
    return streams.dense(stream) if stream.count > streams.limit(stream.numel) else stream


def _add(a: Held, b: Held) -> Held:
    """The sum; dense ones may be changed in place. Two ranks that add the same two, in any order, get the same bits."""
    if a is None or b is None:
        return None
    total: Stream | Tensor
    if isinstance(a, Stream) and isinstance(b, Stream):
        total = _held(streams.merge(a, b))
    else:
        dense, other = (b, a) if isinstance(a, Stream) else (a, b)
        assert isinstance(dense, Tensor), "one of them is"
        if isinstance(other, Stream):
            kernels(dense).scatter(dense, other.indices, other.values, accumulate=True)
        else:
            dense.add_(other)
        total = dense
    numbers = total.values if isinstance(total, Stream) else total
    return total if bool(torch.isfinite(numbers).all()) else None


def _place(held: Held, parts: Sequence[TensorSlice]) -> None:
    """Write a sum over these parts into them."""
    if held is None:
        raise DivergedError(
            "the sum of the gradients is too large for float32, though each gradient is finite",
            remedy="clip the gradients, or lower the learning rate",
        )
    cuts = [0]
    for part in parts:
        cuts.append(cuts[-1] + part.numel)
    if isinstance(held, Tensor):
        for part, (low, high) in zip(parts, pairwise(cuts), strict=True):
            part.flat.copy_(held[low:high])
        return
    for part, piece in zip(parts, streams.split(held, cuts), strict=True):
        part.flat.zero_()
        kernels(part.flat).scatter(part.flat, piece.indices, piece.values, accumulate=False)


def _message(held: Held, control: Tensor, kind: int = 0) -> Tensor:
    """Bytes that say a sum; of kind CODED, a payload. With the control bytes of some ranks."""
    if held is None:
        kind, body = LOST, control.new_zeros(0)
    elif isinstance(held, Stream):
        kind, body = SPARSE, streams.pack(held)
    else:
        kind, body = kind or DENSE, held.view(torch.uint8)
    end = torch.frombuffer(bytearray(END.pack(body.numel(), kind)), dtype=torch.uint8).to(body.device)
    filling = body.new_zeros(_aligned(body.numel() + control.numel()) - body.numel() - control.numel() - END.size)
    return torch.cat([body, filling, control.reshape(-1), end])


def _received(data: Tensor, numel: int, chosen: _Selection | None, peer: int, low: int | None = None) -> Held:
    """The sum over `numel` elements that a message says; its body ends before `low`."""
    length, kind = END.unpack(bytes(data[data.numel() - END.size :].tolist()))
    if length > (data.numel() - END.size if low is None else low):
        raise ProtocolError(f"a message from rank {peer} of {data.numel()} B has no {length} B of body", peer=peer)
    body = data[:length]
    if kind == LOST:
        return None
    if kind == DENSE and length == 4 * numel:
        row = torch.empty(numel, device=data.device, dtype=torch.float32)
        row.view(torch.uint8).copy_(body)
        if not bool(torch.isfinite(row).all()):
            raise ProtocolError(f"a message from rank {peer} holds NaN or Inf", peer=peer)
        return row
    try:
        if kind == CODED and chosen is not None and torch.equal(body[: HEADER.size], chosen.payload[: HEADER.size]):
            return chosen.read(body)
        if kind == SPARSE:
            return streams.unpack(body, numel)
    except ProtocolError as error:
        raise ProtocolError(f"{error} (from rank {peer})", peer=peer) from error
    raise ProtocolError(
        f"a message from rank {peer} (kind {kind}, {length} B) is no sum of {numel} elements: another codec or bucket",
        peer=peer,
    )


def _widened(data: Tensor, room: int) -> Tensor:
    """The same message in so many bytes: its end stays at the end."""
    if data.numel() == room:
        return data
    body, end = data[: -END.size], data[-END.size :]
    return torch.cat([body, data.new_zeros(room - data.numel()), end])


def _longest(sizes: Sequence[int], counts: Tensor) -> int:
    """The most bytes of a message for a shard, with up to so many elements each."""
    return max(_room(numel, min(numel, count), 0) for numel, count in zip(sizes, counts.tolist(), strict=True))


def _room(numel: int, count: int, control: int) -> int:
    """The most bytes of a message with a sum of up to `count` of `numel` elements, and so many control bytes."""
    return _aligned(stream_bytes(numel, count) + control)


def _aligned(count: int) -> int:
    """Bytes of a message whose body and control bytes are so many: a multiple of 16, for the rows of a table."""
    return -(-(count + END.size) // 16) * 16
