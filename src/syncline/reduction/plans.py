"""From a bucket with a codec to the work that reduces it: tensors that sum on the wire, payloads, or streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.errors import DivergedError
from syncline.reduction.coded import Work
from syncline.reduction.coding import CodecState
from syncline.reduction.communicator import Communicator
from syncline.reduction.compressed import gather, settle, split
from syncline.reduction.requests import Sum
from syncline.reduction.sparse_reduce import sparse_doubling, sparse_split, sparse_split_dense
from syncline.reduction.ways import CompressedCollective

__all__ = ["Guard", "work_for"]

OWNED = ("split", "sparse_split_dense")
"""CompressedCollectives in which shards have owners, who may have something left."""


def work_for(
    exchange: Communicator,
    coding: CodecState,
    rng: RngKey,
    codec: Codec,
    parts: Sequence[TensorSlice],
    control: Tensor | None,
    before: Guard,
) -> Work:
    """What makes means of the parts over the ranks, in place. `control` is summed: by itself, or told as bytes[p, n].

    `before` is told of NaN and Inf, and writes the control numbers when the work begins.
    """
    size = exchange.size
    if codec.traits.allreducible and exchange.ways.told is None:
        settle(coding.owned, parts, [])
        before.check(parts, whole=codec.keeps_residual and not codec.traits.residual_needs_sum)
        yield from _summed(codec, parts, rng, size, control)
        _scale(parts, 1 / size)
        return None
    assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
    way = exchange.ways.way(codec, [part.numel for part in parts])
    if way.name not in OWNED:
        settle(coding.owned, parts, [])  # what the owners of a run before had left
    device = parts[0].flat.device
    if way.name == "split" or (control is not None and control.device != device):
        before.check(parts, whole=True)
    else:
        before.write_control()  # and again, where encoding finds NaN or Inf
    extra = torch.empty(0, dtype=torch.uint8) if control is None else control.view(torch.uint8)
    extra = extra.to(device)
    if way.name == "gather":
        told = yield from gather(codec, parts, rng, size, extra, scale=1 / size, broken=before.broken)
        return told
    told = yield from _by(way, codec, parts, rng, exchange, extra, coding, before)
    _scale(parts, 1 / size)
    return told


class Guard(Protocol):
    """Who keeps NaN and Inf away from codecs, which cannot say them."""

    def check(self, parts: Sequence[TensorSlice], whole: bool = False) -> None:
        """Look for them in parts that are about to be encoded; then write the control numbers, if this is the time.

        `whole`: also in the sum with the residuals. A part that holds NaN or Inf becomes zeros without a state.
        """
        ...

    def broken(self, part: TensorSlice) -> None:
        """The codec has found them in a part; it sends zeros instead. The control numbers are written again."""
        ...

    def write_control(self) -> None:
        """Write the control numbers, if this is the time."""
        ...


def _by(
    way: CompressedCollective,
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    exchange: Communicator,
    extra: Tensor,
    coding: CodecState,
    before: Guard,
) -> Work:
    size, rank = exchange.size, exchange.rank
    if way.name == "split":
        return split(codec, parts, rng, size, rank, extra, coding.owned)
    told = (codec, parts, rng, size, rank, extra)
    if way.name == "sparse_doubling":
        return sparse_doubling(*told, broken=before.broken)
    if way.name == "sparse_split":
        return sparse_split(*told, broken=before.broken)
    return sparse_split_dense(*told, coding.owned, way.quantize, broken=before.broken)


def _scale(parts: Sequence[TensorSlice], scale: float) -> None:
    for part in parts if scale != 1.0 else ():
        part.flat.mul_(scale)


def _summed(codec: Codec, parts: Sequence[TensorSlice], rng: RngKey, size: int, control: Tensor | None) -> Work:
    """The codec's own rounds; the control numbers beside the first, for half precision could not count them."""
    first = True
    try:
        for tensor in codec.reduce_rounds(parts, rng, size):
            if first and control is not None:
                yield Sum(tensor), Sum(control)
            else:
                yield Sum(tensor)
            first = False
    except DivergedError:
        for part in parts:
            part.drop_nonfinite_state()
        raise
