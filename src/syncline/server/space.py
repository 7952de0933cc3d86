"""A space of float32 keys: its description, which server has which keys, and how requests are split.

The n keys lie in contiguous shards of nearly equal size, one for each server. A request is split at the ends of shards,
groups and pieces, so that the same keys are always split in the same way::

    keys      0 ─────────────┬────────────────┬────────────── n
    servers   │      0       │       1        │       2
    groups    │   a     ┊        b                    ┊  c
    pieces    │  ·   ·  ┊ ·  │  ·     ·     · │ ·   · ┊   ·   at most MAX_PIECE_ELEMENTS each
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.codecs import Codec, build_codec
from syncline.errors import ProtocolError, SynclineError
from syncline.server.protocol import MAX_PIECE_ELEMENTS
from syncline.server.rules import UpdateRule, build_rule

__all__ = ["KeySelection", "Keys", "RequestPart", "SpaceDescription", "SpaceLayout", "parse_keys"]

MAX_DESCRIPTION_BYTES = 1 << 15
MAX_TEXT_LENGTH = 4096
MAX_KEYS = 1 << 40
MAX_PIECES = 1 << 20
MAX_PARAMETERS = 1 << 18
WIRE_NAMES = {"synchronous": "held", "parent": "upward"}
"""Fields of a description that have other names in its JSON."""

Keys = range | slice | tuple[int, int] | Tensor | None
"""The keys of a request, as a caller writes them: a range, a sorted list, or None for all keys."""
KeySelection = tuple[int, int] | Tensor
"""Checked keys: (first, end), or a sorted int64 tensor."""


@dataclass(frozen=True)
class RequestPart:
    """The part of a request that goes to one server in one message. `start` and `stop` count the request's values."""

    server: int
    first: int
    """The first key."""
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SpaceLayout:
    """The shards and pieces of a space.

    >>> layout = SpaceLayout(10, servers=3)
    >>> [layout.shard(server) for server in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    >>> [(part.server, part.first, part.count) for part in layout.split_range(2, 8)]
    [(0, 2, 2), (1, 4, 3), (2, 7, 1)]
    """

    numel: int
    servers: int
    bounds: tuple[int, ...] = ()
    """The first key of each group."""
    piece: int = MAX_PIECE_ELEMENTS

    def shard(self, server: int) -> tuple[int, int]:
        """A server's keys: (first, end)."""
        base, more = divmod(self.numel, self.servers)
        first = server * base + min(server, more)
        return first, first + base + (server < more)

    @cached_property
    def edges(self) -> list[int]:
        """The first key of each piece, and the end of the space."""
        starts = {0, self.numel, *(bound for bound in self.bounds if 0 < bound < self.numel)}
        starts |= {self.shard(server)[0] for server in range(self.servers)}
        edges = [edge for first, end in pairwise(sorted(starts)) for edge in range(first, end, self.piece)]
        return [*edges, self.numel]

    @cached_property
    def _owners(self) -> list[int]:
        """The server of each piece."""
        starts = [self.shard(server)[0] for server in range(self.servers)]
        return [bisect_right(starts, edge) - 1 for edge in self.edges[:-1]]

    def split_range(self, first: int, end: int) -> list[RequestPart]:
        """Split a range of keys into parts."""
        edges, parts, at = self.edges, [], first
        piece = bisect_right(edges, first) - 1
        while at < end:
            stop = min(end, edges[piece + 1])
            parts.append(RequestPart(self._owners[piece], at, at - first, stop - first))
            at, piece = stop, piece + 1
        return parts

    def split_keys(self, keys: Tensor) -> list[RequestPart]:
        """Split a sorted list of keys into parts."""
        offsets = torch.searchsorted(keys, torch.tensor(self.edges)).tolist()
        return [
            RequestPart(self._owners[piece], self.edges[piece], start, stop)
            for piece, (start, stop) in enumerate(pairwise(offsets))
            if stop > start
        ]

    def split(self, keys: KeySelection) -> dict[int, list[RequestPart]]:
        """Split keys into parts, by server."""
        parts = self.split_keys(keys) if isinstance(keys, Tensor) else self.split_range(*keys)
        by_server: dict[int, list[RequestPart]] = {}
        for part in parts:
            by_server.setdefault(part.server, []).append(part)
        return by_server

    def owner_of(self, first: int, end: int) -> int:
        """The server of a range that lies in one piece; −1 if it lies in several.

        >>> SpaceLayout(10, servers=3).owner_of(4, 7), SpaceLayout(10, servers=3).owner_of(3, 5)
        (1, -1)
        """
        piece = bisect_right(self.edges, first) - 1
        return self._owners[piece] if first < end <= self.edges[piece + 1] else -1


@dataclass(frozen=True, kw_only=True)
class SpaceDescription:
    """Everything that clients and servers must agree on about a space. Every client sends the same description.

    In a `synchronous` space a server keeps pushes until a `quorum` of the workers has pushed the same step. It adds
    them in the order of the workers and applies the sum once. In other spaces it applies each push at once.
    """

    name: str
    numel: int
    servers: tuple[int, ...]
    """The members of the network that hold the shards."""
    workers: tuple[int, ...]
    rules: tuple[str, ...] = ("add",)
    """One for each group of keys."""
    bounds: tuple[int, ...] = (0,)
    """The first key of each group."""
    synchronous: bool = False
    quorum: float = 1.0
    damped: bool = False
    """Whether the learning rate of a push is divided by its staleness."""
    codec: str | None = None
    piece: int = MAX_PIECE_ELEMENTS
    mean: bool = False
    """Whether the sum of a synchronous step is divided by its number of gradients. The scale of a push is then the
    number of gradients in it.
    """
    parent: str = ""
    """For the space of a sub-master: the JSON of the parent's description. Sums go to the parent instead of to a rule.
    """
    parameters: str = ""
    """The first key of each parameter, packed by `pack_starts`. A step may leave whole parameters out."""
    replicas: int = 1
    """The number of servers that hold each shard."""

    @cached_property
    def space_id(self) -> int:
        """Identifies the space in requests."""
        return zlib.crc32(self.name.encode()) or 1

    @property
    def keeps_pushes(self) -> bool:
        """Whether a server uses the memory of a push after it has replied."""
        return self.synchronous or bool(self.parent)

    @cached_property
    def parameter_starts(self) -> tuple[int, ...]:
        """The first key of each parameter; empty if they are unknown."""
        return _unpack_starts(self.parameters, self.numel)

    @cached_property
    def layout(self) -> SpaceLayout:
        return SpaceLayout(self.numel, len(self.servers), self.bounds, self.piece)

    @cached_property
    def built_codec(self) -> Codec | None:
        """The codec. It has no state, so that one object serves all requests."""
        return build_codec(self.codec)

    def build_rules(self) -> list[UpdateRule]:
        return [build_rule(spec) for spec in self.rules]

    def group_of(self, key: int) -> int:
        """The number of a key's group."""
        return bisect_right(self.bounds, key) - 1

    def to_json(self) -> bytes:
        fields = {WIRE_NAMES.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps(fields, sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes) -> SpaceDescription:
        """Read a description that arrived from a client. Every field is checked."""
        if len(data) > MAX_DESCRIPTION_BYTES:
            raise ProtocolError(f"a description of {len(data)} B is longer than {MAX_DESCRIPTION_BYTES} B")
        try:
            fields: dict[str, Any] = json.loads(data)
            description = SpaceDescription(
                name=_text(fields["name"]),
                numel=_integer(fields["numel"], 1, MAX_KEYS),
                servers=tuple(_integer(each, 0, 1 << 31) for each in fields["servers"]),
                workers=tuple(_integer(each, 0, 1 << 31) for each in fields["workers"]),
                rules=tuple(_text(each) for each in fields["rules"]),
                bounds=tuple(_integer(each, 0, MAX_KEYS) for each in fields["bounds"]),
                synchronous=bool(fields["held"]),
                quorum=float(fields["quorum"]),
                damped=bool(fields["damped"]),
                codec=None if fields["codec"] is None else _text(fields["codec"]),
                piece=_integer(fields["piece"], 1, MAX_PIECE_ELEMENTS),
                mean=bool(fields["mean"]),
                parent=_text(fields["upward"], MAX_DESCRIPTION_BYTES),
                parameters=_text(fields["parameters"], MAX_DESCRIPTION_BYTES),
                replicas=_integer(fields["replicas"], 1, 1 << 15),
            )
            description.check()
        except SynclineError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"a description that cannot be read: {type(error).__name__}: {error}") from None
        return description

    def check(self) -> None:
        """Raise a `ProtocolError` if the fields contradict each other."""
        if not self.servers or len(set(self.servers)) != len(self.servers):
            raise ProtocolError(f"the servers of a space must differ, and there must be one (servers: {self.servers})")
        if len(self.bounds) != len(self.rules) or self.bounds[:1] != (0,) or list(self.bounds) != sorted(self.bounds):
            raise ProtocolError(f"{len(self.rules)} rules for groups that begin at {list(self.bounds)}")
        if self.numel > MAX_PIECES * self.piece:
            raise ProtocolError(f"{self.numel} keys in pieces of {self.piece}: at most {MAX_PIECES} pieces are allowed")
        if not 0.0 < self.quorum <= 1.0:
            raise ProtocolError(f"quorum={self.quorum}: a fraction of the workers, above 0 and at most 1")
        self.build_rules()
        _ = self.built_codec
        if not self.parameter_starts and self.parameters:
            raise ProtocolError("the first keys of the parameters are missing")
        if self.parent and self.replicas > 1:
            raise ProtocolError(f"a sub-master has no replicas (replicas: {self.replicas}): its sums are its own")
        if self.parent:
            parent = SpaceDescription.from_json(self.parent.encode())
            if (parent.numel, parent.bounds) != (self.numel, self.bounds):
                raise ProtocolError(f"a sub-master has {self.numel} keys, and its parent has {parent.numel}")


def parse_keys(keys: Keys, numel: int) -> KeySelection:
    """Convert a caller's keys to (first, end) or a checked list."""
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
    first, end = keys
    if not 0 <= first <= end <= numel:
        raise ProtocolError(f"keys {first} to {end} do not lie in a space of {numel} keys")
    return int(first), int(end)


def check_keys(keys: Tensor, first: int, end: int) -> Tensor:
    """Raise a `ProtocolError` unless the keys are sorted, without duplicates, and in the range."""
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ProtocolError(f"a list of keys is a 1-D tensor of int64, not {keys.dtype}{list(keys.shape)}")
    if keys.numel() == 0:
        return keys
    unsorted = keys[1:] <= keys[:-1]  # a difference could overflow int64
    if bool(unsorted.any()):
        at = int(unsorted.nonzero()[0])
        what = "twice" if int(keys[at]) == int(keys[at + 1]) else "before a smaller one"
        raise ProtocolError(f"keys must be sorted, each once: {int(keys[at])} at place {at} comes {what}")
    if int(keys[0]) < first or int(keys[-1]) >= end:
        raise ProtocolError(f"keys {int(keys[0])} to {int(keys[-1])} do not lie between {first} and {end}")
    return keys.contiguous()


def count_keys(keys: KeySelection) -> int:
    """The number of selected keys.

    >>> count_keys((2, 5))
    3
    """
    return keys.numel() if isinstance(keys, Tensor) else keys[1] - keys[0]


def check_values(values: Tensor, keys: KeySelection) -> Tensor:
    """The values as a 1-D float32 tensor in CPU memory; one value for each key."""
    if not isinstance(values, Tensor) or values.dtype != torch.float32:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ProtocolError(f"a space holds float32, not {kind}: convert the values")
    if values.numel() != (count := count_keys(keys)):
        raise ProtocolError(f"{values.numel()} values for {count} keys")
    if values.dim() == 1 and values.is_contiguous() and not values.requires_grad and not values.is_cuda:
        return values
    return values.detach().reshape(-1).cpu().contiguous()


def check_out(out: Tensor | None, keys: KeySelection) -> Tensor:
    """The tensor that a read fills: the caller's `out` after checks, or a new one."""
    count = count_keys(keys)
    if out is None:
        return torch.empty(count, dtype=torch.float32)
    if out.dtype != torch.float32 or out.numel() != count or not out.is_contiguous() or out.is_cuda:
        raise ProtocolError(f"out must be {count} contiguous float32 in CPU memory, not {out.dtype}{list(out.shape)}")
    return out if out.dim() == 1 and not out.requires_grad else out.detach().view(-1)


def pack_starts(starts: Sequence[int]) -> str:
    """Compress the first keys of all parameters to text. It is short, because models repeat their layers.

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
        sizes = np.frombuffer(data, "<u8")
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"the first keys of the parameters cannot be read: {error}") from None
    if packed.unconsumed_tail or not sizes.size or int(sizes.max()) >= numel:
        raise ProtocolError(f"more than {MAX_PARAMETERS} parameters, or first keys outside of {numel} keys")
    starts = np.cumsum(sizes)
    if starts[0] != 0 or (sizes[1:] == 0).any() or int(starts[-1]) >= numel:
        raise ProtocolError(f"the first keys of parameters must ascend, from 0 to below {numel}")
    return tuple(int(each) for each in starts)


def _text(value: Any, max_length: int = MAX_TEXT_LENGTH) -> str:
    if not isinstance(value, str) or len(value) > max_length:
        raise ProtocolError(f"a description has {value!r:.40} instead of a text")
    return value


def _integer(value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ProtocolError(f"a description has {value!r:.40} instead of an integer from {least} to {most}")
    return value
