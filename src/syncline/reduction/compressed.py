"""The all-reduce of payloads that do not sum on the wire. Pure: generators of requests.

`gather`: everyone gets everyone's payload and adds them up; one round, p payloads into each port::

    encode ──► Gather ──► decode 0, 1, … p−1 in this order

`split`: each rank owns a p-th of the elements; two rounds, two payloads through each port whatever p is::

    encode p shards ──► Scatter ──► owner: decode and sum its shard, encode the sum ──► Gather ──► decode p shards

Every rank decodes the same bytes in the same order, its own as well as the others', so all hold the same bits. Where
the lengths of payloads vary they are gathered first: one round more for `gather`, two for `split`. The control bytes
(`extra`) of each rank travel along in the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice
from syncline.codecs.payload import HEADER, max_payload_bytes, pack_into, unpack, unpack_all
from syncline.errors import DivergedError, ProtocolError
from syncline.reduction.requests import Gather, Reduction, Scatter

__all__ = ["OwnerResiduals", "ask", "edges", "gather", "settle", "shards", "split", "spread_sums"]

OwnerResiduals = dict[tuple[str, int], Tensor]
"""What an owner's encoding of sums has left unsent: by parameter, and where in it the piece begins."""

GRAIN = 1024
"""Shards are cut at multiples of so many elements, so that the buckets of most codecs stay whole."""
FINE, OVERFLOWED = 0, 1


def gather(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    size: int,
    extra: Tensor,
    *,
    scale: float = 1.0,
    broken: Callable[[TensorSlice], None] | None = None,
) -> Reduction[Tensor]:
    """Sum the parts over the ranks, in place: all payloads to all. Returns everyone's `extra`, as bytes[p, n].

    What is left in the parts is `scale` times the sum. A part that cannot be encoded is told to `broken`,
    which may still change `extra`.
    """
    sizes = [part.numel for part in parts]
    most = max_payload_bytes(codec, sizes, rng.step)
    whole = _aligned(most + extra.numel())
    message = _bytes(whole, extra.device)
    used = pack_into(codec, parts, rng, message[:most], broken)
    extras: Tensor
    if codec.traits.fixed_length:
        message[whole - extra.numel() :] = extra
        rows = yield Gather(message)
        unpack_all(codec, rows[:, :most], [part.flat for part in parts], rng.step, scale)
        extras = rows[:, whole - extra.numel() :]
        return extras
    table, extras = yield from ask(torch.tensor([used]), extra, size)
    lengths = [_length(told, most, rank) for rank, told in enumerate(table[:, 0].tolist())]
    rows = yield Gather(message[: _aligned(max(lengths))])
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
    rank: int,
    extra: Tensor,
    owner_residuals: OwnerResiduals,
) -> Reduction[Tensor]:
    """Sum the parts over the ranks, in place: each rank sums the shard that it owns, and sends the sum encoded again.

    What that loses is kept in `owner_residuals` where the codec keeps residuals. Returns everyone's `extra`.
    """
    pieces = shards(parts, size)
    settle(owner_residuals, parts, pieces[rank])
    lengths = [max_payload_bytes(codec, [piece.numel for piece in shard], rng.step) for shard in pieces]
    most = max(lengths)
    whole = _aligned(most + extra.numel())
    rows = _bytes(size * whole, extra.device).view(size, whole)
    used = [pack_into(codec, shard, rng, row[:n]) for shard, row, n in zip(pieces, rows, lengths, strict=True)]
    extras: Tensor
    if codec.traits.fixed_length:
        rows[:, whole - extra.numel() :] = extra
        came = yield Scatter(rows)
        extras, mine = came[:, whole - extra.numel() :], [lengths[rank]] * size
    else:
        table, extras = yield from ask(torch.tensor(used), extra, size)
        told = [[_length(n, most, source) for n in row] for source, row in enumerate(table.tolist())]
        came = yield Scatter(rows[:, : _aligned(max(map(max, told)))].contiguous())
        mine = [row[rank] for row in told]
    for source, (row, length) in enumerate(zip(came, mine, strict=True)):
        outs = [piece.flat for piece in pieces[rank]]
        unpack(codec, row[:length], outs, source > 0, f" from rank {source}", rng.step)
    yield from spread_sums(codec, pieces, rng, size, rank, owner_residuals)
    return extras


def spread_sums(
    codec: PayloadCodec,
    pieces: Sequence[Sequence[TensorSlice]],
    rng: RngKey,
    size: int,
    rank: int,
    owner_residuals: OwnerResiduals,
) -> Reduction[None]:
    """The second phase: each owner's shard holds its sum; encode it and give it to all. All decode the same bytes.

    ::

        payload of the shard, padded to the longest │ status u8
    """
    own = [replace(piece, residual=None, memory={}) for piece in pieces[rank]]
    if codec.keeps_residual:
        for piece in own:
            piece.residual = _kept(owner_residuals, piece)
    # Other random bits than those the rank's own gradient was rounded with: the same would make the two errors agree.
    second = replace(rng, rank=size + rank)
    lengths = [max_payload_bytes(codec, [piece.numel for piece in shard], rng.step) for shard in pieces]
    message = _bytes(_aligned(max(lengths) + 1), _device(pieces))
    used, status = lengths[rank], FINE
    try:
        if not all(bool(torch.isfinite(piece.flat).all()) for piece in own):
            raise DivergedError("the sum")
        used = pack_into(codec, own, second, message[:used])
    except DivergedError:
        status = OVERFLOWED  # told to all, so that all raise the same
    if not codec.traits.fixed_length:
        table, _ = yield from ask(torch.tensor([used]), message[:0], size)
        told = zip(table[:, 0].tolist(), lengths, strict=True)
        lengths = [_length(length, most, owner) for owner, (length, most) in enumerate(told)]
    end = _aligned(max(lengths) + 1)
    message[end - 1] = status
    rows = yield Gather(message[:end])
    broken = [owner for owner, status in enumerate(rows[:, -1].tolist()) if status != FINE]
    if broken:
        raise DivergedError(
            f"the sum of the gradients is too large for float32 in the shards of ranks {broken}, though each gradient "
            "is finite",
            remedy="clip the gradients, or lower the learning rate",
        )
    for owner, (shard, length) in enumerate(zip(pieces, lengths, strict=True)):
        outs = [piece.flat for piece in shard]
        unpack(codec, rows[owner, :length], outs, False, f" from rank {owner}", rng.step)


def ask(numbers: Tensor, extra: Tensor, size: int) -> Reduction[tuple[Tensor, Tensor]]:
    """Gather some int64 of every rank, and everyone's `extra` with them: int64[p, m] on the CPU, and bytes[p, n]."""
    head = numbers.view(torch.uint8).to(extra.device)
    rows = yield Gather(torch.cat([head, extra]))
    assert len(rows) == size, f"{len(rows)} rows for {size} ranks"
    return rows[:, : head.numel()].cpu().reshape(-1).view(torch.int64).view(size, -1), rows[:, head.numel() :]


def edges(total: int, size: int) -> list[int]:
    """Where the shards of `size` owners begin and end: at multiples of 1024, as even as that allows.

    >>> edges(5000, 2), edges(10, 3)
    ([0, 2048, 5000], [0, 0, 0, 10])
    """
    grains = -(-total // GRAIN)
    return [min(total, GRAIN * (grains * owner // size)) for owner in range(size + 1)]


def shards(parts: Sequence[TensorSlice], size: int) -> list[list[TensorSlice]]:
    """For each owner the pieces of its shard: views of the parts, and of their residuals.

    >>> import torch
    >>> parts = [TensorSlice(torch.zeros(1000), "a"), TensorSlice(torch.zeros(2000), "b")]
    >>> [[(piece.name, piece.start, piece.numel) for piece in shard] for shard in shards(parts, 2)]
    [[('a', 0, 1000), ('b', 0, 24)], [('b', 24, 1976)]]
    """
    cuts = edges(sum(part.numel for part in parts), size)
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


def settle(owner_residuals: OwnerResiduals, parts: Sequence[TensorSlice], own: Sequence[TensorSlice]) -> None:
    """Where buckets or owners have changed, what a former piece has left unsent goes into this rank's gradient."""
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


def _kept(owner_residuals: OwnerResiduals, piece: TensorSlice) -> Tensor:
    found = owner_residuals.get((piece.name, piece.start))
    if found is None or found.numel() != piece.numel:
        found = owner_residuals[piece.name, piece.start] = torch.zeros_like(piece.flat)
    return found


def _length(told: int, most: int, rank: int) -> int:
    if not HEADER.size <= told <= most:
        raise ProtocolError(
            f"rank {rank} tells of a payload of {told} B, and one has {HEADER.size} to {most}", peer=rank
        )
    return told


def _device(pieces: Sequence[Sequence[TensorSlice]]) -> torch.device:
    return next((piece.flat.device for shard in pieces for piece in shard), torch.device("cpu"))


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _aligned(count: int) -> int:
    """Rows of a multiple of 16 bytes, so that every rank's payload begins where numbers may begin."""
    return -(-count // 16) * 16
