"""Sparse streams: sorted indices and their values, as sparse all-reduce moves and merges them.

    count u32 │ elements u64 │ indices, see kernels/indices.py │ values float32

Renggli et al.: SparCML, 2019.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from syncline.codecs.kernels.indices import layout
from syncline.codecs.kernels.sparse import kernels
from syncline.codecs.sparse import index_dtype, read_indices, write_indices
from syncline.errors import ProtocolError

__all__ = ["Stream", "dense", "join", "limit", "merge", "most_bytes", "pack", "split", "unpack"]

HEADER = struct.Struct("<IQ")


@dataclass(frozen=True)
class Stream:
    """Some of `numel` elements; the others are 0."""

    numel: int
    indices: Tensor
    """Sorted and unlike each other; int32, or int64 from 2^31 elements on."""
    values: Tensor
    """float32, one for each index."""

    @property
    def count(self) -> int:
        return self.indices.numel()


def merge(a: Stream, b: Stream) -> Stream:
    """The sum of two streams over the same elements.

    >>> one = Stream(9, torch.tensor([1, 4], dtype=torch.int32), torch.tensor([1.0, 2.0]))
    >>> two = Stream(9, torch.tensor([4, 8], dtype=torch.int32), torch.tensor([0.5, 3.0]))
    >>> both = merge(one, two)
    >>> both.indices.tolist(), both.values.tolist()
    ([1, 4, 8], [1.0, 2.5, 3.0])
    """
    assert a.numel == b.numel, f"streams over {a.numel} and {b.numel} elements do not add up"
    indices, values = kernels(a.values).merge((a.indices, b.indices), (a.values, b.values))
    return Stream(a.numel, indices, values)


def split(stream: Stream, edges: Sequence[int]) -> list[Stream]:
    """The stretches between edges, from 0 to `numel`; each counts from its own beginning.

    >>> whole = Stream(9, torch.tensor([1, 4, 8], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]))
    >>> [part.indices.tolist() for part in split(whole, [0, 4, 9])]
    [[1], [0, 4]]
    """
    assert (edges[0], edges[-1]) == (0, stream.numel), f"edges {list(edges)} do not span {stream.numel} elements"
    bounds = torch.tensor(list(edges), dtype=stream.indices.dtype, device=stream.indices.device)
    cuts = torch.searchsorted(stream.indices, bounds).tolist()
    return [
        Stream(
            stop - start,
            (stream.indices[first:last] - start).to(index_dtype(stop - start)),
            stream.values[first:last],
        )
        for (start, stop), (first, last) in zip(pairwise(edges), pairwise(cuts), strict=True)
    ]


def join(streams: Sequence[Stream]) -> Stream:
    """Stretches after each other: what `split` has cut.

    >>> whole = Stream(9, torch.tensor([1, 4, 8], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]))
    >>> join(split(whole, [0, 4, 9])).indices.tolist()
    [1, 4, 8]
    """
    numel = sum(stream.numel for stream in streams)
    indices, start = [], 0
    for stream in streams:
        indices.append(stream.indices.to(index_dtype(numel)) + start)
        start += stream.numel
    return Stream(numel, torch.cat(indices), torch.cat([stream.values for stream in streams]))


def dense(stream: Stream) -> Tensor:
    """All elements.

    >>> dense(Stream(3, torch.tensor([1], dtype=torch.int32), torch.tensor([5.0])))
    tensor([0., 5., 0.])
    """
    out = torch.zeros(stream.numel, device=stream.values.device, dtype=torch.float32)
    kernels(out).scatter(out, stream.indices, stream.values, accumulate=False)
    return out


def limit(numel: int, index_bytes: float = 4, value_bytes: float = 4) -> int:
    """How many elements a stream may hold before all of them take fewer bytes: δ = N·v / (i + v).

    >>> limit(1000), limit(1000, index_bytes=1)
    (500, 800)
    """
    return int(numel * value_bytes / (index_bytes + value_bytes))


def most_bytes(numel: int, count: int) -> int:
    """Bytes of a packed stream of so many of so many elements."""
    return HEADER.size + layout(numel, count).nbytes + 4 * count


def pack(stream: Stream) -> Tensor:
    """A stream as bytes."""
    count, numel = stream.count, stream.numel
    out = torch.empty(most_bytes(numel, count), dtype=torch.uint8, device=stream.values.device)
    out[: HEADER.size].copy_(torch.frombuffer(bytearray(HEADER.pack(count, numel)), dtype=torch.uint8))
    last = out.numel() - 4 * count
    write_indices(out[HEADER.size : last], numel, stream.indices)
    out[last:].copy_(stream.values.contiguous().view(torch.uint8))
    return out


def unpack(packed: Tensor, numel: int) -> Stream:
    """A stream over `numel` elements from bytes that may be anybody's: what cannot be is a `ProtocolError`.

    >>> stream = Stream(9, torch.tensor([1, 4], dtype=torch.int32), torch.tensor([1.0, 2.0]))
    >>> unpack(pack(stream), 9).indices.tolist()
    [1, 4]
    """
    if packed.numel() < HEADER.size:
        raise ProtocolError(f"a stream of {packed.numel()} B is too short: it is truncated")
    count, said = HEADER.unpack(bytes(packed[: HEADER.size].cpu().numpy()))
    if said != numel:
        raise ProtocolError(f"a stream is over {said} elements, and {numel} are expected")
    if count > numel or packed.numel() != most_bytes(numel, count):
        raise ProtocolError(f"a stream of {packed.numel()} B does not hold {count} of {numel} elements: it is corrupt")
    last = packed.numel() - 4 * count
    indices = read_indices(packed[HEADER.size : last], numel, count)
    values = torch.empty(count, dtype=torch.float32, device=packed.device)
    values.view(torch.uint8).copy_(packed[last:])
    if not bool(torch.isfinite(values).all()):
        raise ProtocolError("a stream holds NaN or Inf")
    return Stream(numel, indices, values)
