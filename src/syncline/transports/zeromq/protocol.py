"""What two nodes say to each other: small messages at once, large ones when they are wanted.

A message of up to `AT_ONCE` bytes goes with its header, as long as the peer has promised room for it. Any other is
offered, and its bytes stay with the sender until a receive takes it; then they come in parts, straight into place::

    sender                      receiver             sender                      receiver
      │ ── EAGER number, bytes ──► │                   │ ── OFFER number, length ──► │  … until a receive fits
      │                            │                   │ ◄── ACCEPT number, so far ─ │
      │ ◄── CREDIT messages, bytes │ from time to time │ ── PART number, bytes ────► │  as far as accepted
                                                       │ ◄── ACCEPT further ──────── │
                                                       │ ── PART …  ───────────────► │
                                                       │ ◄── DONE number ─────────── │  also when it was too long

So what waits unreceived is bounded on both sides, whatever order the receives come in, and no message waits behind
another that nobody wants yet. A message that its sender gives up stays offered; who accepts it gets GIVEN_UP for an
answer. Nothing here touches a socket: `emit` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError
from syncline.runtime import Event, Runtime
from syncline.transports.base import format_bytes
from syncline.transports.frames import Header, pack_header
from syncline.transports.mailbox import Mailbox, Posted

__all__ = ["BYE", "KINDS", "PING", "CrowdedError", "Link", "Outgoing"]

EAGER, OFFER, ACCEPT, PART, DONE, CREDIT, PING, BYE, GIVEN_UP = range(16, 25)
KINDS = frozenset(range(16, 25))

AT_ONCE = 1 << 16
"""Bytes up to which a message goes with its header."""
ROOM = 1 << 20
"""Bytes of such messages that may wait unreceived at a peer, for each sender."""
ROOM_MESSAGES = 1024
PART_BYTES = 1 << 20
ON_THE_WAY = 4 * PART_BYTES
"""Bytes of a large message that may be under way."""
MOST_OFFERS = 4096
"""Messages offered to one peer that it has not taken: the next send waits."""
NUMBERS = 1 << 32
COUNTED = 1 << 40
"""Messages are counted round, and so are the bytes that went at once: a header has room for no more."""


class Outgoing:
    """A message that the peer has not taken whole."""

    def __init__(self, data: Tensor, channel: int) -> None:
        self.channel = channel
        self.data: Any = data.numpy()
        self.nbytes = data.numel()
        self.sent = 0
        self.settled = False
        self.told = False
        """The peer knows that it was given up."""
        self.error: str = ""
        self.event: Event | None = None

    def settle(self, error: str = "") -> None:
        """It has arrived, or `error` says why it never will."""
        self.error = error
        self.settled = True
        self.data = None
        if self.event is not None:
            self.event.set()


class CrowdedError(Exception):
    """As many messages wait to be taken as may; `oldest` is the one to wait for. It never leaves the transport."""

    def __init__(self, oldest: Outgoing) -> None:
        super().__init__(f"{MOST_OFFERS} messages wait to be taken")
        self.oldest = oldest


class _Incoming:
    """A large message on its way into a receive's buffer."""

    def __init__(self, posted: Posted, nbytes: int) -> None:
        self.posted = posted
        self.place: Any = posted.data.numpy()
        self.nbytes = nbytes
        self.received = 0
        self.accepted = 0


class Link:
    """One node's side of its talk with one peer."""

    def __init__(
        self,
        runtime: Runtime,
        me: int,
        peer: int,
        emit: Callable[[Sequence[Any]], None],
        mailbox: Callable[[int], Mailbox],
    ) -> None:
        self.peer = peer
        self.gone = ""
        """Why nothing more is to be expected of the peer."""
        self.deaf = ""
        """Why the peer takes nothing more; what it has sent before may still come."""
        self._me = me
        self._emit = emit
        self._mailbox = mailbox
        self._lock = runtime.lock()
        self._number = 0
        self._sent = [0, 0]  # messages and bytes sent at once
        self._room = [ROOM_MESSAGES, ROOM]  # up to which the peer has promised room
        self._offers: dict[int, Outgoing] = {}
        self._expected = 0
        self._came = [0, 0]
        self._taken = [0, 0]
        self._told = [0, 0]
        self._offered = 0
        self._loss: Callable[[Posted], Exception] | None = None
        self._incoming: dict[int, _Incoming] = {}

    # Sending.

    def send(self, channel: int, tag: int, data: Tensor) -> Outgoing | None:
        """Send a message; None where it went at once, copied. Where too many wait already: a `CrowdedError`."""
        nbytes = data.numel()
        with self._lock:
            if self.deaf:
                raise ConnectionError(self.deaf)
            sent, room = self._sent, self._room
            at_once = nbytes <= AT_ONCE and sent[0] < room[0] and sent[1] + nbytes <= room[1]
            if not at_once and len(self._offers) >= MOST_OFFERS:
                raise self._crowded()
            number = self._number
            self._number = (number + 1) % NUMBERS
            if at_once:
                sent[0] += 1
                sent[1] += nbytes
                header = pack_header(self._me, tag, nbytes, number, EAGER, channel)
                try:  # on the way of every small message: suppress() would add about a microsecond
                    self._emit((b"".join((header, data.numpy().data)),))
                    return None
                except ConnectionError:  # then it waits, for what is to be said of the peer
                    pass
            outgoing = self._offers[number] = Outgoing(data, channel)
            if not at_once:
                with suppress(ConnectionError):  # who keeps watch over the connection tells all the same of its end
                    self._emit((Header(self._me, tag, nbytes, number, OFFER, channel).pack(),))
            return outgoing

    def post(self, channel: int, tag: int, parts: Sequence[Any], nbytes: int) -> bool:
        """Send a message where it may go at once; whether it did."""
        with self._lock:
            if self.deaf:
                raise ConnectionError(self.deaf)
            sent, room = self._sent, self._room
            if nbytes > AT_ONCE or sent[0] >= room[0] or sent[1] + nbytes > room[1]:
                return False
            number = self._number
            self._number = (number + 1) % NUMBERS
            sent[0] += 1
            sent[1] += nbytes
            header = pack_header(self._me, tag, nbytes, number, EAGER, channel)
            try:
                self._emit((b"".join((header, *parts)),))
                return True
            except ConnectionError:  # who keeps watch over the connection will tell
                return True

    def _crowded(self) -> Exception:
        oldest = next((outgoing for outgoing in self._offers.values() if not outgoing.settled), None)
        if oldest is not None:
            return CrowdedError(oldest)
        return ConnectionError(f"it has not taken {len(self._offers)} messages that were given up since")

    def oldest(self) -> Outgoing | None:
        """The message that has waited longest to be taken, of those that were not given up."""
        with self._lock:
            return next((outgoing for outgoing in self._offers.values() if not outgoing.settled), None)

    def abandon(self, channel: int, error: str) -> None:
        """Give up what the peer has not taken of a channel. It stays offered: the peer's answer must be understood."""
        with self._lock:
            for outgoing in self._offers.values():
                if outgoing.channel == channel and not outgoing.settled:
                    outgoing.settle(error)

    def tell(self, kind: int) -> None:
        """Tell the peer that we live, or leave."""
        with self._lock:
            self._say(kind)

    def _say(self, kind: int, number: int = 0, length: int = 0, part: Any = None) -> None:
        header = Header(self._me, 0, length, number, kind).pack()
        with suppress(ConnectionError):  # who keeps watch over the connection will tell
            self._emit((header,) if part is None else (header, part))

    # Receiving.

    def receive(self, header: Header, body: Any) -> None:
        """Take in what has come. What breaks the rules is a `ProtocolError`."""
        if header.kind == EAGER:
            self._receive_eager(header, body)
        else:
            _DEEDS[header.kind](self, header, body)

    def _receive_eager(self, header: Header, body: Any) -> None:
        if len(body) != header.length:
            raise self._broken(f"{len(body)} bytes where its header says {header.length}")
        if header.number != self._expected:
            raise self._out_of_order(header)
        self._expected = (header.number + 1) % NUMBERS
        nbytes, came, taken = header.length, self._came, self._taken
        came[0] += 1
        came[1] += nbytes
        if came[0] - taken[0] > ROOM_MESSAGES or came[1] - taken[1] > ROOM:
            raise self._broken("it sends more than there was room promised for")
        self._mailbox(header.channel).deliver(body, self.peer, header.tag, lambda: self._was_taken(nbytes))

    def _was_taken(self, nbytes: int) -> None:
        with self._lock:
            taken, told = self._taken, self._told
            taken[0] += 1
            taken[1] += nbytes
            if taken[0] - told[0] < ROOM_MESSAGES // 4 and taken[1] - told[1] < ROOM // 4:
                return
            told[0], told[1] = taken
            if not self.gone:
                self._say(CREDIT, (taken[0] + ROOM_MESSAGES) % NUMBERS, (taken[1] + ROOM) % COUNTED)

    def _receive_credit(self, header: Header, body: Any) -> None:
        with self._lock:
            messages = self._room[0] + (header.number - self._room[0]) % NUMBERS
            nbytes = self._room[1] + (header.length - self._room[1]) % COUNTED
            if messages - self._sent[0] > ROOM_MESSAGES or nbytes - self._sent[1] > ROOM:
                raise self._broken("it gives room for more than was sent")
            self._room = [messages, nbytes]

    def _receive_offer(self, header: Header, body: Any) -> None:
        self._in_order(header)
        with self._lock:
            self._offered += 1
            if self._offered > MOST_OFFERS:
                raise self._broken(f"it offers more than {MOST_OFFERS} messages at once")
        number, nbytes = header.number, header.length

        def accept(posted: Posted | None) -> None:
            with self._lock:
                self._offered -= 1
                if posted is None:
                    self._say(DONE, number)  # refused: its bytes are not wanted
                    return
                if self._loss is not None:
                    posted.error = self._loss(posted)
                    posted.settle()
                    return
                incoming = self._incoming[number] = _Incoming(posted, nbytes)
                incoming.accepted = min(nbytes, ON_THE_WAY)
                if nbytes:
                    self._say(ACCEPT, number, incoming.accepted)
                else:
                    self._complete(number, incoming)

        self._mailbox(header.channel).offer(nbytes, self.peer, header.tag, accept)

    def _receive_accept(self, header: Header, body: Any) -> None:
        with self._lock:
            outgoing = self._offers.get(header.number)
            if outgoing is None or header.length > outgoing.nbytes:
                raise self._broken(
                    f"it accepts {header.length} bytes of message {header.number}, which was not offered"
                )
            if outgoing.settled:  # given up: its buffer is not ours to read any more
                if not outgoing.told:
                    outgoing.told = True
                    self._say(GIVEN_UP, header.number)
                return
            while outgoing.sent < header.length:
                first, after = outgoing.sent, min(outgoing.sent + PART_BYTES, header.length)
                self._say(PART, header.number, after - first, outgoing.data[first:after])
                outgoing.sent = after

    def _receive_part(self, header: Header, body: Any) -> None:
        with self._lock:
            incoming = self._incoming.get(header.number)
            if incoming is None or len(body) != header.length:
                raise self._broken(f"a part of message {header.number}, which was not accepted")
            first, after = incoming.received, incoming.received + header.length
            if after > incoming.accepted:
                raise self._broken(f"more of message {header.number} than was accepted")
        if not incoming.posted.given_up:
            np.copyto(incoming.place[first:after], np.frombuffer(body, np.uint8))
        with self._lock:
            incoming.received = after
            if after == incoming.nbytes:
                self._complete(header.number, incoming)
            elif incoming.accepted < incoming.nbytes and incoming.accepted - after <= ON_THE_WAY // 2:
                incoming.accepted = min(incoming.nbytes, after + ON_THE_WAY)
                self._say(ACCEPT, header.number, incoming.accepted)

    def _complete(self, number: int, incoming: _Incoming) -> None:
        del self._incoming[number]
        incoming.posted.settle()
        self._say(DONE, number)

    def _receive_done(self, header: Header, body: Any) -> None:
        with self._lock:
            outgoing = self._offers.pop(header.number, None)
            if outgoing is None:
                raise self._broken(f"it has message {header.number}, which was not offered")
            if not outgoing.settled:
                outgoing.settle()

    def _receive_given_up(self, header: Header, body: Any) -> None:
        with self._lock:
            incoming = self._incoming.pop(header.number, None)
            if incoming is None:
                raise self._broken(f"it gives up message {header.number}, which was not accepted")
            pending = f"a message (tag {incoming.posted.tag})"
            incoming.posted.error = PeerLostError(
                f"rank {self._me} lost rank {self.peer} while waiting for {pending}: it has given the message up",
                peer=self.peer,
                pending=pending,
            )
            incoming.posted.settle()
            self._say(DONE, header.number)

    def _receive_ping(self, header: Header, body: Any) -> None:
        return

    def _in_order(self, header: Header) -> None:
        if header.number != self._expected:
            raise self._out_of_order(header)
        self._expected = (header.number + 1) % NUMBERS

    def _out_of_order(self, header: Header) -> ProtocolError:
        return self._broken(f"message {header.number} where {self._expected} was due: one is lost or doubled")

    def _broken(self, reason: str) -> ProtocolError:
        return ProtocolError(f"rank {self.peer} broke the protocol: {reason}", peer=self.peer)

    # The end.

    def lose(self, reason: str, error: Callable[[Posted], Exception]) -> None:
        """Nothing more comes from the peer: break what waits for it."""
        with self._lock:
            self.gone, self.deaf, self._loss = reason, reason, error
            for outgoing in self._offers.values():
                if not outgoing.settled:
                    outgoing.settle(self.gone)
            self._offers.clear()
            for incoming in self._incoming.values():
                incoming.posted.error = error(incoming.posted)
                incoming.posted.settle()
            self._incoming.clear()

    def __repr__(self) -> str:
        state = self.gone or f"{len(self._offers)} offered, {format_bytes(self._came[1] - self._taken[1])} unreceived"
        return f"Link(to rank {self.peer}: {state})"


_DEEDS: dict[int, Callable[[Link, Header, Any], None]] = {
    OFFER: Link._receive_offer,
    ACCEPT: Link._receive_accept,
    PART: Link._receive_part,
    DONE: Link._receive_done,
    CREDIT: Link._receive_credit,
    PING: Link._receive_ping,
    BYE: Link._receive_ping,
    GIVEN_UP: Link._receive_given_up,
}
