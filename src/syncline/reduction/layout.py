"""Which gradients share a bucket, and in which order the buckets fill. Pure.

Backward gives the gradients of the last layers first; a bucket is closed when it holds enough bytes. The first one is
small, so that the network has something to do early::

    order of gradients   d  c  b  a              a bucket is closed at its limit:
    buckets              [d c]  [b]  [a]         1 MB for the first of a kind, then `bucket_bytes`

Gradients of one kind (dtype and device) share buckets; each kind has its own. A gradient that is large itself, from a
tenth of a bucket on, is a bucket alone and reduced where it lies: a copy would cost more than a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import SpecError

__all__ = ["BUCKET_BYTES", "Item", "is_large", "lay_out"]

BUCKET_BYTES = 25 << 20
FIRST_BYTES = 1 << 20
LARGE = 10
"""The part of a bucket from which on a gradient is one alone."""


@dataclass(frozen=True)
class Item:
    """A gradient to be placed."""

    nbytes: int
    kind: str = "float32 on cpu"
    movable: bool = True
    """Whether its memory may be used as it is: a contiguous gradient's."""


def lay_out(items: Sequence[Item], order: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> list[tuple[int, ...]]:
    """The buckets, as numbers of items, in the order in which they fill.

    >>> lay_out([Item(400), Item(600), Item(2_000_000)], order=[2, 1, 0])
    [(2,), (1, 0)]
    """
    if bucket_bytes < 1:
        raise SpecError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
    closed: list[tuple[int, ...]] = []
    filling: dict[str, list[int]] = {}
    seen: set[str] = set()
    for number in order:
        kind = items[number].kind
        if is_large(items[number], bucket_bytes):
            closed.append((number,))
            continue
        bucket = filling.setdefault(kind, [])
        bucket.append(number)
        limit = bucket_bytes if kind in seen else min(FIRST_BYTES, bucket_bytes)
        if sum(items[member].nbytes for member in bucket) >= limit:
            seen.add(kind)
            closed.append(tuple(filling.pop(kind)))
    place = {number: at for at, number in enumerate(order)}
    rest = sorted(filling.values(), key=lambda bucket: place[bucket[-1]])
    return closed + [tuple(bucket) for bucket in rest]


def is_large(item: Item, bucket_bytes: int) -> bool:
    """Whether a gradient is a bucket alone."""
    return item.movable and item.nbytes * LARGE >= bucket_bytes and item.nbytes > 0
