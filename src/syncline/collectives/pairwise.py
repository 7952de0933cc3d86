"""All-to-all in p − 1 rounds: in round k each rank sends to rank + k and receives from rank − k.

Three ranks (ij: the chunk from i to j)::

    round  0                1                2
    1      01→1  20 ←2      12→2  01 ←0      20→0  12 ←1
    2      02→2  10 ←1      10→0  21 ←2      21→1  02 ←0
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.collectives.base import Move, Round, Setting

__all__ = ["pairwise"]


def pairwise(rank: int, setting: Setting) -> Iterator[Round]:
    """All-to-all: chunk i·p + j goes from rank i to rank j, one partner at a time."""
    size = setting.size
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        yield Round(sends=(Move(to, rank * size + to),), recvs=(Move(source, source * size + rank),))
