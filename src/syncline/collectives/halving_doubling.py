"""Partners exchange halves, then quarters, … and back: the bytes of a ring in 2·log₂p latencies (Rabenseifner, 2004).

Four ranks, all-reduce (chunks a b c d; ``+`` combines)::

    round  0              1              2              3
    1      cd→2  + ab     cd→3  + ab     ab→0  + cd     ab→1  + cd     halving: each ends with the sum of one chunk
    2      b→1   + a      a→0   + b      d→3   + c      c→2   + d
    3      a→1     b      b→0     a      c→3     d      d→2     c      doubling: the way back
    4      ab→2    cd     ab→3    cd     cd→0    ab     cd→1    ab

The distance is halved first, so that a rank's data is always one contiguous range. If p is not a power of two, the
extra ranks fold in first (`fold_to_power_of_two`): two more rounds and 2n more bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Move, Round, Setting, fold_to_power_of_two

__all__ = ["halving_doubling"]


def halving_doubling(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: recursive halving reduce-scatter, recursive doubling all-gather."""
    return fold_to_power_of_two(_halving_doubling, rank, setting)


def _halving_doubling(rank: int, setting: Setting) -> Iterator[Round]:
    """`setting.chunks` equals the power of two `setting.size`."""
    first, count = 0, setting.chunks
    distance = setting.size // 2
    while distance:
        partner = rank ^ distance
        count //= 2
        keep, give = (first + count, first) if rank & distance else (first, first + count)
        yield Round(sends=(Move(partner, give, count),), recvs=(Move(partner, keep, count, combine=True),))
        first = keep
        distance //= 2
    distance = 1
    while distance < setting.size:
        partner = rank ^ distance
        other = first - count if rank & distance else first + count
        yield Round(sends=(Move(partner, first, count),), recvs=(Move(partner, other, count),))
        first = min(first, other)
        count *= 2
        distance *= 2
