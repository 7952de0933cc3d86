"""All data passes one rank: the fewest rounds, but the root's port carries everything.

Four ranks, all-reduce (``+`` combines, n the whole)::

    round  0          1          2          3
    1      + n from 1, 2, 3      n → 0      n → 0      n → 0
    2      n → 1, 2, 3           n from 0   n from 0   n from 0

Best for few bytes and few ranks: its time grows as p·n.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Move, Round, Setting

__all__ = ["naive", "naive_broadcast", "naive_gather", "naive_reduce", "naive_scatter"]


def naive(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: all ranks send to the root, which returns the sum."""
    yield from naive_reduce(rank, setting)
    yield from naive_broadcast(rank, setting)


def naive_reduce(rank: int, setting: Setting) -> Iterator[Round]:
    """Reduce: the root receives from everyone at once."""
    for others in _others(setting):
        if rank == setting.root:
            yield Round(recvs=tuple(Move(peer, 0, setting.chunks, combine=True) for peer in others))
        else:
            yield Round(sends=(Move(setting.root, 0, setting.chunks),))


def naive_broadcast(rank: int, setting: Setting) -> Iterator[Round]:
    """Broadcast: the root sends to everyone."""
    for others in _others(setting):
        if rank == setting.root:
            yield Round(sends=tuple(Move(peer, 0, setting.chunks) for peer in others))
        else:
            yield Round(recvs=(Move(setting.root, 0, setting.chunks),))


def naive_gather(rank: int, setting: Setting) -> Iterator[Round]:
    """Gather: rank i sends chunk i to the root."""
    for others in _others(setting):
        if rank == setting.root:
            yield Round(recvs=tuple(Move(peer, peer) for peer in others))
        else:
            yield Round(sends=(Move(setting.root, rank),))


def naive_scatter(rank: int, setting: Setting) -> Iterator[Round]:
    """Scatter: the root sends chunk i to rank i."""
    for others in _others(setting):
        if rank == setting.root:
            yield Round(sends=tuple(Move(peer, peer) for peer in others))
        else:
            yield Round(recvs=(Move(setting.root, rank),))


def _others(setting: Setting) -> Iterator[tuple[int, ...]]:
    """Yields the other ranks once; nothing if there is one rank."""
    if setting.size > 1:
        yield tuple(rank for rank in range(setting.size) if rank != setting.root)
