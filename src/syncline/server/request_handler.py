"""What a server does with a request: reply, defer, or refuse. There is no transport here, and nothing blocks.

::

    request ─► known client? new number? ─► earlier requests done? ─► push ─► may it read? ─► reply
                  │            └ repeated: the same reply   └ no: deferred     └ no: deferred, until a clock advances
                  └ no: refused

A client numbers its requests to a server from 1 on, and reports up to which number it has the replies. So the server
recognises repeated requests, and what it keeps for a client is bounded::

    numbers    1   2   3   4   5   6   7   8   9   …        acked + REPLY_SLOTS
               └ acked ┘       │       │   └ deferred: it waits for earlier requests, or for clocks
                               │       └ ahead: done before an earlier one
                               └ applied: all requests up to here have had their effect

Control requests, which are not about values, are small JSON objects. Every field is checked.
"""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import RngKey
from syncline.errors import DivergedError, ProtocolError, SynclineError
from syncline.runtime import Lock
from syncline.server import protocol
from syncline.server.factors import unpack_and_multiply
from syncline.server.protocol import ReplyHeader, RequestHeader, bytes_tensor, json_body
from syncline.server.rules.handlers import find_handler
from syncline.server.shard import BUILTIN_HANDLERS, ParameterShard, Push
from syncline.server.space import SpaceDescription, check_keys
from syncline.server.sub_master import AggregatingShard

__all__ = ["ClientSession", "OutgoingReply", "ReplyBuffers", "RequestHandler", "refuse"]

logger = logging.getLogger("syncline")

MAX_SPACES = 64
MAX_POOLED_BYTES = 64 << 20
MAX_KEY_LISTS_BYTES = 64 << 20
"""Limit of the lists of keys that are remembered for one client."""
MAX_CLOCK = 1 << 48
MAX_STATE_NAMES = 64
LISTED = protocol.KEYS | protocol.CACHED
"""Flags of requests with a list of keys."""
CODED = protocol.ENCODED | protocol.FACTORS
"""Flags of values whose length does not follow from their count."""


class ReplyBuffers:
    """Reuses byte buffers, because fresh memory costs a page fault for every 4 KiB. Several tasks may use it.

    Sizes are rounded up to powers of two, so that requests of many different lengths share buffers.

    >>> pool = ReplyBuffers()
    >>> buffer = pool.take(900_000)
    >>> pool.give_back(buffer)
    >>> pool.take(1_000_000).data_ptr() == buffer.data_ptr()
    True
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = nullcontext() if lock is None else lock
        self._free: dict[int, list[Tensor]] = {}
        self._pooled_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """An uninitialised buffer."""
        if nbytes <= protocol.MAX_INLINE_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = _round_up(nbytes)
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
            if buffer is not None:
                self._pooled_bytes -= size
        return (torch.empty(size, dtype=torch.uint8) if buffer is None else buffer)[:nbytes]

    def give_back(self, buffer: Tensor | None) -> None:
        """Return a buffer that is no longer used. Tensors that are not from a pool are ignored."""
        if buffer is None or buffer.numel() <= protocol.MAX_INLINE_BYTES:
            return
        memory, size = buffer.untyped_storage(), _round_up(buffer.numel())
        if memory.nbytes() != size or buffer.storage_offset() or buffer.dtype != torch.uint8:
            return
        with self._lock:
            if self._pooled_bytes + size <= MAX_POOLED_BYTES:
                self._pooled_bytes += size
                self._free.setdefault(size, []).append(torch.empty(0, dtype=torch.uint8).set_(memory))


def _round_up(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


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
        if number == self.applied + 1 and not self.ahead:
            self.applied = number
        elif number > self.applied:
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

    def is_new(self, number: int) -> bool:
        """Whether a request arrives for the first time. A client must wait before it has too many in flight."""
        if number <= self.applied or number in self.ahead or number in self.deferred:
            return False
        if not self.expects(number):
            raise ProtocolError(
                f"request {number} where those after {self.acked} were due, and at most {protocol.REPLY_SLOTS} at "
                "once: wait for replies first"
            )
        return True

    def expects(self, number: int) -> bool:
        """Whether a request may have this number: it is not acknowledged, and not too far ahead."""
        return self.acked < number <= self.acked + protocol.REPLY_SLOTS

    def keep(self, reply: OutgoingReply) -> OutgoingReply:
        """Keep a reply until the client acknowledges it."""
        if self.expects(reply.header.number):
            self.replies[reply.header.number] = reply
        return reply

    # Snapshots, for a copy of the session on another server.

    def snapshot(self) -> dict[str, Any]:
        """The state of the session. Its tensors are those of the session."""
        return {
            "member": self.member,
            "space": self.shard.description.space_id,
            "worker": self.worker,
            "applied": self.applied,
            "ahead": sorted(self.ahead),
            "replies": [(tuple(each.header), each.body, each.lossy) for each in self.replies.values()],
            "deferred": [
                (tuple(each.header), each.body, each.keys, each.pushed, each.has_weights, each.late, each.staleness)
                for each in self.deferred.values()
            ],
            "acked": self.acked,
            "left": self.left,
            "view": (self.view, self._seen, self._version),
            "lists": [(digest, *each) for digest, each in self.key_lists.items()],
        }

    @classmethod
    def from_snapshot(cls, state: dict[str, Any], shard: ParameterShard) -> ClientSession:
        """A session that continues like the one whose `snapshot` this is."""
        session = cls(state["member"], shard, state["worker"], state["applied"], set(state["ahead"]))
        session.acked, session.left = state["acked"], state["left"]
        for fields, body, lossy in state["replies"]:
            header = ReplyHeader(*fields)
            session.replies[header.number] = OutgoingReply(session.member, header, body, lossy)
        for fields, *progress in state["deferred"]:
            request = RequestHeader(*fields)
            session.deferred[request.number] = DeferredRequest(request, *progress)
        session.view, session._seen, session._version = state["view"]
        for digest, first, keys in state["lists"]:
            session.key_lists[digest] = first, keys
            session._list_bytes += 8 * keys.numel()
        return session

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


class RequestHandler:
    """The shards of one server. The caller lets one task in at a time, and sends the replies.

    `index_of` gives this server's number among the servers of a space.
    """

    def __init__(
        self,
        index_of: Callable[[SpaceDescription], int],
        pool: ReplyBuffers | None = None,
        workers: Collection[int] = (),
    ) -> None:
        self.shards: dict[int, ParameterShard] = {}
        """By the space's id."""
        self.has_sub_masters = False
        """Whether a shard is, or was, a sub-master's."""
        self._pool = pool or ReplyBuffers()
        self._index_of = index_of
        self.sessions: dict[tuple[int, int], ClientSession] = {}
        """By the space's id and the client's member."""
        self._control = ControlRequests(workers)
        self._early_observers: list[tuple[int, RequestHeader]] = []
        """Observers of spaces that no client has described yet."""
        self._lost: set[int] = set()
        self._some_left = False
        """Whether a client has left, so that a space may be dropped soon."""

    # Snapshots, for a copy of this handler on another server.

    def snapshot(self) -> dict[str, Any]:
        """The state of all spaces and clients. Its tensors are in use: copy them before the next request."""
        return {
            "spaces": [(shard.description.to_json().decode(), shard.snapshot()) for shard in self.shards.values()],
            "sessions": [session.snapshot() for session in self.sessions.values()],
            "handlers": list(self._control.handlers),
            "observers": [(member, tuple(header)) for member, header in self._early_observers],
            "lost": sorted(self._lost),
            "some_left": self._some_left,
        }

    def load_snapshot(self, state: dict[str, Any]) -> None:
        """Continue like the handler whose `snapshot` this is. The tensors belong to this handler from now on."""
        self.shards.clear()
        for text, content in state["spaces"]:
            description = SpaceDescription.from_json(text.encode())
            shard = ParameterShard(description, self._index_of(description))
            shard.load_snapshot(content)
            self.shards[description.space_id] = shard
        self.sessions = {
            (each["space"], each["member"]): ClientSession.from_snapshot(each, self.shards[each["space"]])
            for each in state["sessions"]
        }
        self._control.handlers = [str(name) for name in state["handlers"]]
        self._early_observers = [(member, RequestHeader(*fields)) for member, fields in state["observers"]]
        self._lost, self._some_left = set(state["lost"]), state["some_left"]

    # Requests.

    def handle(self, member: int, header: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        """Handle a request, and return all replies that are ready now, to this client and to others."""
        try:
            replies = self._handle(member, header, body)
        except Exception as error:  # a user's handler may raise anything, and the server must continue
            replies = [self._refuse_failed(member, header, error)]
        return self._continue(replies)

    def reject(self, member: int, header: RequestHeader, reason: str) -> list[OutgoingReply]:
        """Refuse a request whose body was not received."""
        return self._continue([self._refuse_failed(member, header, ProtocolError(reason))])

    def _continue(self, replies: list[OutgoingReply]) -> list[OutgoingReply]:
        replies += self._handle_deferred()
        if self._some_left:
            self._drop_left_spaces()
        return replies

    def _refuse_failed(self, member: int, header: RequestHeader, error: Exception) -> OutgoingReply:
        reason = str(error) if isinstance(error, SynclineError) else f"{type(error).__name__}: {error}"
        reply, session = refuse(member, header, reason), self.sessions.get((header.space, member))
        if session is not None and session.expects(header.number):
            if session.worker:
                self._end_refused_step(session, header)
                clock = session.shard.clocks.of[member]
                reply = replace(reply, header=reply.header._replace(min_clock=clock))
            session.mark_done(header.number)
            if header.number not in session.replies:
                session.keep(reply)
        return reply

    @staticmethod
    def _end_refused_step(session: ClientSession, header: RequestHeader) -> None:
        """End a step whose last part is refused, because other servers may have applied their parts."""
        shard, member, clock = session.shard, session.member, header.clock
        if not header.flags & protocol.TICK or shard.clocks.of[member] != clock or shard.is_far_ahead(clock):
            return
        try:
            if shard.is_late(member, clock):
                shard.skip(member)
            else:
                shard.tick(member, clock)
        except Exception as error:  # of a user's rule, about other workers' pushes; this request is refused already
            logger.warning("space %r: step %d is not applied: %s", shard.description.name, clock, error)

    def _handle(self, member: int, header: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        if header.kind == protocol.HELLO:
            return self._hello(member, header, body)
        session = self.sessions.get((header.space, member))
        if session is None:
            raise ProtocolError(
                f"member {member} is unknown in space {header.space:#010x}: it has not said hello, or the space "
                "is another model's"
            )
        if session.shard.orphan_reason:
            return [self._reply_orphaned(session, header)]
        repeated = self._replies_if_repeated(session, header)
        if repeated is not None:
            return repeated
        request = DeferredRequest(header, body)
        if header.kind in (protocol.PUSH, protocol.PULL, protocol.PUSH_PULL):
            session.check(header, body, len(self._control.handlers))
        if header.after > session.applied:
            session.deferred[header.number] = request
            return []
        return self._serve(session, request)

    def _replies_if_repeated(self, session: ClientSession, header: RequestHeader) -> list[OutgoingReply] | None:
        """The replies to a request that has arrived before; None for a new one."""
        number = header.number
        if header.acked >= number or header.after >= number:
            raise ProtocolError(f"request {number} claims to follow {max(header.acked, header.after)}")
        for old in session.acknowledge(header.acked):
            self._pool.give_back(old.body)
        if number in session.replies:
            return [session.replies[number]]
        return None if session.is_new(number) else []

    def _serve(self, session: ClientSession, request: DeferredRequest) -> list[OutgoingReply]:
        header, shard = request.header, session.shard
        if header.kind == protocol.BYE:
            return [self._leave(session, header)]
        if header.kind == protocol.CONTROL:
            body = self._control.handle(session, request.body)
            session.mark_done(header.number)
            return [self._reply(session, header, body)]
        if not session.find_keys(request):
            reply = ReplyHeader(protocol.NEED_KEYS, space=header.space, number=header.number)
            return [OutgoingReply(session.member, reply, lossy=header.repeats)]
        if header.kind != protocol.PULL and not request.pushed:
            self._push(session, request)
        session.mark_done(header.number)
        if header.kind == protocol.PUSH:
            if not shard.description.keeps_pushes and request.keys is None:
                self._pool.give_back(request.body)
            return [self._reply(session, header, late=request.late, staleness=request.staleness)]
        if header.kind == protocol.PULL:
            shard.skip_to(session.member, header.clock)
        if not shard.may_read(header.min_clock, session.member):
            session.deferred[header.number] = request
            return []
        return [self._read(session, request)]

    def _push(self, session: ClientSession, request: DeferredRequest) -> None:
        """Apply or keep a push, and end the step if this is its last request."""
        header, shard, member = request.header, session.shard, session.member
        ticks = bool(header.flags & protocol.TICK)
        by_rule = session.worker and not header.handler and not header.state_slot
        in_step = ticks or (header.clock >= 0 and by_rule)
        request.late = in_step and shard.is_late(member, header.clock)
        if by_rule:
            shard.begin_step(member)
        request.staleness = shard.staleness(member) if session.worker else -1
        if not request.late:
            if in_step:
                shard.check_step(member, header.clock)
            if header.count:
                push = session.make_push(request, self._control.handlers)
                request.has_weights = shard.push(member, header.clock, push, session.may_write_back(header))
        request.pushed = True
        if ticks and request.late:
            shard.skip(member)
        elif ticks:
            shard.tick(member, header.clock, header.scale)

    def _read(self, session: ClientSession, request: DeferredRequest) -> OutgoingReply:
        header, shard = request.header, session.shard
        staleness, exact = request.staleness, True
        if header.min_clock >= 0 and session.worker:
            own = shard.clocks.of[session.member]
            staleness = max(0, own - min(shard.min_clock, own))
        if header.flags & protocol.ENCODE_REPLY:
            body, exact = session.encode_changes(header)
        elif request.has_weights:
            body = request.body
        elif request.keys is not None:
            body = shard.weights[request.keys - shard.first].view(torch.uint8)
        else:
            values = shard.read(header.state_slot, header.first, header.count)
            keeps_body = shard.description.keeps_pushes or header.flags & protocol.ENCODED
            reuse = request.pushed and request.body.numel() == 4 * header.count and not keeps_body
            body = request.body if reuse else self._pool.take(4 * header.count)
            body.view(torch.float32).copy_(values)
        # A read for an evaluation or a checkpoint waits for no clock; no gradient is computed from it.
        if header.min_clock >= 0 or (header.kind == protocol.PUSH_PULL and not header.handler):
            shard.note_read(session.member)
        return self._reply(session, header, body, request.late, staleness, exact)

    def _reply(
        self,
        session: ClientSession,
        header: RequestHeader,
        body: Tensor | None = None,
        late: bool = False,
        staleness: int = -1,
        exact: bool = True,
    ) -> OutgoingReply:
        shard = session.shard
        reply = ReplyHeader(
            protocol.LATE if late else protocol.OK,
            (protocol.STOP if shard.stopping else 0) | (0 if exact else protocol.REPLY_ENCODED),
            shard.clocks.present,
            0,
            header.space,
            header.number,
            staleness,
            shard.clocks.of[session.member] if late and session.worker else shard.min_clock,
            shard.clocks.total_steps,
            0 if body is None else body.numel(),
        )
        return session.keep(OutgoingReply(session.member, reply, body, header.repeats))

    def _handle_deferred(self) -> list[OutgoingReply]:
        """Handle the deferred requests that are ready now."""
        replies: list[OutgoingReply] = []
        for session in self.sessions.values():
            if session.deferred:
                break
        else:
            return replies
        progress = True
        while progress:
            progress = False
            for session in list(self.sessions.values()):
                for number, request in list(session.deferred.items()):
                    if not self._is_ready(session, request):
                        continue
                    del session.deferred[number]
                    progress = True
                    try:
                        replies += self._serve(session, request)
                    except Exception as error:
                        replies.append(self._refuse_failed(session.member, request.header, error))
        return replies

    @staticmethod
    def _is_ready(session: ClientSession, request: DeferredRequest) -> bool:
        if request.header.after > session.applied:
            return False
        must_push = request.header.kind != protocol.PULL and not request.pushed
        return must_push or session.shard.may_read(request.header.min_clock, session.member)

    # Sub-masters.

    def finish_sum(
        self, shard: AggregatingShard, values: Sequence[tuple[int, Tensor]], stop: bool
    ) -> list[OutgoingReply]:
        """Take the weights that a sub-master's parent has sent, and reply to the workers that wait for them."""
        shard.finish_sum(values)
        shard.stopping |= stop
        return self._continue([])

    def pause_group(self, shard: AggregatingShard) -> list[OutgoingReply]:
        """Note that a sub-master pauses at its parent, unless one of its workers is back."""
        shard.away = shard.all_paused
        return []

    def continue_group(self, shard: AggregatingShard, weights: Tensor, missed: int) -> list[OutgoingReply]:
        """A sub-master's parent waits for it again, after it has missed so many steps: its workers may continue."""
        shard.come_back(weights, missed)
        return self._continue([])

    def orphan(self, shard: ParameterShard, reason: str) -> list[OutgoingReply]:
        """Tell the workers of a sub-master that its parent is lost: now, and whenever they ask."""
        shard.orphan_reason = reason
        replies: list[OutgoingReply] = []
        for session in [each for each in self.sessions.values() if each.shard is shard]:
            deferred, session.deferred = session.deferred, {}
            replies += [self._reply_orphaned(session, each.header) for each in deferred.values()]
        return self._continue(replies)

    def _reply_orphaned(self, session: ClientSession, header: RequestHeader) -> OutgoingReply:
        if header.kind == protocol.BYE:  # clients can still leave
            return self._leave(session, header)
        refusal = refuse(session.member, header, session.shard.orphan_reason)
        session.mark_done(header.number)
        return replace(refusal, header=refusal.header._replace(status=protocol.ORPHANED))

    # Clients that join and leave.

    def _hello(self, member: int, header: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        if not body.numel():
            return self._observe(member, header)
        description = SpaceDescription.from_json(bytes(body.numpy()))
        if description.space_id != header.space:
            raise ProtocolError(f"a hello to space {header.space:#010x} describes {description.name!r}")
        shard = self.shards.get(header.space)
        if shard is None:
            shard = self._make_shard(description)
        elif shard.description != description:
            raise ProtocolError(
                f"space {description.name!r} is another model's: it has {shard.description.numel} keys and rules "
                f"{list(shard.description.rules)}, and member {member} brings {description.numel} and "
                f"{list(description.rules)}"
            )
        session = self._open_session(member, header, shard, member in description.workers)
        replies = [self._reply(session, header)]
        observers, self._early_observers = self._early_observers, []
        for observer, waiting in observers:
            replies += self._observe(observer, waiting)
        return replies

    def _make_shard(self, description: SpaceDescription) -> ParameterShard:
        if len(self.shards) >= MAX_SPACES:
            raise ProtocolError(f"{MAX_SPACES} spaces are open: close one first")
        index = self._index_of(description)
        shard = AggregatingShard(description, index) if description.parent else ParameterShard(description, index)
        for member in self._lost & set(description.workers):
            shard.leave(member)
        self.shards[description.space_id] = shard
        self.has_sub_masters |= bool(description.parent)
        return shard

    def _open_session(self, member: int, header: RequestHeader, shard: ParameterShard, worker: bool) -> ClientSession:
        session = self.sessions.get((header.space, member))
        if session is None:
            session = self.sessions[header.space, member] = ClientSession(member, shard, worker)
        if header.number == session.applied + 1:
            session.mark_done(header.number)
        return session

    def _observe(self, member: int, header: RequestHeader) -> list[OutgoingReply]:
        """Send a space's description to an observer, as soon as the workers have described the space."""
        shard = self.shards.get(header.space)
        if shard is None:
            key = (member, header.space)
            others = [(who, what) for who, what in self._early_observers if (who, what.space) != key]
            self._early_observers = [*others[-MAX_SPACES:], (member, header)]
            return []
        session = self._open_session(member, header, shard, worker=False)
        return [self._reply(session, header, bytes_tensor(shard.description.to_json()))]

    def lose(self, member: int, left: bool = False) -> list[OutgoingReply]:
        """Remove a member that is lost or has left: no read waits for its clock, even if it never joined."""
        self._lost.add(member)
        self._some_left = True
        self._early_observers = [(who, what) for who, what in self._early_observers if who != member]
        self.sessions = {key: each for key, each in self.sessions.items() if each.member != member}
        for shard in self.shards.values():
            shard.leave(member, lost=not left)
        return self._continue([])

    def _leave(self, session: ClientSession, header: RequestHeader) -> OutgoingReply:
        session.mark_done(header.number)
        session.left = self._some_left = True
        if session.worker:
            session.shard.leave(session.member)
        return self._reply(session, header)

    def members_in(self, space_id: int) -> list[int]:
        """Workers and observers that have not left a space."""
        return sorted(
            member
            for (space, member), session in self.sessions.items()
            if space == space_id and not session.left and member not in self._lost
        )

    def slowest(self) -> tuple[int, int] | None:
        """The worker whose step the deferred reads wait for, and its clock; None if no read waits."""
        shards = {id(session.shard): session.shard for session in self.sessions.values() if session.deferred}
        clocks = [shard.clocks for shard in shards.values() if shard.clocks.live]
        training = [(each.of[worker], worker) for each in clocks for worker in each.of if each.trains(worker)]
        return min(training)[::-1] if training else None

    def _drop_left_spaces(self) -> None:
        """Drop the spaces that all their workers have left, and in which no client waits for a reply."""
        for space_id, shard in list(self.shards.items()):
            present = {
                member: session
                for (space, member), session in self.sessions.items()
                if space == space_id and member not in self._lost
            }
            if any(not session.left or session.deferred for session in present.values()):
                continue
            if set(shard.description.workers) - self._lost <= set(present):
                del self.shards[space_id]
                self.sessions = {key: session for key, session in self.sessions.items() if key[0] != space_id}
        self._some_left = bool(self._lost) or any(session.left for session in self.sessions.values())


def refuse(member: int, header: RequestHeader, reason: str) -> OutgoingReply:
    """A reply that says why a request is refused."""
    text = bytes_tensor(reason.encode()[: protocol.MAX_INLINE_BYTES])
    reply = ReplyHeader(protocol.REFUSED, space=header.space, number=header.number, min_clock=-1, length=text.numel())
    return OutgoingReply(member, reply, text, header.repeats)


class ControlRequests:
    """Handles the control requests of all spaces of a server."""

    def __init__(self, workers: Collection[int] = ()) -> None:
        self._workers = frozenset(workers)
        """The workers of the network; if empty, those of the space."""
        self.handlers: list[str] = []
        """The number of a handler is its place here, counted from 1."""

    def handle(self, session: ClientSession, body: Tensor) -> Tensor:
        """Handle a request, or refuse it by a `ProtocolError`; return the body of the reply."""
        try:
            request = json.loads(bytes(body.numpy()))
            action = _ACTIONS.get(str(request["do"])) if isinstance(request, dict) else None
            if action is None:
                raise ProtocolError(f"an unknown control request: {str(request)[:80]}; known are {', '.join(_ACTIONS)}")
            reply = json_body(action(self, session, request))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ProtocolError(f"a control request that cannot be read: {type(error).__name__}: {error}") from None
        if reply.numel() > protocol.MAX_INLINE_BYTES:
            raise ProtocolError(
                f"a reply of {reply.numel()} B to a control request; at most {protocol.MAX_INLINE_BYTES} B are allowed"
            )
        return reply

    def steps(self, session: ClientSession, request: dict[str, Any]) -> Any:
        shard = session.shard
        return {
            "steps": [shard.clocks.of[worker] for worker in sorted(shard.clocks.of)],
            "late": {str(worker): count for worker, count in shard.late_steps.items()},
            "below": shard.group_steps,
        }

    def report_group(self, session: ClientSession, request: dict[str, Any]) -> Any:
        """Store the steps, and the late steps, of each worker of a sub-master."""
        steps = {int(worker): [int(steps), int(late)] for worker, (steps, late) in request["below"].items()}
        known = self._workers or frozenset(session.shard.description.workers)
        if not steps.keys() <= known:
            raise ProtocolError(
                f"member {session.member} reports steps of {str(sorted(steps))[:80]}: a sub-master reports steps of "
                f"workers, which are {str(sorted(known))[:80]}"
            )
        session.shard.group_steps |= {str(worker): each for worker, each in steps.items()}
        return {}

    def stop(self, session: ClientSession, request: dict[str, Any]) -> Any:
        session.shard.stopping = True
        return {}

    def finish(self, session: ClientSession, request: dict[str, Any]) -> Any:
        if session.worker:
            session.shard.leave(session.member)
        return {}

    def pause(self, session: ClientSession, request: dict[str, Any]) -> Any:
        """The worker takes no steps for some time: no read waits for its clock until it joins again."""
        if session.worker:
            session.shard.pause(session.member)
        return {}

    def join(self, session: ClientSession, request: dict[str, Any]) -> Any:
        """Give a client a clock: a worker that joins a job, or continues after a pause."""
        clock, shard = request.get("clock", 0), session.shard
        if not isinstance(clock, int) or not 0 <= clock < MAX_CLOCK:
            raise ProtocolError(f"a clock is an integer, 0 or more, not {str(clock)[:80]}")
        if shard.description.parent and session.member not in shard.clocks.of:
            raise ProtocolError("a worker cannot join the group of a sub-master: leave masters= out")
        if isinstance(shard, AggregatingShard) and shard.away:
            shard.returning = True  # the worker asks again
            return {"clock": 0, "away": True}
        session.worker = True
        return {"clock": shard.join(session.member, clock), "away": False}

    def number_handler(self, session: ClientSession, request: dict[str, Any]) -> Any:
        name = str(request["name"])[:256]
        if name not in self.handlers:
            if name not in BUILTIN_HANDLERS:
                find_handler(name)
            self.handlers.append(name)
        return {"number": self.handlers.index(name) + 1}

    def optimizer_state(self, session: ClientSession, request: dict[str, Any]) -> Any:
        """The names of the rules' state. With `names` in the request these are numbered, which a plain question never
        changes: several workers may read state at the same time.
        """
        if request.get("names") is None:
            return {"names": session.shard.state_names()}
        names = [str(name) for name in request["names"]][:MAX_STATE_NAMES]
        session.shard.number_state(names)
        return {"names": names}

    def change_rules(self, session: ClientSession, request: dict[str, Any]) -> Any:
        specs, groups = request["rules"], len(session.shard.description.rules)
        if not isinstance(specs, list) or len(specs) != groups or not all(isinstance(spec, str) for spec in specs):
            raise ProtocolError(f"{groups} groups of keys have a rule, and {str(specs)[:80]} are to replace them")
        session.shard.change_rules(specs)
        return {}

    def set_clocks(self, session: ClientSession, request: dict[str, Any]) -> Any:
        clocks, workers = request["clocks"], len(session.shard.clocks.of)
        if not isinstance(clocks, list) or len(clocks) != workers:
            raise ProtocolError(f"{workers} workers have a clock here, and {str(clocks)[:80]} is to set them")
        if not all(isinstance(each, int) and 0 <= each < MAX_CLOCK for each in clocks):
            raise ProtocolError(f"a clock is an integer, 0 or more, not one of {str(clocks)[:80]}")
        session.shard.set_clocks(clocks)
        return {}


_ACTIONS: dict[str, Callable[[ControlRequests, ClientSession, dict[str, Any]], Any]] = {
    "steps": ControlRequests.steps,
    "below": ControlRequests.report_group,
    "stop": ControlRequests.stop,
    "finish": ControlRequests.finish,
    "pause": ControlRequests.pause,
    "join": ControlRequests.join,
    "handler": ControlRequests.number_handler,
    "planes": ControlRequests.optimizer_state,
    "clocks": ControlRequests.set_clocks,
    "rules": ControlRequests.change_rules,
}
"""By the request's field `do`, whose values belong to the wire format."""
