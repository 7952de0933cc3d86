"""What a server knows of one client of one space: its requests, its replies, and its key lists."""

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

__all__ = [
    "ClientSession",
    "DeferredRequest",
    "OutgoingReply",
    "answers_itself",
    "check",
    "encode_changes",
    "find_keys",
    "make_push",
]

MOST_LIST_BYTES = 64 << 20


@dataclass(frozen=True)
class OutgoingReply:
    """A reply to send, and its body. `lossy`: the client asks again where it is lost."""

    member: int
    reply: ReplyHeader
    body: Tensor | None = None
    lossy: bool = False


@dataclass
class DeferredRequest:
    """A request that waits for earlier ones, or for the others' clocks."""

    request: RequestHeader
    body: Tensor
    keys: Tensor | None = None
    """The list that it names, once it was looked up: the server may forget lists meanwhile."""
    pushed: bool = False
    answered: bool = False
    """Its body is already what is read."""
    late: bool = False
    staleness: int = -1


@dataclass
class ClientSession:
    """A client of one space, and what it has been answered."""

    member: int
    space: ParameterShard
    worker: bool
    applied: int = 0
    """All requests up to this number are done with, as far as they change anything."""
    ahead: set[int] = field(default_factory=set)
    answers: dict[int, OutgoingReply] = field(default_factory=dict)
    parked: dict[int, DeferredRequest] = field(default_factory=dict)
    acked: int = 0
    view: Tensor | None = None
    """What the client has, where answers are encoded: they tell what changed."""
    seen: Tensor | None = None
    """Which keys of it are the client's already."""
    edition: int = 0
    """The version of the space's weights that the view belongs to."""
    lists: OrderedDict[int, tuple[int, Tensor]] = field(default_factory=OrderedDict)
    """Lists of keys by their digest, each with the first key of its piece."""
    list_bytes: int = 0
    left: bool = False

    def done(self, number: int) -> None:
        """A request has changed what it changes."""
        if number > self.applied:
            self.ahead.add(number)
            self._catch_up()

    def acknowledge(self, acked: int) -> list[OutgoingReply]:
        """The client has all answers up to there; those that nobody will ask for again."""
        if acked <= self.acked:
            return []
        if acked > self.acked + protocol.SLOTS:
            raise ProtocolError(f"answers up to {acked} are said to be there, and those after {self.acked} were due")
        self.acked = acked
        if acked > self.applied:  # it was told of one that could not be read here
            self.applied = acked
            self.ahead = {number for number in self.ahead if number > acked}
            self._catch_up()
        return [self.answers.pop(number) for number in list(self.answers) if number <= acked]

    def _catch_up(self) -> None:
        while self.applied + 1 in self.ahead:
            self.applied += 1
            self.ahead.discard(self.applied)

    def knows(self, number: int) -> bool:
        """Whether a request came before."""
        return number <= self.applied or number in self.ahead or number in self.parked

    def expects(self, number: int) -> bool:
        """Whether a request may have this number: one that is not answered yet, and not too far ahead."""
        return self.acked < number <= self.acked + protocol.SLOTS

    def check_number(self, number: int) -> None:
        """Refuse what no client of ours sends: more under way than is kept for one."""
        if not self.expects(number):
            raise ProtocolError(
                f"request {number} where those after {self.acked} were due, and at most {protocol.SLOTS} at "
                "once: wait for answers first"
            )

    def keep(self, answer: OutgoingReply) -> OutgoingReply:
        """Remember what was answered, until the client has it."""
        if self.expects(answer.reply.number):
            self.answers[answer.reply.number] = answer
        return answer

    # Lists of keys.

    def remember_list(self, digest: int, first: int, keys: Tensor) -> None:
        """Keep a list under its digest; the oldest ones go."""
        self.forget_list(digest)
        self.lists[digest] = first, keys.clone()
        self.list_bytes += 8 * keys.numel()
        while len(self.lists) > protocol.MAX_CACHED_KEY_LISTS or self.list_bytes > MOST_LIST_BYTES:
            self.forget_list(next(iter(self.lists)))

    def forget_list(self, digest: int) -> None:
        found = self.lists.pop(digest, None)
        if found is not None:
            self.list_bytes -= 8 * found[1].numel()

    def find_list(self, digest: int, first: int, count: int) -> Tensor | None:
        """The list of a digest; None where it is not known, or no more."""
        if digest not in self.lists:
            return None
        self.lists.move_to_end(digest)
        where, keys = self.lists[digest]
        if where != first or keys.numel() != count:
            raise ProtocolError(
                f"{count} values from key {first} on, for a list of {keys.numel()} keys from {where} on: send the keys"
            )
        return keys

    def forget(self) -> None:
        """The client is gone: nothing is kept for it."""
        self.parked.clear()
        self.answers.clear()
        self.lists.clear()
        self.list_bytes, self.view, self.seen = 0, None, None


LISTED = protocol.KEYS | protocol.CACHED
ODD = protocol.ENCODED | protocol.FACTORS
"""Flags of values whose length does not follow from their count."""


def check(session: ClientSession, request: RequestHeader, body: Tensor, handlers: int) -> None:
    """Refuse what cannot be. `handlers`: how many were looked up."""
    description, flags = session.space.description, request.flags
    if request.dtype != protocol.FLOAT32:
        raise ProtocolError(f"values of type {request.dtype}, and a space holds float32 (type {protocol.FLOAT32})")
    if request.count > description.piece:
        raise ProtocolError(f"{request.count} keys in one request; a piece has {description.piece} at most")
    session.space.check(request.first, 0 if flags & LISTED else request.count)
    pushes = request.kind != protocol.PULL
    due = (8 * request.count if flags & protocol.KEYS else 0) + (4 * request.count if pushes and not flags & ODD else 0)
    free = pushes and bool(flags & ODD)
    if body.numel() < due or (body.numel() > due and not free):
        raise ProtocolError(f"{body.numel()} B where {request.count} keys and values take {due} B")
    if request.handler > handlers:
        raise ProtocolError(f"handler {request.handler} was never looked up: {handlers} were")
    if flags & protocol.TICK and not session.worker:
        raise ProtocolError(f"member {session.member} watches, and has no clock to advance")
    if flags & protocol.TICK and not pushes:
        raise ProtocolError("a read does not end a step: only a push ticks")
    if not math.isfinite(request.scale) or math.isinf(request.rate):
        raise ProtocolError(f"scale={request.scale} and rate={request.rate}: both are finite numbers")
    if flags & (protocol.ENCODED | protocol.ANSWER_ENCODED) and description.codec is None:
        raise ProtocolError("values in a codec, in a space that has none")
    if (flags & ODD) == ODD or (flags & LISTED and flags & (protocol.ANSWER_ENCODED | protocol.FACTORS)):
        raise ProtocolError(f"flags {flags:#x} do not go together")
    if request.plane and flags & (LISTED | ODD | protocol.ANSWER_ENCODED | protocol.TICK):
        raise ProtocolError("a rule's state is read and written as it is, by ranges")


def find_keys(session: ClientSession, parked: DeferredRequest) -> bool:
    """Look up the list of keys that a request names, and cut it off its body; False where the client must send it."""
    request, space = parked.request, session.space
    if not request.flags & LISTED or parked.keys is not None:
        return True
    if not request.flags & protocol.KEYS:
        parked.keys = session.find_list(request.digest, request.first, request.count)
        return parked.keys is not None
    edges, rows = space.description.layout.edges, 8 * request.count
    at = bisect_right(edges, request.first)
    after = min(edges[at], space.after) if at < len(edges) else space.after
    keys = parked.body[:rows].view(torch.int64) if rows else torch.empty(0, dtype=torch.int64)
    parked.keys, parked.body = check_keys(keys, max(request.first, space.first), after), parked.body[rows:]
    if request.flags & protocol.CACHED:
        session.remember_list(request.digest, request.first, parked.keys)
    return True


def answers_itself(session: ClientSession, request: RequestHeader) -> bool:
    """Whether what is read can take the place of what was pushed: nobody else needs that, nor waits for anything."""
    plain = request.kind == protocol.PUSH_PULL and request.wanted < 0 and not request.flags & ~protocol.TICK
    return plain and not session.space.description.keeps


def make_push(session: ClientSession, parked: DeferredRequest, handlers: list[str]) -> Push:
    """The update that a request brings."""
    request = parked.request
    if request.flags & protocol.FACTORS:
        values = torch.empty(request.count, dtype=torch.float32)
        unpack_and_multiply(parked.body, values)
    elif request.flags & protocol.ENCODED:
        codec = session.space.description.build_codec()
        assert codec is not None, "checked"
        values = codec.decode(parked.body, torch.empty(request.count, dtype=torch.float32), step=request.seed)
    else:
        values = parked.body.view(torch.float32)
    handler = handlers[request.handler - 1] if request.handler else None
    rate = None if math.isnan(request.rate) else request.rate
    return Push(request.first, values, parked.keys, rate, request.scale, handler, request.plane)


def encode_changes(session: ClientSession, request: RequestHeader) -> tuple[Tensor, bool]:
    """What changed since the client's view, encoded: what the codec loses stays in the difference.

    What the client sees for the first time is exact, and what holds NaN or Inf, which codecs cannot encode; whether
    this is.
    """
    space, codec = session.space, session.space.description.build_codec()
    assert codec is not None, "checked"
    if session.view is None or session.edition != space.edition:
        session.edition = space.edition
        session.view = torch.zeros_like(space.weights)
        session.seen = torch.zeros(space.weights.numel(), dtype=torch.bool)
    assert session.seen is not None, "made with the view"
    low, high = request.first - space.first, request.first - space.first + request.count
    weights, view, seen = space.weights[low:high], session.view[low:high], session.seen[low:high]
    if bool(seen.all()):
        try:
            payload = codec.encode(weights - view, RngKey(0, request.seed, session.member, start=request.first))
            codec.decode(payload, view, accumulate=True, step=request.seed)
            return payload, False
        except DivergedError:
            pass  # sent exactly, as without a codec
    seen.fill_(True)
    view.copy_(weights)
    return weights.clone().view(torch.uint8), True
