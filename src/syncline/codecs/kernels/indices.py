"""The byte layout of sorted indices: the shorter of two, which both ends derive from their number.

    bitmap        one bit for each of the n elements

    split         the low b bits of each index; the upper bits in unary, which is possible for sorted numbers:
                  bit (i_j >> b) + j is set for the j-th index i_j

                  n = 20, b = 2, indices 3 5 6 17
                  index >> 2     0  1  1  4              bits 0, 2, 3, 7   of  4 + (19 >> 2) = 8
                  low bits      11 01 10 01

Split takes k(1 + b) + ⌊(n − 1) / 2^b⌋ bits, the bound of Golomb-Rice codes of the gaps (Elias 1974, Fano 1971), but
always exactly that. So a body has a fixed length, and indices can be read independently.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from syncline.errors import ProtocolError

__all__ = ["BITMAP", "IndexLayout", "broken", "layout"]

BITMAP = -1


class IndexLayout(NamedTuple):
    """The layout of some indices."""

    low: int
    """Number of low bits of each index; `BITMAP`: one bit per element."""
    first: int
    """Bytes before the low bits."""
    nbytes: int
    """Total size in bytes."""


@lru_cache(maxsize=4096)
def layout(numel: int, count: int) -> IndexLayout:
    """The shortest layout of `count` of `numel` indices.

    >>> layout(1_000_000, 10_000)
    IndexLayout(low=6, first=3203, nbytes=10703)
    >>> layout(100, 50)
    IndexLayout(low=-1, first=13, nbytes=13)
    """
    if count == 0:
        return IndexLayout(BITMAP, 0, 0)
    size = _bytes(numel)
    best = IndexLayout(BITMAP, size, size)
    for low in range(1, max(2, (numel - 1).bit_length() + 1)):
        first = _bytes(count + (numel - 1 >> low))
        nbytes = first + _bytes(count * low)
        if nbytes < best.nbytes:
            best = IndexLayout(low, first, nbytes)
    return best


def broken(numel: int, count: int) -> ProtocolError:
    """The error for bytes that are not `count` increasing indices below `numel`."""
    return ProtocolError(f"a payload's indices are not {count} increasing numbers below {numel}: it is corrupt")


def _bytes(bits: int) -> int:
    return (bits + 7) // 8
