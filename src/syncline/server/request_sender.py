"""Carries a client's requests to the servers and brings their answers, each once, whatever the network does.

launch ─► room in the window? ─► number ─► send ─┐
             └ no: finish the oldest             ▼
finish ◄── settle ◄── in place ◄── answer ◄─── server        silence: ask again, all that may be lost
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, SynclineError
from syncline.runtime import Lock
from syncline.server import protocol
from syncline.server.protocol import REPLY_BYTES, ReplyHeader, RequestHeader
from syncline.transports import BytesHandle, Handle, Transport

__all__ = ["PendingRequest", "RequestSender", "ServerConnection"]


class RequestSender:
    """One client's lines to the servers of a space. `settle` is called once for each answer."""

    def __init__(
        self,
        transport: Transport,
        space_id: int,
        servers: tuple[int, ...],
        retry: float | None,
        settle: Callable[[PendingRequest, ReplyHeader], None],
    ) -> None:
        self.lines = [ServerConnection(transport, member, at, space_id) for at, member in enumerate(servers)]
        self.retry = retry
        self.bytes_sent = 0
        self._mark = space_id
        self._settle = settle
        self._runtime = transport.runtime
        self._lock = self._runtime.lock()

    def launch(
        self,
        line: ServerConnection,
        request: RequestHeader,
        body: Tensor,
        out: Tensor | None = None,
        keys: Tensor | None = None,
        view: Tensor | None = None,
    ) -> PendingRequest:
        """Send a request as soon as the window has room."""
        if view is not None:
            self._finish_views(line, request)
        while True:
            with self._lock:
                line.check()
                oldest = line.in_the_way()
                if oldest is None:
                    number = line.next_number()
                    after = number - 1 if request.kind == protocol.BYE else request.after
                    request = request._replace(
                        space=self._mark, number=number, after=after, acked=line.acked, length=body.numel()
                    )
                    flight = PendingRequest(line, request, body, out, self._runtime.lock(), keys=keys, view=view)
                    line.under_way[number] = flight
                    break
            self.finish(oldest)
        self.bytes_sent += body.numel()
        try:
            line.send(flight)
        except Exception as error:
            self._break_off(flight, error)
            raise
        return flight

    def check(self) -> None:
        """Refuse to begin what needs all servers, where one has not answered."""
        for line in self.lines:
            line.check()

    def _finish_views(self, line: ServerConnection, request: RequestHeader) -> None:
        """Encoded answers tell what changed since the one before, so two about the same keys come one by one."""
        first, after = request.first, request.first + request.count
        for other in list(line.under_way.values()):
            there = other.request
            if other.view is not None and there.first < after and first < there.first + there.count:
                self.finish(other)

    def finish(self, flight: PendingRequest) -> None:
        """Wait for the answer of one request."""
        if flight.settled:
            return
        for other in list(flight.line.under_way.values()):
            # A server that has forgotten a list of keys does nothing before it has it again.
            if other.request.number < flight.request.number and other.may_need_keys:
                self.finish(other)
        with flight.lock:
            if flight.settled:
                return
            self._await_answer(flight)
            flight.line.let_go(flight)

    def _await_answer(self, flight: PendingRequest) -> None:
        line = flight.line
        try:
            if line.broken is not None and not flight.arrived:
                line.check()
            reply = line.receive(flight, self.retry, self._ask_again)
            while reply.status == protocol.NEED_KEYS:
                line.resend_with_keys(flight)
                reply = line.receive(flight, self.retry, self._ask_again)
        except Exception as error:
            self._break_off(flight, error)
            return
        try:
            self._settle(flight, reply)
            flight.reply = reply
        except Exception as error:
            flight.error = error
        with self._lock:
            line.finished(flight.request.number)

    def _break_off(self, flight: PendingRequest, error: Exception) -> None:
        flight.line.give_up(flight)
        with self._lock:
            flight.line.break_off(flight.request.number, error)
        flight.error = error

    def _ask_again(self) -> None:
        """What is waited for may hang on an earlier request that was lost, at this server or another."""
        for line in self.lines:
            for flight in list(line.under_way.values()):
                if flight.request.repeats and not flight.settled:
                    line.transmit(flight)

    def under_way(self) -> list[PendingRequest]:
        """All that is not answered yet."""
        return [flight for line in self.lines for flight in list(line.under_way.values())]


def nothing() -> Tensor:
    """The body of a request that has none."""
    return torch.empty(0, dtype=torch.uint8)


MOST_REPLY = REPLY_BYTES + protocol.INLINE
_NOTHING = torch.empty(0, dtype=torch.uint8)


@runtime_checkable
class _Polled(Protocol):
    """A handle that tells without a wait whether its message is here; not every engine's does."""

    def done(self) -> bool: ...


def _is_here(handle: Handle | None) -> bool:
    return isinstance(handle, _Polled) and handle.done()


@dataclass(eq=False)
class PendingRequest:
    """One request and where its answer goes."""

    line: ServerConnection
    request: RequestHeader
    body: Tensor
    """Bytes; kept until the answer is here, to be sent again."""
    out: Tensor | None
    """A row of float32 that the answer fills."""
    lock: Lock
    keys: Tensor | None = None
    """For a server that has forgotten the list."""
    view: Tensor | None = None
    """What the server believes we have, where answers are encoded."""
    reply: ReplyHeader | None = None
    told: bytes = b""
    error: Exception | None = None
    answer: BytesHandle | None = None
    data: Handle | None = None
    sending: list[Handle] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        return self.reply is not None or self.error is not None

    @property
    def arrived(self) -> bool:
        """Whether something was answered, as far as the engine can tell without a wait."""
        return self.settled or (
            self.answer is not None and self.answer.done() and (self.data is None or _is_here(self.data))
        )

    @property
    def reads(self) -> bool:
        """Whether its answer may come long after the server has taken it: reads wait for clocks."""
        return self.request.kind != protocol.PUSH

    @property
    def may_need_keys(self) -> bool:
        """Whether the server may ask for the list that it names."""
        return self.request.flags & (protocol.CACHED | protocol.KEYS) == protocol.CACHED

    def let_go(self) -> None:
        """It is over: others may still know it, and hold no values by that."""
        self.body, self.out, self.keys, self.view = _NOTHING, None, None, None
        self.answer = self.data = None
        self.sending.clear()

    def add_keys(self) -> None:
        """The server has forgotten the list: it goes with the request, under the same number."""
        assert self.keys is not None
        self.body = torch.cat([self.keys.contiguous().view(torch.uint8), self.body])
        self.request = self.request._replace(flags=self.request.flags | protocol.KEYS, length=self.body.numel())


class ServerConnection:
    """What a client has under way at one server."""

    def __init__(self, transport: Transport, member: int, index: int, space: int) -> None:
        self.transport = transport
        self._lane = protocol.lane(space)
        self.member = member
        self.index = index
        self.number = 0
        self.pushed = 0
        """The number of the latest push: reads come after it."""
        self.acked = 0
        self.ticked = 0
        """The number of the latest push that ended a step."""
        self.broken: Exception | None = None
        """Why nothing is sent here any more: an answer did not come, and may come when nobody expects it."""
        self._done: set[int] = set()
        self._wire = transport.runtime.lock()
        """A header and its body go together: another task's body between them would be taken for it."""
        self.under_way: dict[int, PendingRequest] = {}

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def in_the_way(self) -> PendingRequest | None:
        """The oldest request, where no other may be sent before its answer is here."""
        if len(self.under_way) < protocol.WINDOW and self.number - self.acked < protocol.SLOTS:
            return None
        return self.under_way[min(self.under_way)]

    def finished(self, number: int) -> None:
        """An answer has arrived."""
        self.under_way.pop(number, None)
        self._done.add(number)
        while self.acked + 1 in self._done:
            self.acked += 1
            self._done.discard(self.acked)

    def check(self) -> None:
        """Refuse to send where an answer was lost."""
        if self.broken is not None:
            kind = PeerLostError if isinstance(self.broken, PeerLostError) else ProtocolError
            raise kind(
                f"server {self.index} (member {self.member}) is not asked any more, as an answer of its is missing: "
                f"{self.broken}",
                peer=self.member,
            )

    def break_off(self, number: int, error: Exception) -> None:
        """An answer did not come: its number is never acknowledged, so that the server keeps what it may yet send."""
        self.broken = self.broken or error
        self.under_way.pop(number, None)

    def send(self, flight: PendingRequest) -> None:
        """Send a request, and wait for its answer from now on."""
        slot = flight.request.number % protocol.SLOTS
        self._post(flight, slot)
        out = flight.out
        large = out is not None and 4 * out.numel() > protocol.INLINE
        if large and out is not None and flight.view is None and flight.data is None:
            flight.data = self.transport.recv(out, self.member, self._lane + protocol.DATA + slot, exact=True)
        self.transmit(flight)

    def resend_with_keys(self, flight: PendingRequest) -> None:
        """The server has forgotten the list of keys that a request names."""
        with self._wire:
            flight.add_keys()
        self.send(flight)

    def transmit(self, flight: PendingRequest) -> None:
        """Put a request on the wire, perhaps once more."""
        with self._wire:
            if not flight.settled:
                self._put_on_wire(flight)

    def let_go(self, flight: PendingRequest) -> None:
        """A request is over; nobody is sending it once more."""
        with self._wire:
            flight.let_go()

    def _put_on_wire(self, flight: PendingRequest) -> None:
        request, transport = flight.request, self.transport
        header = request.pack()
        if request.length <= protocol.INLINE:
            body = flight.body.numpy().data
            transport.send_bytes((header, body), self.member, protocol.REQUEST, lossy=request.repeats)
        else:
            transport.send_bytes((header,), self.member, protocol.REQUEST)
            flight.sending.append(transport.send(flight.body, self.member, self._lane + protocol.BODY, exact=True))

    def _post(self, flight: PendingRequest, slot: int) -> None:
        flight.answer = self.transport.recv_bytes(MOST_REPLY, self.member, self._lane + protocol.REPLY + slot)

    def receive(self, flight: PendingRequest, retry: float | None, ask_again: Callable[[], None]) -> ReplyHeader:
        """Wait for the answer. Where messages may be lost, `ask_again` is called every `retry` seconds."""
        slot = flight.request.number % protocol.SLOTS
        runtime = self.transport.runtime
        until = runtime.now() + self.transport.timeout
        while True:
            assert flight.answer is not None
            try:
                flight.answer.wait(retry)
            except PeerLostError:
                gone = self.transport.members[self.member] in self.transport.lost()
                if gone or retry is None or runtime.now() >= until:
                    raise
                self._post(flight, slot)
                ask_again()
                continue
            view = flight.answer.data
            reply = ReplyHeader.read(view)
            asked_twice = reply.status == protocol.NEED_KEYS and not flight.may_need_keys
            own = (reply.space, reply.number) == (flight.request.space, flight.request.number)
            if own and not asked_twice:
                return self._take_in(flight, reply, view)
            self._post(flight, slot)  # an answer of long ago, doubled on the way, or of a space with the same tags

    def _take_in(self, flight: PendingRequest, reply: ReplyHeader, view: memoryview) -> ReplyHeader:
        inline = reply.length if reply.length <= protocol.INLINE else 0
        if len(view) != REPLY_BYTES + inline:
            raise ProtocolError(
                f"server {self.index} sent {len(view) - REPLY_BYTES} B with a header that says {inline}",
                peer=self.member,
            )
        if reply.status in (protocol.REFUSED, protocol.ORPHANED, protocol.NEED_KEYS):
            self.give_up(flight)
            flight.told = bytes(view[REPLY_BYTES:])
        elif flight.out is None:
            flight.told = bytes(view[REPLY_BYTES:])
        elif reply.flags & protocol.CODED:
            flight.told = self._payload(flight, reply, view)
        else:
            self._fill(flight, reply, view, flight.out)
        return reply

    def _fill(self, flight: PendingRequest, reply: ReplyHeader, view: memoryview, out: Tensor) -> None:
        if reply.length != 4 * out.numel():
            raise ProtocolError(
                f"server {self.index} answers with {reply.length} B where {4 * out.numel()} B were asked for",
                peer=self.member,
            )
        if reply.length <= protocol.INLINE:
            out.numpy()[:] = np.frombuffer(view, np.float32, out.numel(), REPLY_BYTES)
            return
        if flight.data is None:  # the first of the encoded answers, which is exact
            slot = flight.request.number % protocol.SLOTS
            flight.data = self.transport.recv(out, self.member, self._lane + protocol.DATA + slot, exact=True)
        flight.data.wait()

    def _payload(self, flight: PendingRequest, reply: ReplyHeader, view: memoryview) -> bytes:
        if flight.view is None:
            raise ProtocolError(f"server {self.index} sends an encoded answer that nobody asked for", peer=self.member)
        if reply.length <= protocol.INLINE:
            return bytes(view[REPLY_BYTES:])
        if reply.length > protocol.MOST_BYTES:
            raise ProtocolError(
                f"server {self.index} announces {reply.length} B; {protocol.MOST_BYTES} B are the most",
                peer=self.member,
            )
        buffer = torch.empty(reply.length, dtype=torch.uint8)
        slot = flight.request.number % protocol.SLOTS
        self.transport.recv(buffer, self.member, self._lane + protocol.DATA + slot, exact=True).wait()
        return bytes(buffer.numpy())

    @staticmethod
    def give_up(flight: PendingRequest) -> None:
        """Take the receive back that an answer's body would land in: its memory is the caller's again."""
        if flight.data is not None:
            with suppress(SynclineError):
                flight.data.wait(0.0)
            flight.data = None
