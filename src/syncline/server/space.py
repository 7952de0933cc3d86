"""Who holds which keys, and how a request is cut. Pure.

A space of n keys lies in contiguous shards, one a server, as even as can be. A request is cut where a shard, a group
or the grid of pieces ends, so that the same keys are always cut the same way::

    keys      0 ─────────────┬────────────────┬────────────── n
    servers   │      0       │       1        │       2
    groups    │   a     ┊        b                    ┊  c
    pieces    │  ·   ·  ┊ ·  │  ·     ·     · │ ·   · ┊   ·   at most PIECE elements each
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.codecs import Codec, build_codec
from syncline.errors import ProtocolError, SynclineError
from syncline.server.protocol import PIECE
from syncline.server.rules import UpdateRule, build_rule

__all__ = ["Keys", "RequestPart", "SpaceDescription", "SpaceLayout", "pack_starts", "read_keys"]

Keys = range | slice | tuple[int, int] | Tensor | None
"""A range of keys, or a sorted list of them; None: all."""


@dataclass(frozen=True)
class RequestPart:
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
class SpaceLayout:
    """The shards of a space.

    >>> layout = SpaceLayout(10, servers=3)
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

    def cut_range(self, first: int, after: int) -> list[RequestPart]:
        """A range of keys, cut."""
        edges, found, at = self.edges, [], first
        place = bisect_right(edges, first) - 1
        while at < after:
            end = min(after, edges[place + 1])
            found.append(RequestPart(self._owners[place], at, at - first, end - first))
            at, place = end, place + 1
        return found

    def owner_of(self, first: int, after: int) -> int:
        """Who holds keys that lie in one piece; −1 where they lie in several.

        >>> SpaceLayout(10, servers=3).owner_of(4, 7), SpaceLayout(10, servers=3).owner_of(3, 5)
        (1, -1)
        """
        place = bisect_right(self.edges, first) - 1
        return self._owners[place] if first < after <= self.edges[place + 1] else -1

    def cut_keys(self, keys: Tensor) -> list[RequestPart]:
        """A sorted list of keys, cut."""
        places = torch.searchsorted(keys, torch.tensor(self.edges)).tolist()
        return [
            RequestPart(self._owners[number], self.edges[number], start, stop)
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


def spans(cuts: Sequence[RequestPart]) -> Iterator[tuple[int, list[RequestPart]]]:
    """The cuts of each server that has any."""
    servers = dict.fromkeys(cut.server for cut in cuts)
    for server in servers:
        yield server, [cut for cut in cuts if cut.server == server]


LONGEST = 1 << 15
MOST_KEYS = 1 << 40
MOST_PIECES = 1 << 20
MAX_PARAMETERS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class SpaceDescription:
    """A space of float32 keys: how many, on which servers, and what a push does.

    `held` pushes are kept until a `quorum` of the workers has pushed the same step, then added up in the order of the
    workers and applied once. Others are applied as they come.
    """

    name: str
    numel: int
    servers: tuple[int, ...]
    """Members of the network that hold the shards."""
    workers: tuple[int, ...]
    rules: tuple[str, ...] = ("add",)
    """One for each group of keys."""
    bounds: tuple[int, ...] = (0,)
    """Where each group begins."""
    synchronous: bool = False
    quorum: float = 1.0
    damped: bool = False
    """Whether a push that is stale counts less: its rate is divided by its staleness."""
    codec: str | None = None
    piece: int = PIECE
    mean: bool = False
    """Whether a held step is divided by the gradients in it: the scale of a push is how many it adds up then."""
    upward: str = ""
    """Of a sub-master: its parent's space, described as JSON; sums go there, in place of a rule."""
    parameters: str = ""
    """Where each parameter begins, packed by `pack_starts`: a step may leave whole parameters out."""

    @cached_property
    def space_id(self) -> int:
        """What requests know the space by."""
        return zlib.crc32(self.name.encode()) or 1

    @property
    def keeps(self) -> bool:
        """Whether what is pushed is kept beyond its request."""
        return self.synchronous or bool(self.upward)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The keys at which a parameter begins; empty if they were not given."""
        return _unpack_starts(self.parameters, self.numel)

    @cached_property
    def layout(self) -> SpaceLayout:
        return SpaceLayout(self.numel, len(self.servers), self.bounds, self.piece)

    def build_rules(self) -> list[UpdateRule]:
        return [build_rule(spec) for spec in self.rules]

    @cached_property
    def _codec(self) -> Codec | None:
        return build_codec(self.codec)

    def build_codec(self) -> Codec | None:
        """The codec; it has no state, and is read from its spec once."""
        return self._codec

    def to_json(self) -> bytes:
        fields = asdict(self)
        fields["held"] = fields.pop("synchronous")  # its name in the wire format
        return json.dumps(fields, sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes) -> SpaceDescription:
        """A description that came from a client, checked field by field."""
        if len(data) > LONGEST:
            raise ProtocolError(f"a description of {len(data)} B is longer than {LONGEST} B")
        try:
            found: dict[str, Any] = json.loads(data)
            made = SpaceDescription(
                name=_text(found["name"]),
                numel=_whole(found["numel"], 1, MOST_KEYS),
                servers=tuple(_whole(each, 0, 1 << 31) for each in found["servers"]),
                workers=tuple(_whole(each, 0, 1 << 31) for each in found["workers"]),
                rules=tuple(_text(each) for each in found["rules"]),
                bounds=tuple(_whole(each, 0, MOST_KEYS) for each in found["bounds"]),
                synchronous=bool(found["held"]),
                quorum=float(found["quorum"]),
                damped=bool(found["damped"]),
                codec=None if found["codec"] is None else _text(found["codec"]),
                piece=_whole(found["piece"], 1, PIECE),
                mean=bool(found["mean"]),
                upward=_text(found["upward"], LONGEST),
                parameters=_text(found["parameters"], LONGEST),
            )
            made.check()
        except SynclineError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"a description that cannot be read: {type(error).__name__}: {error}") from None
        return made

    def check(self) -> None:
        """Refuse what cannot be."""
        if not self.servers or len(set(self.servers)) != len(self.servers):
            raise ProtocolError(f"a space lies on servers, each once, not on {list(self.servers)}")
        if len(self.bounds) != len(self.rules) or self.bounds[:1] != (0,) or list(self.bounds) != sorted(self.bounds):
            raise ProtocolError(f"{len(self.rules)} rules for groups that begin at {list(self.bounds)}")
        if self.numel > MOST_PIECES * self.piece:
            raise ProtocolError(f"{self.numel} keys in pieces of {self.piece}: {MOST_PIECES} pieces are the most")
        if not 0.0 < self.quorum <= 1.0:
            raise ProtocolError(f"quorum={self.quorum}: a fraction of the workers, above 0 and at most 1")
        self.build_rules()
        self.build_codec()
        if not self.starts and self.parameters:
            raise ProtocolError("a space without the first keys of its parameters")
        if self.upward:
            parent = SpaceDescription.from_json(self.upward.encode())
            if (parent.numel, parent.bounds) != (self.numel, self.bounds):
                raise ProtocolError(f"a sub-master of {self.numel} keys, below a parent of {parent.numel}")


def pack_starts(starts: Sequence[int]) -> str:
    """The first keys of all parameters, packed as text: it is short, because models repeat their layers.

    >>> _unpack_starts(pack_starts([0, 4, 6]), numel=9)
    (0, 4, 6)
    """
    return base64.b64encode(zlib.compress(np.diff(starts, prepend=0).astype("<u8").tobytes())).decode()


def _unpack_starts(text: str, numel: int) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        packed = zlib.decompressobj()
        data = packed.decompress(base64.b64decode(text, validate=True), 8 * MAX_PARAMETERS)
        steps = np.frombuffer(data, "<u8")
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"the first keys of the parameters cannot be read: {error}") from None
    if packed.unconsumed_tail or not steps.size or int(steps.max()) >= numel:
        raise ProtocolError(f"more than {MAX_PARAMETERS} parameters, or first keys outside of {numel} keys")
    starts = np.cumsum(steps)
    if starts[0] != 0 or (steps[1:] == 0).any() or int(starts[-1]) >= numel:
        raise ProtocolError(f"the first keys of parameters must ascend, from 0 to below {numel}")
    return tuple(int(each) for each in starts)


def _text(found: Any, most: int = 4096) -> str:
    if not isinstance(found, str) or len(found) > most:
        raise ProtocolError(f"a description has {found!r:.40} where a text was due")
    return found


def _whole(found: Any, least: int, most: int) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise ProtocolError(f"a description has {found!r:.40} where a whole number from {least} to {most} was due")
    return found
