"""What a schedule is: a pure generator of rounds for one rank in a setting.

A round names what the rank sends and receives in it. Sends read what the rank held when the round began;
receives are combined with it or replace it when all of them have come. Every rank yields the same number of
rounds, empty ones where it has nothing to do, so that round k means the same on all of them; nothing else ties
the ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Generate", "Move", "Operation", "Round", "Schedule", "Setting", "embed"]

Operation = Literal["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "gather", "scatter"]


class Move(NamedTuple):
    """`width` chunks from `chunk` on, to or from `peer`; a received one may be combined with what is there."""

    peer: int
    chunk: int
    width: int = 1
    combine: bool = False


class Round(NamedTuple):
    """What one rank does at once."""

    sends: tuple[Move, ...] = ()
    recvs: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Setting:
    """Where a schedule runs: how many ranks and chunks, the root, the host of each rank (empty: all on their own)."""

    size: int
    chunks: int = 1
    root: int = 0
    hosts: tuple[int, ...] = ()


Generate = Callable[[int, Setting], Iterator[Round]]


@dataclass(frozen=True, repr=False)
class Schedule:
    """A generator of rounds, with what an executor must know of it. Its repr is its spec."""

    spec: str
    operation: Operation
    generate: Generate
    cut: Callable[[int, tuple[int, ...]], int]
    """How many chunks it cuts the data into, given the size and the hosts."""
    laned: bool = True
    """Whether parts of the data can overlap. Not where what comes back takes the way of what went: gloo's word that a
    receive is ready waits behind the data that leaves on the same connection."""

    def setting(self, size: int, root: int = 0, hosts: tuple[int, ...] = ()) -> Setting:
        """The setting for so many ranks."""
        return Setting(size, self.cut(size, hosts), root, hosts)

    def rounds(self, rank: int, setting: Setting) -> Iterator[Round]:
        """What `rank` does, round by round."""
        return self.generate(rank, setting)

    def __repr__(self) -> str:
        return self.spec


def embed(rounds: Iterator[Round], members: tuple[int, ...], offset: int = 0, scale: int = 1) -> Iterator[Round]:
    """Rounds among few, told among all: peers become `members`, chunk c becomes `scale` chunks from offset + c·scale.

    >>> list(embed(iter([Round(sends=(Move(1, 2),))]), members=(4, 6), offset=10, scale=3))
    [Round(sends=(Move(peer=6, chunk=16, width=3, combine=False),), recvs=())]
    """

    def renamed(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(members[m.peer], offset + m.chunk * scale, m.width * scale, m.combine) for m in moves)

    for sends, recvs in rounds:
        yield Round(renamed(sends), renamed(recvs))
