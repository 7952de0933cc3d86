"""A payload: a header, then the bodies of a bucket's parts, one after the other.

    magic u16 │ version u8 │ kind u8 │ CRC-32 of the codec's spec u32 │ elements u64 │ bodies …

A body of fixed length lies there as it is; one whose length varies has it before it, as u32. Who decodes knows the
parts, so a payload of another codec, version or length is refused before anything is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice, all_finite
from syncline.errors import DivergedError, ProtocolError

__all__ = ["HEADER", "max_payload_bytes", "pack", "pack_into", "unpack", "unpack_all"]

HEADER = struct.Struct("<HBBIQ")
LENGTH = 4
MAGIC = 0x51C7
VERSION = 1


def max_payload_bytes(codec: PayloadCodec, sizes: Sequence[int], step: int = 0) -> int:
    """Bytes of a payload of parts of these sizes: exact where the codec's bodies are of fixed length."""
    extra = 0 if codec.traits.fixed_length else LENGTH
    return HEADER.size + sum(_lengths(codec, sizes, step)) + extra * len(sizes)


@lru_cache(maxsize=256)
def _bodies(codec: PayloadCodec, sizes: tuple[int, ...], step: int) -> tuple[int, ...]:
    """The lengths of bodies: the same in every step but the first ones of some codecs, and often asked for."""
    return tuple(codec.body_bytes(numel, step) for numel in sizes)


def _lengths(codec: PayloadCodec, sizes: Sequence[int], step: int) -> tuple[int, ...]:
    return _bodies(codec, tuple(sizes), min(step, codec.traits.steady_from_step))


def pack(
    codec: PayloadCodec, parts: Sequence[TensorSlice], rng: RngKey, broken: Callable[[TensorSlice], None] | None = None
) -> Tensor:
    """Encode the parts of a bucket; `broken` as for `pack_into`."""
    device = parts[0].flat.device if parts else torch.device("cpu")
    whole = torch.zeros(max_payload_bytes(codec, [p.numel for p in parts], rng.step), dtype=torch.uint8, device=device)
    return whole[: pack_into(codec, parts, rng, whole, broken)]


def pack_into(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    whole: Tensor,
    broken: Callable[[TensorSlice], None] | None = None,
) -> int:
    """Encode the parts of a bucket into `whole`, zeroed and of `max_payload_bytes`; how many bytes were used.

    A part that holds NaN or Inf is an error or, with a callback `broken`, is reported to it and sent as zeros. The
    codec's state of that part does not change then. Where finite values overflow with the state, it stays finite.
    """
    elements = sum(part.numel for part in parts)
    _put(whole, 0, HEADER.pack(MAGIC, VERSION, codec.codec_id, codec.spec_crc, elements))
    at, fixed = HEADER.size, codec.traits.fixed_length
    for part, most in zip(parts, _lengths(codec, [part.numel for part in parts], rng.step), strict=True):
        first = at if fixed else at + LENGTH
        body, own = whole[first : first + most], rng.for_slice(part.name, part.start)
        try:
            if not (codec.traits.detects_nonfinite and part.residual is None) and not all_finite(part.flat):
                raise DivergedError(f"{codec!r} cannot encode {part.name or 'a tensor'}: it holds NaN or Inf")
            used = codec.write(part, body, own)
        except DivergedError:
            part.drop_nonfinite_state()
            if broken is None:
                raise
            broken(part)
            used = codec.write(TensorSlice(part.flat.zero_(), part.name, part.start, part.shape), body.zero_(), own)
        if not fixed:
            _put(whole, at, struct.pack("<I", used))
        at = first + used
    return at


def unpack_all(codec: PayloadCodec, rows: Tensor, outs: Sequence[Tensor], step: int, scale: float) -> None:
    """Decode and add up the payloads of all ranks, one a row, of bodies of fixed length; `scale` times the sum."""
    elements = sum(out.numel() for out in outs)
    for rank, row in enumerate(rows):
        _check(codec, row, elements, f" from rank {rank}")
    at = HEADER.size
    for out, length in zip(outs, _lengths(codec, [out.numel() for out in outs], step), strict=True):
        codec.read_all(rows[:, at : at + length], out, scale)
        at += length


def unpack(
    codec: PayloadCodec,
    payload: Tensor,
    outs: Sequence[Tensor],
    accumulate: bool,
    sender: str = "",
    step: int = 0,
) -> None:
    """Decode into rows of float32, one for each part, or add to them."""
    at = _check(codec, payload, sum(out.numel() for out in outs), sender)
    fixed = codec.traits.fixed_length
    for out, most in zip(outs, _lengths(codec, [out.numel() for out in outs], step), strict=True):
        if fixed:
            length = most
        else:
            length = int.from_bytes(_bytes(payload, at, LENGTH, sender), "little")
            at += LENGTH
        if at + length > payload.numel():
            raise ProtocolError(
                f"a payload{sender} of {payload.numel()} B ends within a body of {length} B at {at}: it is truncated"
            )
        codec.read(payload[at : at + length], out, accumulate)
        at += length
    if at != payload.numel():
        raise ProtocolError(f"a payload{sender} of {payload.numel()} B has {payload.numel() - at} B too many")


def _check(codec: PayloadCodec, payload: Tensor, elements: int, sender: str) -> int:
    magic, version, kind, mark, numel = HEADER.unpack(_bytes(payload, 0, HEADER.size, sender))
    if magic != MAGIC:
        raise ProtocolError(f"what came{sender} is not a payload (it begins with {magic:#06x}, not {MAGIC:#06x})")
    if version != VERSION:
        raise ProtocolError(f"a payload{sender} has version {version}, and this is version {VERSION}")
    if kind != codec.codec_id or mark != codec.spec_crc:
        raise ProtocolError(
            f"a payload{sender} is of another codec (kind {kind}) than {codec!r} (kind {codec.codec_id})"
        )
    if numel != elements:
        raise ProtocolError(f"a payload{sender} holds {numel} elements, and {elements} are expected")
    return HEADER.size


def _bytes(payload: Tensor, at: int, count: int, sender: str) -> bytes:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ProtocolError(f"a payload{sender} is a row of bytes, not {payload.dtype}{list(payload.shape)}")
    if at + count > payload.numel():
        raise ProtocolError(f"a payload{sender} of {payload.numel()} B is too short: it is truncated")
    return bytes(payload[at : at + count].cpu().numpy())


def _put(whole: Tensor, at: int, data: bytes) -> None:
    whole[at : at + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
