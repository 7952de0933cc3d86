"""Partners at distance 1, 2, 4, … exchange everything they have: log₂p latencies, log₂p times the bytes.

Four ranks, all-reduce (⇄ both send the whole and combine)::

    round  0     1     2     3
    1      ⇄ 1   ⇄ 0   ⇄ 3   ⇄ 2
    2      ⇄ 2   ⇄ 3   ⇄ 0   ⇄ 1

The fewest latencies with one partner per round: for small data. If p is not a power of two, the extra ranks fold in
first (`fold_to_power_of_two`): two more rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Move, Round, Setting, fold_to_power_of_two

__all__ = ["recursive_doubling"]


def recursive_doubling(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: after round k a rank holds the sum of its 2ᵏ nearest."""
    return fold_to_power_of_two(_doubling, rank, setting)


def _doubling(rank: int, setting: Setting) -> Iterator[Round]:
    distance = 1
    while distance < setting.size:
        partner = rank ^ distance
        yield Round(
            sends=(Move(partner, 0, setting.chunks),),
            recvs=(Move(partner, 0, setting.chunks, combine=True),),
        )
        distance *= 2
