"""A binomial tree: combine on the way to the root, copy on the way back.

Eight ranks, root 0 (``→`` sends the whole, the receiver combines on the way up)::

    round  1: 1→0 3→2 5→4 7→6    2: 2→0 6→4    3: 4→0           reduce
    round  4: 0→4                5: 0→2 4→6    6: 0→1 2→3 4→5 6→7   broadcast

2·⌈log₂p⌉ latencies and as many times the bytes: good for small data, and for broadcast and reduce themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Move, Round, Setting

__all__ = ["tree", "tree_broadcast", "tree_reduce"]


def tree(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: reduce to the root, broadcast from it."""
    yield from tree_reduce(rank, setting)
    yield from tree_broadcast(rank, setting)


def tree_reduce(rank: int, setting: Setting) -> Iterator[Round]:
    """Reduce: in round k, ranks at odd multiples of 2ᵏ⁻¹ from the root send to the one 2ᵏ⁻¹ below."""
    for distance in _distances(setting.size):
        parent, child = _edge(rank, distance, setting)
        if parent is not None:
            yield Round(sends=(Move(parent, 0, setting.chunks),))
        elif child is not None:
            yield Round(recvs=(Move(child, 0, setting.chunks, combine=True),))
        else:
            yield Round()


def tree_broadcast(rank: int, setting: Setting) -> Iterator[Round]:
    """Broadcast: the edges of the reduce in reverse."""
    for distance in reversed(_distances(setting.size)):
        parent, child = _edge(rank, distance, setting)
        if parent is not None:
            yield Round(recvs=(Move(parent, 0, setting.chunks),))
        elif child is not None:
            yield Round(sends=(Move(child, 0, setting.chunks),))
        else:
            yield Round()


def _distances(size: int) -> list[int]:
    return [1 << k for k in range((size - 1).bit_length())]


def _edge(rank: int, distance: int, setting: Setting) -> tuple[int | None, int | None]:
    """The parent or the child of `rank` at this distance."""
    place = (rank - setting.root) % setting.size
    if place % (2 * distance) == distance:
        return (rank - distance) % setting.size, None
    if place % (2 * distance) == 0 and place + distance < setting.size:
        return None, (rank + distance) % setting.size
    return None, None
