"""Making a power of two of any number of ranks: the extra ones fold into a partner first and unfold last.

Six ranks, q = 4::

    fold      4 → 0   5 → 1      partners combine
    inside    0 1 2 3            the schedule proper
    unfold    0 → 4   1 → 5      the whole result
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Generate, Move, Round, Setting

__all__ = ["folded", "largest_power_of_two"]


def largest_power_of_two(size: int) -> int:
    """The largest power of two that is not above `size`.

    >>> [largest_power_of_two(size) for size in (1, 2, 3, 8, 9)]
    [1, 2, 2, 8, 8]
    """
    return 1 << (size.bit_length() - 1)


def folded(inside: Generate, rank: int, setting: Setting) -> Iterator[Round]:
    """`inside` on the first q ranks, with the others folded in."""
    power = largest_power_of_two(setting.size)
    extra = setting.size - power
    whole = setting.chunks
    core = Setting(power, setting.chunks)
    if rank >= power:
        yield Round(sends=(Move(rank - power, 0, whole),))
        for _ in inside(0, core):
            yield Round()
        yield Round(recvs=(Move(rank - power, 0, whole),))
        return
    if extra:
        yield Round(recvs=(Move(rank + power, 0, whole, combine=True),)) if rank < extra else Round()
    yield from inside(rank, core)
    if extra:
        yield Round(sends=(Move(rank + power, 0, whole),)) if rank < extra else Round()
