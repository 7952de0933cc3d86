"""From a request's bytes to an update, or to what is read: everything is checked before anything is changed."""

from __future__ import annotations

import math
from bisect import bisect_right

import torch
from torch import Tensor

from syncline.codecs import RngKey
from syncline.errors import DivergedError, ProtocolError
from syncline.server import protocol
from syncline.server.factors import unpack_and_multiply
from syncline.server.layout import check_keys
from syncline.server.protocol import Request
from syncline.server.sessions import Parked, Session
from syncline.server.space import Push

__all__ = ["answers_itself", "check", "encode_changes", "find_keys", "make_push"]

LISTED = protocol.KEYS | protocol.CACHED
ODD = protocol.ENCODED | protocol.FACTORS
"""Flags of values whose length does not follow from their count."""


def check(session: Session, request: Request, body: Tensor, handlers: int) -> None:
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


def find_keys(session: Session, parked: Parked) -> bool:
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


def answers_itself(session: Session, request: Request) -> bool:
    """Whether what is read can take the place of what was pushed: nobody else needs that, nor waits for anything."""
    plain = request.kind == protocol.PUSH_PULL and request.wanted < 0 and not request.flags & ~protocol.TICK
    return plain and not session.space.description.keeps


def make_push(session: Session, parked: Parked, handlers: list[str]) -> Push:
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


def encode_changes(session: Session, request: Request) -> tuple[Tensor, bool]:
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
