"""A server's record of one client in one space: which requests arrived, their replies, and how to read their bodies.

A client numbers its requests to a server from 1 on, and reports up to which number it has the replies. So the server
recognises repeated requests, and what it keeps for a client is bounded::

    numbers    1   2   3   4   5   6   7   8   9   …        acked + REPLY_SLOTS
               └ acked ┘       │       │   └ deferred: it waits for earlier requests, or for clocks
                               │       └ ahead: done before an earlier one
                               └ applied: all requests up to here have had their effect
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.codecs import RngKey
from syncline.errors import DivergedError, ProtocolError
from syncline.server import protocol
from syncline.server.factors import unpack_and_multiply
from syncline.server.protocol import ReplyHeader, RequestHeader
from syncline.server.shard import ParameterShard, Push
from syncline.server.space import check_keys

__all__ = ["ClientSession", "DeferredRequest", "OutgoingReply"]

MAX_KEY_LISTS_BYTES = 64 << 20
"""Limit of the lists of keys that are remembered for one client."""
LISTED = protocol.KEYS | protocol.CACHED
"""Flags of requests with a list of keys."""
CODED = protocol.ENCODED | protocol.FACTORS
"""Flags of values whose length does not follow from their count."""


@dataclass(frozen=True)
class OutgoingReply:
    """A reply to send, and its body. `lossy`: the client asks again if the reply is lost."""

    member: int
    header: ReplyHeader
    body: Tensor | None = None
    lossy: bool = False


@dataclass
class DeferredRequest:
    """A request and how far it is handled. It may have to wait for earlier requests or for other workers' clocks."""

    header: RequestHeader
    body: Tensor
    keys: Tensor | None = None
    """The list of keys, as soon as it is known. The session may forget the list meanwhile."""
    pushed: bool = False
    has_weights: bool = False
    """Whether the new weights have replaced the pushed values in `body`."""
    late: bool = False
    staleness: int = -1


@dataclass
class ClientSession:
    """One client of one space."""

    member: int
    shard: ParameterShard
    worker: bool
    """Whether the client is a worker with a clock; otherwise it only observes."""
    applied: int = 0
    """All requests up to this number have had their effect."""
    ahead: set[int] = field(default_factory=set)
    replies: dict[int, OutgoingReply] = field(default_factory=dict)
    deferred: dict[int, DeferredRequest] = field(default_factory=dict)
    acked: int = 0
    left: bool = False
    view: Tensor | None = None
    """For encoded replies: the values that the client has."""
    _seen: Tensor | None = None
    """The keys of the view that the client has received."""
    _version: int = 0
    """The version of the shard's weights that the view belongs to."""
    key_lists: OrderedDict[int, tuple[int, Tensor]] = field(default_factory=OrderedDict)
    """Lists of keys by their digest, each with the first key of its piece."""
    _list_bytes: int = 0

    # Numbers of requests.

    def mark_done(self, number: int) -> None:
        """Record that a request has had its effect."""
        if number > self.applied:
            self.ahead.add(number)
            self._catch_up()

    def acknowledge(self, acked: int) -> list[OutgoingReply]:
        """Record that the client has all replies up to a number; return those that are no longer needed."""
        if acked <= self.acked:
            return []
        if acked > self.acked + protocol.REPLY_SLOTS:
            raise ProtocolError(f"replies up to {acked} are acknowledged, and those after {self.acked} were due")
        self.acked = acked
        if acked > self.applied:  # the client was told of a request that could not be read here
            self.applied = acked
            self.ahead = {number for number in self.ahead if number > acked}
            self._catch_up()
        return [self.replies.pop(number) for number in list(self.replies) if number <= acked]

    def _catch_up(self) -> None:
        while self.applied + 1 in self.ahead:
            self.applied += 1
            self.ahead.discard(self.applied)

    def knows(self, number: int) -> bool:
        """Whether a request has arrived before."""
        return number <= self.applied or number in self.ahead or number in self.deferred

    def expects(self, number: int) -> bool:
        """Whether a request may have this number: it is not acknowledged, and not too far ahead."""
        return self.acked < number <= self.acked + protocol.REPLY_SLOTS

    def check_number(self, number: int) -> None:
        """Raise a `ProtocolError` if a client has more requests in flight than are kept for it."""
        if not self.expects(number):
            raise ProtocolError(
                f"request {number} where those after {self.acked} were due, and at most {protocol.REPLY_SLOTS} at "
                "once: wait for replies first"
            )

    def keep(self, reply: OutgoingReply) -> OutgoingReply:
        """Keep a reply until the client acknowledges it."""
        if self.expects(reply.header.number):
            self.replies[reply.header.number] = reply
        return reply

    def forget(self) -> None:
        """Drop everything that is kept for a client that is gone."""
        self.deferred.clear()
        self.replies.clear()
        self.key_lists.clear()
        self._list_bytes, self.view, self._seen = 0, None, None

    # Requests about values.

    def check(self, header: RequestHeader, body: Tensor, handlers: int) -> None:
        """Raise a `ProtocolError` if a request contradicts itself or the space. `handlers`: how many are known."""
        description, flags = self.shard.description, header.flags
        if header.dtype != protocol.FLOAT32:
            raise ProtocolError(f"values of type {header.dtype}, and a space holds float32 (type {protocol.FLOAT32})")
        if header.count > description.piece:
            raise ProtocolError(f"{header.count} keys in one request; a piece has at most {description.piece}")
        self.shard.check(header.first, 0 if flags & LISTED else header.count)
        pushes = header.kind != protocol.PULL
        due = (8 * header.count if flags & protocol.KEYS else 0) + (
            4 * header.count if pushes and not flags & CODED else 0
        )
        any_length = pushes and bool(flags & CODED)
        if body.numel() < due or (body.numel() > due and not any_length):
            raise ProtocolError(f"{body.numel()} B where {header.count} keys and values take {due} B")
        if header.handler > handlers:
            raise ProtocolError(f"handler {header.handler} was never looked up: {handlers} were")
        if flags & protocol.TICK and not self.worker:
            raise ProtocolError(f"member {self.member} observes, and has no clock to advance")
        if flags & protocol.TICK and not pushes:
            raise ProtocolError("a read cannot end a step: only a push ticks")
        if not math.isfinite(header.scale) or math.isinf(header.rate):
            raise ProtocolError(f"scale={header.scale} and rate={header.rate}: both are finite numbers")
        if flags & (protocol.ENCODED | protocol.ENCODE_REPLY) and description.codec is None:
            raise ProtocolError("encoded values in a space without a codec")
        if (flags & CODED) == CODED or (flags & LISTED and flags & (protocol.ENCODE_REPLY | protocol.FACTORS)):
            raise ProtocolError(f"flags {flags:#x} contradict each other")
        if header.state_slot and flags & (LISTED | CODED | protocol.ENCODE_REPLY | protocol.TICK):
            raise ProtocolError("optimizer state is read and written in plain ranges")

    def find_keys(self, request: DeferredRequest) -> bool:
        """Set a request's list of keys, from its body or from memory; False if the client must send the list."""
        header, shard = request.header, self.shard
        if not header.flags & LISTED or request.keys is not None:
            return True
        if not header.flags & protocol.KEYS:
            request.keys = self._recall_list(header.digest, header.first, header.count)
            return request.keys is not None
        edges, nbytes = shard.description.layout.edges, 8 * header.count
        at = bisect_right(edges, header.first)
        end = min(edges[at], shard.end) if at < len(edges) else shard.end
        keys = request.body[:nbytes].view(torch.int64) if nbytes else torch.empty(0, dtype=torch.int64)
        request.keys, request.body = check_keys(keys, max(header.first, shard.first), end), request.body[nbytes:]
        if header.flags & protocol.CACHED:
            self._remember_list(header.digest, header.first, request.keys)
        return True

    def make_push(self, request: DeferredRequest, handlers: list[str]) -> Push:
        """The push of a request, with decoded values."""
        header = request.header
        if header.flags & protocol.FACTORS:
            values = torch.empty(header.count, dtype=torch.float32)
            unpack_and_multiply(request.body, values)
        elif header.flags & protocol.ENCODED:
            codec = self.shard.description.built_codec
            assert codec is not None, "checked"
            values = codec.decode(request.body, torch.empty(header.count, dtype=torch.float32), step=header.seed)
        else:
            values = request.body.view(torch.float32)
        handler = handlers[header.handler - 1] if header.handler else None
        rate = None if math.isnan(header.rate) else header.rate
        return Push(header.first, values, request.keys, rate, header.scale, handler, header.state_slot)

    def may_write_back(self, header: RequestHeader) -> bool:
        """Whether the new weights may replace the pushed values, which are needed no more; no clock is waited for."""
        plain = header.kind == protocol.PUSH_PULL and header.min_clock < 0 and not header.flags & ~protocol.TICK
        return plain and not self.shard.description.keeps_pushes

    def encode_changes(self, header: RequestHeader) -> tuple[Tensor, bool]:
        """Encode the change since the client's view; what the codec loses stays in the next change.

        Values that the client has never received, and values with NaN or Inf, are sent exactly. Returns the body and
        whether it is exact.
        """
        shard, codec = self.shard, self.shard.description.built_codec
        assert codec is not None, "checked"
        if self.view is None or self._seen is None or self._version != shard.version:
            self._version = shard.version
            self.view = torch.zeros_like(shard.weights)
            self._seen = torch.zeros(shard.weights.numel(), dtype=torch.bool)
        part = slice(header.first - shard.first, header.first - shard.first + header.count)
        weights, view, seen = shard.weights[part], self.view[part], self._seen[part]
        if bool(seen.all()):
            try:
                payload = codec.encode(weights - view, RngKey(0, header.seed, self.member, start=header.first))
                codec.decode(payload, view, accumulate=True, step=header.seed)
                return payload, False
            except DivergedError:
                pass  # not finite: sent exactly
        seen.fill_(True)
        view.copy_(weights)
        return weights.clone().view(torch.uint8), True

    # Lists of keys.

    def _remember_list(self, digest: int, first: int, keys: Tensor) -> None:
        """Keep a list under its digest, and drop the oldest lists beyond the limits."""
        self._forget_list(digest)
        self.key_lists[digest] = first, keys.clone()
        self._list_bytes += 8 * keys.numel()
        while len(self.key_lists) > protocol.MAX_CACHED_KEY_LISTS or self._list_bytes > MAX_KEY_LISTS_BYTES:
            self._forget_list(next(iter(self.key_lists)))

    def _forget_list(self, digest: int) -> None:
        forgotten = self.key_lists.pop(digest, None)
        if forgotten is not None:
            self._list_bytes -= 8 * forgotten[1].numel()

    def _recall_list(self, digest: int, first: int, count: int) -> Tensor | None:
        """The list of a digest; None if it is not remembered."""
        if digest not in self.key_lists:
            return None
        self.key_lists.move_to_end(digest)
        known_first, keys = self.key_lists[digest]
        if known_first != first or keys.numel() != count:
            raise ProtocolError(
                f"{count} values from key {first} on, for a list of {keys.numel()} keys from {known_first} on: send "
                "the keys"
            )
        return keys
