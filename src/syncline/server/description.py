"""What a space is: said once, by every client in the same words."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from syncline.codecs import Codec, build_codec
from syncline.errors import ProtocolError, SynclineError
from syncline.server.layout import Layout
from syncline.server.protocol import PIECE
from syncline.server.rules import Rule, build_rule

__all__ = ["Description", "pack_starts"]

LONGEST = 1 << 15
MOST_KEYS = 1 << 40
MOST_PIECES = 1 << 20
MAX_PARAMETERS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Description:
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
    held: bool = False
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
    def mark(self) -> int:
        """What requests know the space by."""
        return zlib.crc32(self.name.encode()) or 1

    @property
    def keeps(self) -> bool:
        """Whether what is pushed is kept beyond its request."""
        return self.held or bool(self.upward)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The keys at which a parameter begins; empty if they were not given."""
        return _unpack_starts(self.parameters, self.numel)

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.numel, len(self.servers), self.bounds, self.piece)

    def build_rules(self) -> list[Rule]:
        return [build_rule(spec) for spec in self.rules]

    @cached_property
    def _codec(self) -> Codec | None:
        return build_codec(self.codec)

    def build_codec(self) -> Codec | None:
        """The codec; it has no state, and is read from its spec once."""
        return self._codec

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes) -> Description:
        """A description that came from a client, checked field by field."""
        if len(data) > LONGEST:
            raise ProtocolError(f"a description of {len(data)} B is longer than {LONGEST} B")
        try:
            found: dict[str, Any] = json.loads(data)
            made = Description(
                name=_text(found["name"]),
                numel=_whole(found["numel"], 1, MOST_KEYS),
                servers=tuple(_whole(each, 0, 1 << 31) for each in found["servers"]),
                workers=tuple(_whole(each, 0, 1 << 31) for each in found["workers"]),
                rules=tuple(_text(each) for each in found["rules"]),
                bounds=tuple(_whole(each, 0, MOST_KEYS) for each in found["bounds"]),
                held=bool(found["held"]),
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
            parent = Description.from_json(self.upward.encode())
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
