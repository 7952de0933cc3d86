"""Who holds which keys, and how a request is cut. Pure.

A space of n keys lies in contiguous shards, one a server, as even as can be. A request is cut where a shard, a group
or the grid of pieces ends, so that the same keys are always cut the same way::

    keys      0 ─────────────┬────────────────┬────────────── n
    servers   │      0       │       1        │       2
    groups    │   a     ┊        b                    ┊  c
    pieces    │  ·   ·  ┊ ·  │  ·     ·     · │ ·   · ┊   ·   at most PIECE elements each
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server.protocol import PIECE

__all__ = ["Cut", "Keys", "Layout", "read_keys"]

Keys = range | slice | tuple[int, int] | Tensor | None
"""A range of keys, or a sorted list of them; None: all."""


@dataclass(frozen=True)
class Cut:
    """A part of a request that goes to one server in one message. Offsets count the request's values."""

    server: int
    first: int
    """The first key, as the space counts."""
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The shards of a space.

    >>> layout = Layout(10, servers=3)
    >>> [layout.shard(server) for server in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    >>> [(cut.server, cut.first, cut.count) for cut in layout.cut_range(2, 8)]
    [(0, 2, 2), (1, 4, 3), (2, 7, 1)]
    """

    numel: int
    servers: int
    bounds: tuple[int, ...] = ()
    """Keys at which a group begins."""
    piece: int = PIECE

    def shard(self, server: int) -> tuple[int, int]:
        """The keys of a server: the first, and the one after the last."""
        base, more = divmod(self.numel, self.servers)
        first = server * base + min(server, more)
        return first, first + base + (server < more)

    @cached_property
    def edges(self) -> list[int]:
        """Every key at which a piece begins, and the end."""
        marks = {0, self.numel, *(bound for bound in self.bounds if 0 < bound < self.numel)}
        marks |= {self.shard(server)[0] for server in range(self.servers)}
        ordered = sorted(marks)
        found = [edge for first, after in pairwise(ordered) for edge in range(first, after, self.piece)]
        return [*found, self.numel]

    @cached_property
    def _owners(self) -> list[int]:
        starts = [self.shard(server)[0] for server in range(self.servers)]
        return [bisect_right(starts, edge) - 1 for edge in self.edges[:-1]]

    def cut_range(self, first: int, after: int) -> list[Cut]:
        """A range of keys, cut."""
        edges, found, at = self.edges, [], first
        place = bisect_right(edges, first) - 1
        while at < after:
            end = min(after, edges[place + 1])
            found.append(Cut(self._owners[place], at, at - first, end - first))
            at, place = end, place + 1
        return found

    def owner_of(self, first: int, after: int) -> int:
        """Who holds keys that lie in one piece; −1 where they lie in several.

        >>> Layout(10, servers=3).owner_of(4, 7), Layout(10, servers=3).owner_of(3, 5)
        (1, -1)
        """
        place = bisect_right(self.edges, first) - 1
        return self._owners[place] if first < after <= self.edges[place + 1] else -1

    def cut_keys(self, keys: Tensor) -> list[Cut]:
        """A sorted list of keys, cut."""
        places = torch.searchsorted(keys, torch.tensor(self.edges)).tolist()
        return [
            Cut(self._owners[number], self.edges[number], start, stop)
            for number, (start, stop) in enumerate(pairwise(places))
            if stop > start
        ]


def read_keys(keys: Keys, numel: int) -> tuple[int, int] | Tensor:
    """What a caller means by `keys`: a range as (first, after), or a checked list."""
    if keys is None:
        return 0, numel
    if isinstance(keys, Tensor):
        return check_keys(keys, 0, numel)
    if isinstance(keys, slice):
        keys = range(*keys.indices(numel))
    if isinstance(keys, range):
        if keys.step != 1:
            raise ProtocolError(f"{keys} has steps of {keys.step}: give a sorted list of keys, as an int64 tensor")
        keys = (keys.start, keys.stop)
    first, after = keys
    if not 0 <= first <= after <= numel:
        raise ProtocolError(f"keys {first} to {after} do not lie in a space of {numel} keys")
    return int(first), int(after)


def check_keys(keys: Tensor, first: int, after: int) -> Tensor:
    """A list of keys that is sorted, without duplicates, and lies between the two."""
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ProtocolError(f"a list of keys is a row of int64, not {keys.dtype}{list(keys.shape)}")
    if keys.numel() == 0:
        return keys
    unsorted = keys[1:] <= keys[:-1]  # no difference, which may leave int64
    if bool(unsorted.any()):
        at = int(unsorted.nonzero()[0])
        what = "twice" if int(keys[at]) == int(keys[at + 1]) else "before a smaller one"
        raise ProtocolError(f"keys must be sorted, each once: {int(keys[at])} at place {at} comes {what}")
    if int(keys[0]) < first or int(keys[-1]) >= after:
        raise ProtocolError(f"keys {int(keys[0])} to {int(keys[-1])} do not lie between {first} and {after}")
    return keys.contiguous()


def group_of(bounds: Sequence[int], key: int) -> int:
    """The number of the group that a key belongs to.

    >>> group_of((0, 4), 5)
    1
    """
    return bisect_right(bounds, key) - 1


def spans(cuts: Sequence[Cut]) -> Iterator[tuple[int, list[Cut]]]:
    """The cuts of each server that has any."""
    servers = dict.fromkeys(cut.server for cut in cuts)
    for server in servers:
        yield server, [cut for cut in cuts if cut.server == server]
