"""From a bucket with a codec to the work that reduces it: tensors that sum on the wire, payloads, or streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.codecs import Codec, Draw, Part, PayloadCodec
from syncline.exchange.coded import Work
from syncline.exchange.coding import Coding
from syncline.exchange.compressed import gather, split
from syncline.exchange.exchange import Exchange
from syncline.exchange.requests import Sum
from syncline.exchange.sparse_reduce import sparse_doubling, sparse_split, sparse_split_dense

__all__ = ["work_for"]


def work_for(exchange: Exchange, coding: Coding, codec: Codec, parts: Sequence[Part], control: Tensor | None) -> Work:
    """What sums the parts over the ranks, in place. `control` is summed too: by itself, or told as bytes[p, n]."""
    draw, size, rank = coding.draw, exchange.size, exchange.rank
    if codec.sums and exchange.ways.told is None:
        return _summed(codec, parts, draw, size, control)
    assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
    extra = torch.empty(0, dtype=torch.uint8) if control is None else control.view(torch.uint8)
    extra = extra.to(parts[0].flat.device)
    way = exchange.ways.way(codec, [part.numel for part in parts])
    if way.name == "gather":
        return gather(codec, parts, draw, size, extra)
    if way.name == "split":
        return split(codec, parts, draw, size, rank, extra, coding.owned)
    if way.name == "sparse_doubling":
        return sparse_doubling(codec, parts, draw, size, rank, extra)
    if way.name == "sparse_split":
        return sparse_split(codec, parts, draw, size, rank, extra)
    return sparse_split_dense(codec, parts, draw, size, rank, extra, coding.owned, way.quantize)


def _summed(codec: Codec, parts: Sequence[Part], draw: Draw, size: int, control: Tensor | None) -> Work:
    """The codec's own rounds; the control numbers beside the first, for half precision could not count them."""
    first = True
    for tensor in codec.rounds(parts, draw, size):
        if first and control is not None:
            yield Sum(tensor), Sum(control)
        else:
            yield Sum(tensor)
        first = False
