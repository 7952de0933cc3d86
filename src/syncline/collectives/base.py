"""The schedule contract: a pure generator of rounds for one rank.

A round lists what the rank sends and receives in it. Sends read the data as it was when the round began. Received
data replaces it or is combined with it when all receives are complete. Every rank yields the same number of rounds,
empty ones where it is idle, so round k means the same on all ranks. Nothing else synchronises the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "Generate",
    "Move",
    "Operation",
    "Round",
    "Schedule",
    "Setting",
    "embed",
    "fold_to_power_of_two",
    "largest_power_of_two",
]

Operation = Literal["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "gather", "scatter"]


class Move(NamedTuple):
    """`width` chunks from `chunk` on, to or from `peer`. Received chunks replace the data, or are combined with it."""

    peer: int
    chunk: int
    width: int = 1
    combine: bool = False


class Round(NamedTuple):
    """What one rank sends and receives in parallel."""

    sends: tuple[Move, ...] = ()
    recvs: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Setting:
    """Where a schedule runs: number of ranks and chunks, the root, the host of each rank (empty: one host per rank)."""

    size: int
    chunks: int = 1
    root: int = 0
    hosts: tuple[int, ...] = ()


Generate = Callable[[int, Setting], Iterator[Round]]


@dataclass(frozen=True, repr=False)
class Schedule:
    """A generator of rounds, with what the executor must know. Its repr is its spec."""

    spec: str
    operation: Operation
    generate: Generate
    chunks_for: Callable[[int, tuple[int, ...]], int]
    """Number of chunks for (size, hosts)."""
    supports_lanes: bool = True
    """Several lanes may overlap. False where results return on the connections that carry the inputs: gloo's message
    that a receive is ready would queue behind the outgoing data."""

    def setting(self, size: int, root: int = 0, hosts: tuple[int, ...] = ()) -> Setting:
        """The setting for `size` ranks."""
        return Setting(size, self.chunks_for(size, hosts), root, hosts)

    def rounds(self, rank: int, setting: Setting) -> Iterator[Round]:
        """The rounds of `rank`."""
        return self.generate(rank, setting)

    def __repr__(self) -> str:
        return self.spec


def embed(rounds: Iterator[Round], members: tuple[int, ...], offset: int = 0, scale: int = 1) -> Iterator[Round]:
    """Rounds of a subgroup in terms of all ranks: peer i becomes members[i], chunk c becomes offset + c·scale.

    Each chunk becomes `scale` chunks.

    >>> list(embed(iter([Round(sends=(Move(1, 2),))]), members=(4, 6), offset=10, scale=3))
    [Round(sends=(Move(peer=6, chunk=16, width=3, combine=False),), recvs=())]
    """

    def translated(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(members[m.peer], offset + m.chunk * scale, m.width * scale, m.combine) for m in moves)

    for sends, recvs in rounds:
        yield Round(translated(sends), translated(recvs))


def largest_power_of_two(size: int) -> int:
    """The largest power of two ≤ `size`.

    >>> [largest_power_of_two(size) for size in (1, 2, 3, 8, 9)]
    [1, 2, 2, 8, 8]
    """
    return 1 << (size.bit_length() - 1)


def fold_to_power_of_two(inside: Generate, rank: int, setting: Setting) -> Iterator[Round]:
    """Run `inside` on the first q ranks, q a power of two; the others fold into a partner first and unfold last.

    Six ranks, q = 4::

        fold      4 → 0   5 → 1      partners combine
        inside    0 1 2 3            the schedule proper
        unfold    0 → 4   1 → 5      the whole result
    """
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
