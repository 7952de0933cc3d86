"""All-reduce of payloads that the wire cannot sum: `gather` and `split`, as generators of requests.

`gather`: every rank receives all payloads and sums them. One round; p payloads pass each port::

    encode ──► all-gather ──► decode 0, 1, … p−1 in this order

`split`: each rank owns 1/p of the elements. Two rounds; two payloads pass each port, whatever p is::

    encode p shards ──► all-to-all ──► owner: decode, sum its shard, encode the sum ──► all-gather ──► decode p shards

Every rank decodes the same bytes in the same order, its own included, so all hold the same bits. If the lengths of
payloads vary, they are gathered first: one more round for `gather`, two for `split`. The first round also carries the
control bytes (`extra`) of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from syncline.codecs.base import (
    HEADER,
    PayloadCodec,
    RngKey,
    TensorSlice,
    max_payload_bytes,
    pack_into,
    unpack,
    unpack_all,
)
from syncline.collectives.compressed.requests import AllGatherRequest, AllToAllRequest, Reduction
from syncline.errors import DivergedError, ProtocolError

__all__ = [
    "OwnerResiduals",
    "broadcast_sums",
    "gather",
    "gather_numbers",
    "reclaim_residuals",
    "shard_edges",
    "shards",
    "split",
]

OwnerResiduals = dict[tuple[str, int], Tensor]
"""What the owner's encoding of sums did not send, by parameter and the first element of the piece in it."""

SHARD_ALIGNMENT = 1024
"""Shards begin at multiples of this many elements, so that the buckets of longest codecs stay whole."""
STATUS_OK, STATUS_OVERFLOW = 0, 1


def gather(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    extra: Tensor,
    *,
    scale: float = 1.0,
    report: Callable[[TensorSlice], None] | None = None,
) -> Reduction[Tensor]:
    """Make the slices `scale` times their sum, in place. Returns the `extra` of all ranks, as bytes[p, n].

    A slice that cannot be encoded is passed to `report`, which may still change `extra`.
    """
    longest = max_payload_bytes(codec, [part.flat.numel() for part in parts], rng.step)
    whole = _aligned(longest + extra.numel())
    message = _bytes(whole, extra.device)
    used = pack_into(codec, parts, rng, message[:longest], report)
    extras: Tensor
    if codec.traits.fixed_length:
        message[whole - extra.numel() :] = extra
        rows = yield AllGatherRequest(message)
        unpack_all(codec, rows[:, :longest], [part.flat for part in parts], rng.step, scale)
        extras = rows[:, whole - extra.numel() :]
        return extras
    table, extras = yield from gather_numbers(torch.tensor([used]), extra, size)
    lengths = [_check_length(length, longest, rank) for rank, length in enumerate(table[:, 0].tolist())]
    rows = yield AllGatherRequest(message[: _aligned(max(lengths))])
    payloads = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    for rank, payload in enumerate(payloads):
        unpack(codec, payload, [part.flat for part in parts], rank > 0, f" from rank {rank}", rng.step)
    for part in parts if scale != 1.0 else ():
        part.flat.mul_(scale)
    return extras


def split(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    extra: Tensor,
    owner_residuals: OwnerResiduals,
) -> Reduction[Tensor]:
    """Sum the slices in place: each rank sums the shard that it owns, and sends the encoded sum to all.

    `owner_residuals` keeps what the second encoding loses, if the codec keeps residuals. Returns all ranks' `extra`.
    """
    pieces, rank = shards(parts, size), rng.rank
    reclaim_residuals(owner_residuals, parts, pieces[rank])
    lengths = [max_payload_bytes(codec, [piece.numel for piece in shard], rng.step) for shard in pieces]
    longest = max(lengths)
    whole = _aligned(longest + extra.numel())
    rows = _bytes(size * whole, extra.device).view(size, whole)
    used = [pack_into(codec, shard, rng, row[:n]) for shard, row, n in zip(pieces, rows, lengths, strict=True)]
    extras: Tensor
    if codec.traits.fixed_length:
        rows[:, whole - extra.numel() :] = extra
        received = yield AllToAllRequest(rows)
        extras, mine = received[:, whole - extra.numel() :], [lengths[rank]] * size
    else:
        table, extras = yield from gather_numbers(torch.tensor(used), extra, size)
        announced = [[_check_length(n, longest, source) for n in row] for source, row in enumerate(table.tolist())]
        received = yield AllToAllRequest(rows[:, : _aligned(max(map(max, announced)))].contiguous())
        mine = [row[rank] for row in announced]
    for source, (row, length) in enumerate(zip(received, mine, strict=True)):
        outs = [piece.flat for piece in pieces[rank]]
        unpack(codec, row[:length], outs, source > 0, f" from rank {source}", rng.step)
    yield from broadcast_sums(codec, pieces, rng, size, owner_residuals)
    return extras


def broadcast_sums(
    codec: PayloadCodec,
    pieces: Sequence[Sequence[TensorSlice]],
    rng: RngKey,
    size: int,
    owner_residuals: OwnerResiduals,
) -> Reduction[None]:
    """The second phase: each owner encodes the sum of its shard and sends it to all. All decode the same bytes.

    ::

        payload of the shard, padded to the longest │ status u8
    """
    rank = rng.rank
    own = [replace(piece, residual=None, memory={}) for piece in pieces[rank]]
    if codec.keeps_residual:
        for piece in own:
            piece.residual = _owner_residual(owner_residuals, piece)
    # Not the random bits of this rank's own gradient: equal bits would correlate the two rounding errors.
    second = replace(rng, rank=size + rank)
    lengths = [max_payload_bytes(codec, [piece.numel for piece in shard], rng.step) for shard in pieces]
    message = _bytes(_aligned(max(lengths) + 1), _device(pieces))
    used, status = lengths[rank], STATUS_OK
    try:
        if not all(bool(torch.isfinite(piece.flat).all()) for piece in own):
            raise DivergedError("the sum")
        used = pack_into(codec, own, second, message[:used])
    except DivergedError:
        status = STATUS_OVERFLOW  # all ranks raise the same error
    if not codec.traits.fixed_length:
        table, _ = yield from gather_numbers(torch.tensor([used]), message[:0], size)
        announced = zip(table[:, 0].tolist(), lengths, strict=True)
        lengths = [_check_length(length, longest, owner) for owner, (length, longest) in enumerate(announced)]
    end = _aligned(max(lengths) + 1)
    message[end - 1] = status
    rows = yield AllGatherRequest(message[:end])
    overflowed = [owner for owner, status in enumerate(rows[:, -1].tolist()) if status != STATUS_OK]
    if overflowed:
        raise DivergedError(
            f"the sum of the gradients is too large for float32 in the shards of ranks {overflowed}, though each "
            "gradient is finite",
            remedy="clip the gradients, or lower the learning rate",
        )
    for owner, (shard, length) in enumerate(zip(pieces, lengths, strict=True)):
        outs = [piece.flat for piece in shard]
        unpack(codec, rows[owner, :length], outs, False, f" from rank {owner}", rng.step)


def gather_numbers(numbers: Tensor, extra: Tensor, size: int) -> Reduction[tuple[Tensor, Tensor]]:
    """Gather some int64 and the `extra` of every rank: int64[p, m] on the CPU, and bytes[p, n]."""
    head = numbers.view(torch.uint8).to(extra.device)
    rows = yield AllGatherRequest(torch.cat([head, extra]))
    assert len(rows) == size, f"{len(rows)} rows for {size} ranks"
    return rows[:, : head.numel()].cpu().reshape(-1).view(torch.int64).view(size, -1), rows[:, head.numel() :]


def shard_edges(total: int, size: int) -> list[int]:
    """The edges of the shards of `size` owners: multiples of 1024, as even as that allows.

    >>> shard_edges(5000, 2), shard_edges(10, 3)
    ([0, 2048, 5000], [0, 0, 0, 10])
    """
    grains = -(-total // SHARD_ALIGNMENT)
    return [min(total, SHARD_ALIGNMENT * (grains * owner // size)) for owner in range(size + 1)]


def shards(parts: Sequence[TensorSlice], size: int) -> list[list[TensorSlice]]:
    """The pieces of each owner's shard: views of the slices and of their residuals.

    >>> import torch
    >>> parts = [TensorSlice(torch.zeros(1000), "a"), TensorSlice(torch.zeros(2000), "b")]
    >>> [[(piece.name, piece.start, piece.numel) for piece in shard] for shard in shards(parts, 2)]
    [[('a', 0, 1000), ('b', 0, 24)], [('b', 24, 1976)]]
    """
    cuts = shard_edges(sum(part.numel for part in parts), size)
    found: list[list[TensorSlice]] = []
    for low, high in pairwise(cuts):
        shard, first = [], 0
        for part in parts:
            start, end = max(low - first, 0), min(high - first, part.numel)
            if start < end:
                residual = None if part.residual is None else part.residual[start:end]
                shard.append(TensorSlice(part.flat[start:end], part.name, part.start + start, residual=residual))
            first += part.numel
        found.append(shard)
    return found


def reclaim_residuals(
    owner_residuals: OwnerResiduals, parts: Sequence[TensorSlice], own: Sequence[TensorSlice]
) -> None:
    """Add the residual of a shard to this rank's gradient if it no longer owns that shard: buckets or ranks changed."""
    now = {(piece.name, piece.start): piece.numel for piece in own}
    by_name: dict[str, TensorSlice] = {part.name: part for part in parts}
    for (name, start), residual in list(owner_residuals.items()):
        part = by_name.get(name)
        if part is None or now.get((name, start)) == residual.numel():
            continue
        at = start - part.start
        if at >= 0 and at + residual.numel() <= part.numel:
            part.flat[at : at + residual.numel()] += residual
            del owner_residuals[name, start]


def _owner_residual(owner_residuals: OwnerResiduals, piece: TensorSlice) -> Tensor:
    found = owner_residuals.get((piece.name, piece.start))
    if found is None or found.numel() != piece.numel:
        found = owner_residuals[piece.name, piece.start] = torch.zeros_like(piece.flat)
    return found


def _check_length(length: int, longest: int, rank: int) -> int:
    if not HEADER.size <= length <= longest:
        raise ProtocolError(
            f"rank {rank} announces a payload of {length} B; valid are {HEADER.size} to {longest} B", peer=rank
        )
    return length


def _device(pieces: Sequence[Sequence[TensorSlice]]) -> torch.device:
    return next((piece.flat.device for shard in pieces for piece in shard), torch.device("cpu"))


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _aligned(count: int) -> int:
    """Round up to a multiple of 16 bytes, so that the payload of each rank is aligned."""
    return -(-count // 16) * 16
