"""Each rank communicates with its two neighbours only: the fewest bytes, 2(p−1) latencies (Patarasuk and Yuan, 2009).

Three ranks, all-reduce (a, b, c the chunks; ``+`` combines)::

    round  0              1              2
    1      c→1  + b       a→2  + c       b→0  + a        reduce-scatter:
    2      b→1  + a       c→2  + b       a→0  + c          rank i ends with the sum of chunk i
    3      a→1    c       b→2    a       c→0    b        all-gather
    4      c→1    b       a→2    c       b→0    a

Every receive is from the left neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Move, Round, Setting

__all__ = ["ring", "ring_allgather", "ring_reduce_scatter"]


def ring(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: ring reduce-scatter, ring all-gather."""
    yield from ring_reduce_scatter(rank, setting)
    yield from ring_allgather(rank, setting)


def ring_reduce_scatter(rank: int, setting: Setting) -> Iterator[Round]:
    """Reduce-scatter: a chunk travels once round the ring and grows, ending at its owner."""
    size = setting.size
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(1, size):
        yield Round((Move(right, (rank - step) % size),), (Move(left, (rank - step - 1) % size, 1, True),))


def ring_allgather(rank: int, setting: Setting) -> Iterator[Round]:
    """All-gather: each rank passes on what it received last."""
    size = setting.size
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        yield Round((Move(right, (rank - step) % size),), (Move(left, (rank - step - 1) % size),))
