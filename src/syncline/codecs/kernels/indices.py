"""How sorted indices look in bytes: whichever of two ways is shorter, known to both ends from how many there are.

    bitmap        a bit for each of the n elements

    split         the low b bits of each index, as they are; the rest in unary, which sorted numbers allow:
                  bit (i_j >> b) + j is set for the j-th index i_j

                  n = 20, b = 2, indices 3 5 6 17
                  index >> 2     0  1  1  4              bits 0, 2, 3, 7   of  4 + (19 >> 2) = 8
                  low bits      11 01 10 01

Split takes k(1 + b) + ⌊(n − 1) / 2^b⌋ bits, the bound of Golomb-Rice codes of the gaps (Elias 1974, Fano 1971), but
always exactly that: so a body has a fixed length, and no index waits for the one before it to be read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from syncline.errors import ProtocolError

__all__ = ["BITMAP", "Layout", "broken", "layout"]

BITMAP = -1


class Layout(NamedTuple):
    """How indices are laid out."""

    low: int
    """Bits of each index written as they are; `BITMAP` where each element has a bit."""
    first: int
    """Bytes before the low bits."""
    nbytes: int
    """In all."""


@lru_cache(maxsize=4096)
def layout(numel: int, count: int) -> Layout:
    """The shortest way to write `count` of `numel` indices.

    >>> layout(1_000_000, 10_000)
    Layout(low=6, first=3203, nbytes=10703)
    >>> layout(100, 50)
    Layout(low=-1, first=13, nbytes=13)
    """
    if count == 0:
        return Layout(BITMAP, 0, 0)
    size = _bytes(numel)
    best = Layout(BITMAP, size, size)
    for low in range(1, max(2, (numel - 1).bit_length() + 1)):
        first = _bytes(count + (numel - 1 >> low))
        nbytes = first + _bytes(count * low)
        if nbytes < best.nbytes:
            best = Layout(low, first, nbytes)
    return best


def broken(numel: int, count: int) -> ProtocolError:
    """What to raise where bytes are not `count` increasing indices below `numel`."""
    return ProtocolError(f"a payload's indices are not {count} increasing numbers below {numel}: it is corrupt")


def _bytes(bits: int) -> int:
    return (bits + 7) // 8
