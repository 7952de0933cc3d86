"""What clients and servers say to each other: a fixed header, then a body.

A message of up to `INLINE` bytes is header and body in one; the body of a longer one follows by itself, straight into
place. Nothing is unpickled; descriptions and the board are JSON with checked fields. A header ends with its CRC-32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.wire import WireHeader

__all__ = ["Post", "ReplyHeader", "RequestHeader", "json_body"]

VERSION = 1
INLINE = 1 << 15
"""Bytes of a body up to which it goes with its header."""
PIECE = 1 << 20
"""Elements that one request carries at most: 4 MB, so that a large push is applied while its rest is on the way."""
MOST_BYTES = 16 * PIECE
"""The longest body: keys and values of a piece, with room for a codec's worst case."""
SLOTS = 64
WINDOW = 16
"""Requests that a client may have under way at one server."""

MAX_CACHED_KEY_LISTS = 64
"""Lists of keys that a server remembers for each client."""

# Tags on the network's transport: one for all requests, and in each space its own for what follows, so that spaces in
# one process do not take each other's answers.
REQUEST = 1
BODY, REPLY, DATA = 0, 1, 1 + SLOTS
TAGS_EACH = 256
LANES = 1 << 18

# Kinds of requests.
HELLO, PUSH, PULL, PUSH_PULL, CONTROL, BYE = range(1, 7)
KINDS = range(HELLO, BYE + 1)
ABOUT_VALUES = (PUSH, PULL, PUSH_PULL)

# Flags of requests.
KEYS = 1
"""The body begins with a sorted list of keys."""
CACHED = 2
"""The keys are those that were sent before under this digest."""
TICK = 4
"""With this request the worker's clock advances: it has pushed all it had for this step."""
ENCODED = 8
"""The values are a codec's payload."""
ANSWER_ENCODED = 16
"""The answer is to be one: what changed since the client's last such answer."""
FACTORS = 32
"""The values are the two factors of a gradient."""
ALL_FLAGS = 63

# Status of replies.
OK, LATE, NEED_KEYS, REFUSED, ORPHANED = range(1, 6)

STOP = 1
"""Flag of a reply: somebody wants all workers to end."""
CODED = 2
"""Flag of a reply: its body is a codec's payload."""

FLOAT32 = 1

# The padding aligns the keys that follow.
_REQUEST = WireHeader(b"SLRQ", VERSION, fields="BHHHIIIqqQQQQQddQQ", padding=4)
_REPLY = WireHeader(b"SLRP", VERSION, fields="BHHHIQqqQQ", padding=4)
REQUEST_BYTES, REPLY_BYTES = _REQUEST.nbytes, _REPLY.nbytes


class RequestHeader(NamedTuple):
    """What a client asks of one server; the fields lie on the wire in this order.

    >>> RequestHeader.read(RequestHeader(kind=PULL, space=7, number=1, first=0, count=4).pack()).count
    4
    """

    kind: int
    flags: int = 0
    dtype: int = FLOAT32
    plane: int = 0
    """0: the weights; above: the rule's state."""
    space: int = 0
    handler: int = 0
    """0: the space's rule; above: one that was looked up by name."""
    seed: int = 0
    """The step of the codec's draw."""
    clock: int = -1
    """The worker's, before this request; −1: it has none."""
    wanted: int = -1
    """A read waits until every worker's clock is there; −1: it does not wait."""
    number: int = 0
    """Counts this client's requests to this server, from 1 on: a repeated one is known by it."""
    after: int = 0
    """Requests of this client up to this number come first."""
    acked: int = 0
    """All answers up to this number have arrived."""
    first: int = 0
    count: int = 0  # type: ignore[assignment]  # a tuple's own is not missed
    rate: float = nan
    """The learning rate; NaN: the rule's own."""
    scale: float = 1.0
    """What the values are multiplied with."""
    digest: int = 0
    """Of the keys, where they are to be remembered."""
    length: int = 0
    """Bytes of the body."""

    @property
    def repeats(self) -> bool:
        """Whether it and its answer each go in one message: such a one may be lost, and is asked again."""
        return self.length <= INLINE and (self.kind not in (PULL, PUSH_PULL) or 4 * self.count <= INLINE)

    def pack(self) -> bytes:
        return _REQUEST.pack(*self)

    @staticmethod
    def read(data: bytes | memoryview) -> RequestHeader:
        """A request, or a `ProtocolError` that says what is wrong with it."""
        found = RequestHeader(*_REQUEST.read(data, _refuse_request))
        if found.kind not in KINDS or found.flags & ~ALL_FLAGS:
            raise ProtocolError(f"a request of unknown kind {found.kind} (flags: {found.flags:#x})")
        return found


class ReplyHeader(NamedTuple):
    """What a server answers.

    >>> ReplyHeader.read(ReplyHeader(status=OK, space=7, number=1, live=3).pack()).live
    3
    """

    status: int
    flags: int = 0
    live: int = 0
    """Workers that are there and still train."""
    handler: int = 0
    """Of a lookup: the handler's number."""
    space: int = 0
    number: int = 0
    staleness: int = -1
    """Of what was read or pushed, in steps; −1: not known."""
    min_clock: int = 0
    """The slowest worker's; where a step came late or is refused, the worker's own; −1: not known."""
    steps: int = 0
    """That all workers together have taken."""
    length: int = 0

    def pack(self) -> bytes:
        return _REPLY.pack(*self)

    @staticmethod
    def read(data: bytes | memoryview) -> ReplyHeader:
        """A reply, or a `ProtocolError` that says what is wrong with it."""
        found = ReplyHeader(*_REPLY.read(data, _refuse_reply))
        if not OK <= found.status <= ORPHANED:
            raise ProtocolError(f"a reply of unknown status {found.status} (flags: {found.flags:#x})")
        return found


@dataclass(frozen=True)
class Post:
    """A few numbers that somebody left for all to read.

    >>> Post(1, "finished", (2.0, 100.0)).kind
    'finished'
    """

    number: int
    """Counts from 1; those of one writer come in the order in which it wrote them."""
    kind: str
    values: tuple[float, ...]


def json_body(value: Any) -> Tensor:
    """JSON, as bytes to send.

    >>> json_body({}).tolist()
    [123, 125]
    """
    return torch.from_numpy(np.frombuffer(json.dumps(value).encode(), np.uint8).copy())


def lane(space: int) -> int:
    """The first of a space's tags.

    >>> lane(7) + DATA
    2113
    """
    return TAGS_EACH * (1 + space % LANES)


def _refuse_request(reason: str) -> ProtocolError:
    return ProtocolError(f"a request was refused: {reason}")


def _refuse_reply(reason: str) -> ProtocolError:
    return ProtocolError(f"a reply was refused: {reason}")
