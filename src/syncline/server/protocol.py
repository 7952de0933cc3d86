"""The messages between clients and servers: a fixed header, then a body.

A body of up to `MAX_INLINE_BYTES` is sent in one message with its header. A longer body is a message of its own,
received directly into its buffer. A header ends with its CRC-32. Nothing is unpickled: descriptions and control
requests are JSON, and every field of them is checked.
"""

from __future__ import annotations

import json
from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.wire import WireHeader

__all__ = ["RecordHeader", "ReplyHeader", "RequestHeader", "bytes_tensor", "first_tag", "json_body"]

VERSION = 3
MAX_INLINE_BYTES = 1 << 15
"""The longest body that is sent together with its header."""
MAX_PIECE_ELEMENTS = 1 << 20
"""Values in one request: 4 MiB, so that a server applies the first pieces of a large push while others arrive."""
MAX_BODY_BYTES = 16 * MAX_PIECE_ELEMENTS
"""The longest body: keys and values of a piece, and the worst case of a codec."""
REPLY_SLOTS = 64
"""Tags for replies in each space; also the most requests of one client that a server keeps."""
MAX_INFLIGHT_REQUESTS = 16
"""Unanswered requests that a client has at one server."""
MAX_CACHED_KEY_LISTS = 64
"""Lists of keys that a server remembers for each client."""

# Tags on the transport. All requests share one tag. Each space has its own tags for bodies and replies, so that clients
# of different spaces in one process do not receive each other's messages.
REQUEST_TAG, RECORD_BODY_TAG = 1, 2
BODY_TAG, REPLY_TAG, DATA_TAG = 0, 1, 1 + REPLY_SLOTS
TAGS_PER_SPACE = 256
TAG_RANGES = 1 << 18
REPLICA_TAG_RANGES = 1009
"""Ranges of tags between those of a space's shards at one server: its own, and those that it is a replica of."""

# Kinds of requests.
HELLO, PUSH, PULL, PUSH_PULL, CONTROL, BYE = range(1, 7)
KINDS = range(HELLO, BYE + 1)
VALUES = (PUSH, PULL, PUSH_PULL)
"""Kinds of requests about values."""

# Flags of requests.
KEYS = 1
"""The body begins with a sorted list of keys."""
CACHED = 2
"""The header has the digest of the list of keys, which the server remembers."""
TICK = 4
"""The last request of a step: the worker's clock advances."""
ENCODED = 8
"""The values are a codec's payload."""
ENCODE_REPLY = 16
"""The reply may be a codec's payload: the change since the client's last reply of this kind."""
FACTORS = 32
"""The values are the two factors of a gradient."""
ALL_FLAGS = 63

# Status of replies.
OK, LATE, NEED_KEYS, REFUSED, ORPHANED = range(1, 6)

# Flags of replies.
STOP = 1
"""A client has asked all workers to end."""
REPLY_ENCODED = 2
"""The body is a codec's payload."""

FLOAT32 = 1

# Kinds of records. A server sends them to the next replica of a shard; `ACKED` is the answer. A new server asks by
# `JOIN`, gets a `SNAPSHOT` in pieces, and answers each by `RECEIVED`.
REQUESTED, REJECTED, LOST, LEFT, ACKED, JOIN, SNAPSHOT, RECEIVED = range(1, 9)
ANSWERS = (ACKED, JOIN, RECEIVED)
"""Kinds of records after which no request follows."""

# The keys that follow a header are aligned to 8 bytes.
_REQUEST = WireHeader(b"SLRQ", VERSION, fields="BHHHIIIqqQQQQQddQQII", padding=4)
_REPLY = WireHeader(b"SLRP", VERSION, fields="BHHHIQqqQQ", padding=4)
RECORD_MAGIC = b"SLRC"
_RECORD = WireHeader(RECORD_MAGIC, VERSION, fields="BHIQ")
REQUEST_BYTES, REPLY_BYTES, RECORD_BYTES = _REQUEST.nbytes, _REPLY.nbytes, _RECORD.nbytes


class RequestHeader(NamedTuple):
    """A client's request to one server. The fields have this order on the wire.

    >>> RequestHeader.read(RequestHeader(kind=PULL, space=7, number=1, first=0, count=4).pack()).count
    4
    """

    kind: int
    flags: int = 0
    dtype: int = FLOAT32
    state_slot: int = 0
    """0: the weights; above 0: a tensor of the rule's state, counted from 1."""
    space: int = 0
    handler: int = 0
    """0: the space's rule; above 0: the number of a handler."""
    seed: int = 0
    """The step in the codec's random key."""
    clock: int = -1
    """The worker's clock before this request; −1: the request belongs to no step."""
    min_clock: int = -1
    """A read waits until every worker's clock is at least this; −1: it does not wait."""
    number: int = 0
    """Counts this client's requests to this server, from 1 on. A repeated request has the same number."""
    after: int = 0
    """The server handles this client's requests up to this number first."""
    acked: int = 0
    """The client has received all replies up to this number."""
    first: int = 0
    count: int = 0  # type: ignore[assignment]  # replaces tuple.count
    rate: float = nan
    """The learning rate; NaN: the rule's own."""
    scale: float = 1.0
    """The server multiplies the values by this."""
    digest: int = 0
    """The digest of the list of keys, where the server remembers lists."""
    length: int = 0
    """Bytes of the body."""
    replica: int = 0
    """0: the request is about the server's own shard; n: about that of the n-th server before it, which it replaces."""
    reply_from: int = 0
    """0: the server that gets the request replies; n: member n − 1, another server of the shard's chain, does."""

    @property
    def repeats(self) -> bool:
        """Whether the request and its reply are one message each. The client repeats such a request if it is lost."""
        return self.length <= MAX_INLINE_BYTES and (
            self.kind not in (PULL, PUSH_PULL) or 4 * self.count <= MAX_INLINE_BYTES
        )

    def numbered(
        self, space: int, number: int, acked: int, length: int, place: tuple[int, int, int, int]
    ) -> RequestHeader:
        """The header with its number. `place` has `after`, `first`, `count`, `seed`. `_replace` would take longer."""
        (
            kind, flags, dtype, slot, _, handler, _, clock, min_clock, _, _, _, _, _, rate, scale, digest, _, replica,
            reply_from,
        ) = self  # fmt: skip
        after, first, count, seed = place
        return RequestHeader(
            kind, flags, dtype, slot, space, handler, seed, clock, min_clock, number, after, acked, first, count,
            rate, scale, digest, length, replica, reply_from,
        )  # fmt: skip

    def pack(self) -> bytes:
        return _REQUEST.pack(*self)

    @staticmethod
    def read(data: bytes | memoryview) -> RequestHeader:
        """Unpack a request, or raise a `ProtocolError`."""
        found = RequestHeader(*_REQUEST.read(data, _refuse_request))
        if found.kind not in KINDS or found.flags & ~ALL_FLAGS:
            raise ProtocolError(f"a request of unknown kind {found.kind} (flags: {found.flags:#x})")
        return found


class ReplyHeader(NamedTuple):
    """A server's reply. The fields have this order on the wire.

    >>> ReplyHeader.read(ReplyHeader(status=OK, space=7, number=1, live=3).pack()).live
    3
    """

    status: int
    flags: int = 0
    live: int = 0
    """Workers that still train."""
    handler: int = 0
    """Unused; 0."""
    space: int = 0
    number: int = 0
    staleness: int = -1
    """Of the values that were read or pushed, in steps; −1: unknown."""
    min_clock: int = 0
    """The slowest worker's clock. In a reply to a late or refused step: the clock of that worker; −1: unknown."""
    steps: int = 0
    """Steps of all workers together."""
    length: int = 0

    def pack(self) -> bytes:
        return _REPLY.pack(*self)

    @staticmethod
    def read(data: bytes | memoryview) -> ReplyHeader:
        """Unpack a reply, or raise a `ProtocolError`."""
        found = ReplyHeader(*_REPLY.read(data, _refuse_reply))
        if not OK <= found.status <= ORPHANED:
            raise ProtocolError(f"a reply of unknown status {found.status} (flags: {found.flags:#x})")
        return found


class RecordHeader(NamedTuple):
    """A record from one replica of a shard to the next, or the answer. The fields have this order on the wire.

    After it come the header of the client's request and, if it is short, the body.

    >>> RecordHeader.read(RecordHeader(kind=LOST, shard=1, member=2, number=7).pack()).number
    7
    """

    kind: int
    shard: int
    """The number of the server whose shard it is."""
    member: int = 0
    """The client. `JOIN`: the number of the server that is replaced. `SNAPSHOT`, `RECEIVED`: the attempt to join."""
    number: int = 0
    """Counts the records of the shard, from 1 on. `ACKED`: all records up to here are on all later replicas. `JOIN`:
    the attempt. `SNAPSHOT`: it is the state after this record. `RECEIVED`: the pieces that have arrived.
    """

    def pack(self) -> bytes:
        return _RECORD.pack(*self)

    @staticmethod
    def read(data: bytes | memoryview) -> RecordHeader:
        """Unpack a record, or raise a `ProtocolError`."""
        found = RecordHeader(*_RECORD.read(data, _refuse_record))
        if not REQUESTED <= found.kind <= RECEIVED:
            raise ProtocolError(f"a record of unknown kind {found.kind}")
        return found


def first_tag(space_id: int, replica: int = 0) -> int:
    """The first of a space's tags. A server that replaces others has separate tags for each of their shards.

    >>> first_tag(7) + DATA_TAG
    2113
    """
    return TAGS_PER_SPACE * (1 + (space_id + REPLICA_TAG_RANGES * replica) % TAG_RANGES)


def bytes_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor.

    >>> bytes_tensor(b"{}").tolist()
    [123, 125]
    """
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def json_body(value: Any) -> Tensor:
    """A value as JSON, in a uint8 tensor."""
    return bytes_tensor(json.dumps(value).encode())


def _refuse_request(reason: str) -> ProtocolError:
    return ProtocolError(f"a request was refused: {reason}")


def _refuse_record(reason: str) -> ProtocolError:
    return ProtocolError(f"a record was refused: {reason}")


def _refuse_reply(reason: str) -> ProtocolError:
    return ProtocolError(f"a reply was refused: {reason}")
