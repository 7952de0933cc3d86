"""Every rank reduces one shard and sends it to all others directly: two rounds for any number of ranks.

Four ranks, all-reduce (a…d the chunks, ``+`` combines)::

    round  0                     1                     2                     3
    1      b→1 c→2 d→3           c→2 d→3 a→0           d→3 a→0 b→1           a→0 b→1 c→2
           + a from 3 2 1        + b from 0 3 2        + c from 1 0 3        + d from 2 1 0
    2      a→1 a→2 a→3           b→2 b→3 b→0           c→3 c→0 c→1           d→0 d→1 d→2
           d from 3, c from 2, …

As many bytes as a ring, with two latencies instead of 2(p−1); but p−1 messages share every port. Each rank begins
with its right neighbour, so that not all send to the same rank first.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Move, Round, Setting

__all__ = ["sharded", "sharded_allgather", "sharded_alltoall", "sharded_reduce_scatter"]


def sharded(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: direct reduce-scatter, direct all-gather."""
    yield from sharded_reduce_scatter(rank, setting)
    yield from sharded_allgather(rank, setting)


def sharded_reduce_scatter(rank: int, setting: Setting) -> Iterator[Round]:
    """Reduce-scatter: rank i receives chunk i from all."""
    if setting.size > 1:
        yield Round(
            sends=tuple(Move(peer, peer) for peer in _rightwards(rank, setting.size)),
            recvs=tuple(Move(peer, rank, combine=True) for peer in _leftwards(rank, setting.size)),
        )


def sharded_allgather(rank: int, setting: Setting) -> Iterator[Round]:
    """All-gather: rank i sends chunk i to all."""
    if setting.size > 1:
        yield Round(
            sends=tuple(Move(peer, rank) for peer in _rightwards(rank, setting.size)),
            recvs=tuple(Move(peer, peer) for peer in _leftwards(rank, setting.size)),
        )


def sharded_alltoall(rank: int, setting: Setting) -> Iterator[Round]:
    """All-to-all at once: chunk i·p + j goes from rank i to rank j."""
    size = setting.size
    if size > 1:
        yield Round(
            sends=tuple(Move(peer, rank * size + peer) for peer in _rightwards(rank, size)),
            recvs=tuple(Move(peer, peer * size + rank) for peer in _leftwards(rank, size)),
        )


def _rightwards(rank: int, size: int) -> Iterator[int]:
    return ((rank + step) % size for step in range(1, size))


def _leftwards(rank: int, size: int) -> Iterator[int]:
    return ((rank - step) % size for step in range(1, size))
