"""Receives, matched in the order they were posted, with the length of the message known first.

MPI's plain receive cuts a long message short at best: Open MPI 5.0 reports the error after it has written all of it,
far past the buffer. A *matched probe* takes a message out of MPI's queue before it is received, tells its length, and
nobody else can take it any more::

    recv ───► expected ─┐ the first that fits
                        ├──► receive into its buffer, or refuse
    Improbe ─► found ───┘ asked for only where a receive waits that fits

A receive that is given up was never MPI's, so that the message that comes later goes to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.transports.base import format_bytes, mismatch_hint
from syncline.transports.mailbox import LIMIT
from syncline.transports.memory import describe_recv, tag_name
from syncline.transports.mpi.engine import byte_spec, mpi_tag

if TYPE_CHECKING:
    from syncline.transports.mpi.transport import MpiTransport

__all__ = ["Expected", "Inbox"]


@dataclass(eq=False, slots=True)
class Expected:
    """A receive that waits for its message, then for its bytes."""

    data: Tensor
    wanted: int | None
    tag: int
    exact: bool
    source: int = -1
    nbytes: int = 0
    request: Any = None
    matched: bool = False
    error: Exception | None = None
    outgoing: bool = False

    def over(self) -> bool:
        """Whether the bytes are there, or never come."""
        return self.matched and (self.request is None or bool(self.request.Test()))


@dataclass(eq=False, slots=True)
class _Found:
    message: Any
    source: int
    nbytes: int


class Inbox:
    """One channel's receives of unknown length."""

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._mpi = transport.engine.mpi
        self._lock = transport.runtime.lock()
        self._expected: dict[int, list[Expected]] = {}
        self._status = self._mpi.Status()
        self._attended = False

    def post(self, data: Tensor, wanted: int | None, tag: int, exact: bool) -> Expected:
        """Expect a message: the earliest that fits, now or later."""
        expected = Expected(data, wanted, tag, exact)
        with self._lock:
            self._expected.setdefault(tag, []).append(expected)
            self._pump_tag(tag)
            first, self._attended = not self._attended, True
        if first:
            self._transport.engine.attend(self)
        return expected

    def withdraw(self, expected: Expected) -> bool:
        """Take a receive back that was given up; False if its message has come meanwhile."""
        with self._lock:
            if expected.matched:
                return False
            self._expected[expected.tag].remove(expected)
            return True

    def pump(self) -> None:
        """Match what has come."""
        if self._expected:
            with self._lock:
                for tag in tuple(self._expected):
                    self._pump_tag(tag)

    def close(self) -> None:
        """Expect nothing more."""
        self._transport.engine.rest(self)
        with self._lock:
            for waiting in self._expected.values():
                for each in waiting:
                    pending = describe_recv(self._transport, each.wanted, each.tag, each.data.numel())
                    each.error, each.matched = self._transport.failure(each.wanted, pending, 0.0, None), True
            self._expected.clear()

    def _pump_tag(self, tag: int) -> None:
        expected = self._expected[tag]
        try:
            while expected and self._probe(tag, expected):
                pass
        except self._mpi.Exception as error:
            for each in expected:
                pending = describe_recv(self._transport, each.wanted, tag, each.data.numel())
                each.error, each.matched = self._transport.failure(each.wanted, pending, 0.0, error), True
            expected.clear()
        if not expected:
            del self._expected[tag]

    def _probe(self, tag: int, expected: list[Expected]) -> bool:
        """Take what has come; False when there was nothing."""
        # With an "anyone" among them only one question keeps the order: whose message is the next?
        asked = {each.wanted for each in expected}
        any_found = False
        for source in (None,) if None in asked else asked:
            peer = self._mpi.ANY_SOURCE if source is None else source
            message = self._transport.comm.Improbe(peer, mpi_tag(tag), self._status)
            if message is not None:
                any_found = True
                found = _Found(message, self._status.source, self._status.Get_elements(self._mpi.BYTE))
                first = next(each for each in expected if each.wanted in (None, found.source))
                expected.remove(first)
                self._start(first, found)
        return any_found

    def _start(self, expected: Expected, found: _Found) -> None:
        length, room = found.nbytes, expected.data.numel()
        expected.source, expected.nbytes = found.source, length
        if length > room or (expected.exact and length < room):
            expected.error = ProtocolError(
                f"rank {found.source} sent {format_bytes(length)} ({tag_name(expected.tag)}) where "
                f"{'exactly' if expected.exact else 'at most'} {format_bytes(room)} were due"
                f"{mismatch_hint(expected.tag)}",
                peer=found.source,
            )
        # One too long is taken off the wire too, so that its sender does not hang; unless it is longer than anything
        # that may lie here unasked for.
        if length <= max(room, LIMIT):
            buffer = expected.data[:length] if length <= room else torch.empty(length, dtype=torch.uint8)
            expected.request = found.message.Irecv(byte_spec(self._transport.engine, buffer, length))
        expected.matched = True
