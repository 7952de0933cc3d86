"""The protocol between two nodes: small messages at once, large ones after the receiver has accepted them.

A message of up to `MAX_EAGER_BYTES` bytes is sent with its header while the peer has granted credit. Any other message
is offered, and its bytes stay with the sender until a receive takes it. They then come in parts, directly into place::

    sender                      receiver             sender                      receiver
      │ ── EAGER bytes ──────────► │                   │ ── OFFER number, length ──► │  … until a receive matches
      │                            │                   │ ◄── ACCEPT number, so far ─ │
      │ ◄── CREDIT messages, bytes │ now and then      │ ── PART number, bytes ────► │  as far as accepted
                                                       │ ◄── ACCEPT further ──────── │
                                                       │ ── PART …  ───────────────► │
                                                       │ ◄── DONE number ─────────── │  also if it was too long

The number of unreceived bytes is bounded on both sides for any order of receives, and no message waits behind
another that nobody wants yet. A message that its sender abandons stays offered; a peer that accepts it gets ABANDONED
as the answer. Nothing here touches a socket: `emit` does.

Credit and offers bound the buffers. Nothing is numbered to detect repeats: a connection delivers its messages once and
in order, and a broken one is never opened again. Requests that must survive a lost peer have numbers of their own
(`server/request_sender.py`). The number of an offer only names it in later frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.runtime import Event, Runtime
from syncline.transports.messages import Mailbox, MessageHeader, PostedReceive, pack_header, peer_lost_error

__all__ = ["ABORT", "FRAME_KINDS", "GOODBYE", "PING", "OutgoingMessage", "PeerConnection", "TooManyOffersError"]

EAGER, OFFER, ACCEPT, PART, DONE, CREDIT, PING, GOODBYE, ABANDONED, ABORT = range(16, 26)
FRAME_KINDS = frozenset(range(16, 26))

MAX_EAGER_BYTES = 1 << 16
"""Largest message that is sent with its header."""
CREDIT_BYTES = 1 << 20
"""Bytes of eager messages that each sender may have unreceived at a peer."""
CREDIT_MESSAGES = 1024
"""Number of eager messages that each sender may have unreceived at a peer."""
PART_BYTES = 1 << 20
MAX_INFLIGHT_BYTES = 4 * PART_BYTES
"""Bytes of a large message that may be on the way."""
MAX_OFFERS = 4096
"""Messages offered to one peer that it has not taken. The next send waits."""
NUMBER_MODULUS = 1 << 32
BYTES_MODULUS = 1 << 40
"""Counts of messages and bytes wrap around: a header has no room for more."""


class OutgoingMessage:
    """A message that the peer has not taken completely."""

    def __init__(self, data: Tensor, channel: int) -> None:
        self.channel = channel
        self.data: Any = data.numpy()
        self.nbytes = data.numel()
        self.sent = 0
        self.done = False
        self.peer_knows = False
        """Whether the peer knows that it was abandoned."""
        self.error: str = ""
        self.event: Event | None = None

    def finish(self, error: str = "") -> None:
        """Mark it as arrived, or as failed with `error`."""
        self.error = error
        self.done = True
        self.data = None
        if self.event is not None:
            self.event.set()


class TooManyOffersError(Exception):
    """`MAX_OFFERS` messages wait to be taken; `oldest` is the one to wait for. It never leaves the transport."""

    def __init__(self, oldest: OutgoingMessage) -> None:
        super().__init__(f"{MAX_OFFERS} messages wait to be taken")
        self.oldest = oldest


class _IncomingMessage:
    """A large message on its way into a receive's buffer."""

    def __init__(self, posted: PostedReceive, nbytes: int, channel: int) -> None:
        self.channel = channel
        self.posted = posted
        self.place: Any = posted.data.numpy()
        self.nbytes = nbytes
        self.received = 0
        self.accepted = 0


class PeerConnection:
    """One node's side of the protocol with one peer."""

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
        """Why the peer sends nothing more."""
        self.left = ""
        """Why the peer takes nothing more. Messages that it sent earlier may still arrive."""
        self._me = me
        self._emit = emit
        self._mailbox = mailbox
        self._lock = runtime.lock()
        self._writing = runtime.lock(short=True)
        """Held while bytes are written into the buffer of a receive."""
        self._next_offer = 0
        self.sent = [0, 0]  # messages and bytes sent eagerly
        self.credit = [CREDIT_MESSAGES, CREDIT_BYTES]  # the counts up to which the peer has granted credit
        self.offers: dict[int, OutgoingMessage] = {}
        self.arrived = [0, 0]
        self.taken = [0, 0]
        self.credited = [0, 0]
        self._open_offers: set[int] = set()
        """The numbers of the peer's offers that no receive has accepted."""
        self._loss: Callable[[PostedReceive], Exception] | None = None
        self.incoming: dict[int, _IncomingMessage] = {}

    # Sending.

    @property
    def offered(self) -> int:
        """Messages of the peer that no receive has accepted."""
        return len(self._open_offers)

    def send(self, channel: int, tag: int, data: Tensor) -> OutgoingMessage | None:
        """Send a message; None if it was copied and sent at once. Raises `TooManyOffersError` if too many wait."""
        nbytes = data.numel()
        if nbytes <= MAX_EAGER_BYTES and self.send_eager(channel, tag, (data.numpy().data,), nbytes):
            return None
        with self._lock:
            if self.left:
                raise ConnectionError(self.left)
            if len(self.offers) >= MAX_OFFERS:
                raise self._too_many_offers()
            number = self._next_offer
            self._next_offer = (number + 1) % NUMBER_MODULUS
            outgoing = self.offers[number] = OutgoingMessage(data, channel)
            with suppress(ConnectionError):  # the node's monitor reports the end of the connection
                self._emit((pack_header(self._me, tag, nbytes, number, OFFER, channel),))
            return outgoing

    def send_eager(self, channel: int, tag: int, parts: Sequence[Any], nbytes: int) -> bool:
        """Send a message at once if the credit allows it. Returns whether it was sent."""
        with self._lock:
            if self.left:
                raise ConnectionError(self.left)
            sent, credit = self.sent, self.credit
            if nbytes > MAX_EAGER_BYTES or sent[0] >= credit[0] or sent[1] + nbytes > credit[1]:
                return False
            header = pack_header(self._me, tag, nbytes, 0, EAGER, channel)
            try:
                self._emit((b"".join((header, *parts)),))
            except ConnectionError:  # it waits as an offer, until the node's monitor reports the end of the connection
                return False
            sent[0] += 1
            sent[1] += nbytes
            return True

    def _too_many_offers(self) -> Exception:
        oldest = self._oldest()
        if oldest is not None:
            return TooManyOffersError(oldest)
        return ConnectionError(f"it has not taken {len(self.offers)} messages that were given up since")

    def oldest(self) -> OutgoingMessage | None:
        """The message that has waited longest to be taken, without abandoned ones."""
        with self._lock:
            return self._oldest()

    def _oldest(self) -> OutgoingMessage | None:
        return next((outgoing for outgoing in self.offers.values() if not outgoing.done), None)

    def abandon(
        self, channel: int, error: str, receive_error: Callable[[PostedReceive], Exception] | None = None
    ) -> None:
        """Abandon the messages of a channel that the peer has not taken. They stay offered: the peer may answer.

        With `receive_error`, receives whose messages arrive in parts end too. Further parts are discarded.
        """
        with self._lock:
            for outgoing in self.offers.values():
                if outgoing.channel == channel and not outgoing.done:
                    outgoing.finish(error)
            for incoming in self.incoming.values() if receive_error is not None else ():
                if incoming.channel == channel and not incoming.posted.done:
                    self._fail(incoming, receive_error)

    def _fail(self, incoming: _IncomingMessage, error: Callable[[PostedReceive], Exception] | None) -> None:
        """End a receive whose message arrives in parts. Nothing is written into its buffer any more."""
        assert error is not None
        posted = incoming.posted
        with self._writing:
            posted.abandoned = True
        posted.error = error(posted)
        posted.finish()

    def send_control(self, kind: int, channel: int = 0) -> None:
        """Send a frame without content: PING or GOODBYE, or ABORT for a channel."""
        with self._lock:
            self._send_frame(kind, channel=channel)

    def close(self, release: Callable[[], None]) -> None:
        """Release the socket of a peer that is lost, while no other thread sends on it."""
        with self._lock:
            release()

    def _send_frame(self, kind: int, number: int = 0, length: int = 0, part: Any = None, channel: int = 0) -> None:
        header = pack_header(self._me, 0, length, number, kind, channel)
        with suppress(ConnectionError):  # the node's monitor reports the end of the connection
            self._emit((header,) if part is None else (header, part))

    # Receiving.

    def receive(self, header: MessageHeader, body: Any) -> None:
        """Process a frame with content. Raises a `ProtocolError` if the peer breaks the protocol."""
        if header.kind == EAGER:
            self._receive_eager(header, body)
        else:
            _RECEIVERS[header.kind](self, header, body)

    def _receive_eager(self, header: MessageHeader, body: Any) -> None:
        if len(body) != header.length:
            raise self._broken(f"{len(body)} bytes where its header says {header.length}")
        nbytes, arrived, taken = header.length, self.arrived, self.taken
        arrived[0] += 1
        arrived[1] += nbytes
        if arrived[0] - taken[0] > CREDIT_MESSAGES or arrived[1] - taken[1] > CREDIT_BYTES:
            raise self._broken("it sends more than it had credit for")
        self._mailbox(header.channel).deliver(body, self.peer, header.tag, partial(self._return_credit, nbytes))

    def _return_credit(self, nbytes: int) -> None:
        with self._lock:
            taken, credited = self.taken, self.credited
            taken[0] += 1
            taken[1] += nbytes
            if taken[0] - credited[0] < CREDIT_MESSAGES // 4 and taken[1] - credited[1] < CREDIT_BYTES // 4:
                return
            credited[0], credited[1] = taken
            if not self.gone:
                messages, total = taken[0] + CREDIT_MESSAGES, taken[1] + CREDIT_BYTES
                self._send_frame(CREDIT, messages % NUMBER_MODULUS, total % BYTES_MODULUS)

    def _receive_credit(self, header: MessageHeader, body: Any) -> None:
        with self._lock:
            messages = self.credit[0] + (header.number - self.credit[0]) % NUMBER_MODULUS
            nbytes = self.credit[1] + (header.length - self.credit[1]) % BYTES_MODULUS
            if messages - self.sent[0] > CREDIT_MESSAGES or nbytes - self.sent[1] > CREDIT_BYTES:
                raise self._broken("it grants credit for more than was sent")
            self.credit = [messages, nbytes]

    def _receive_offer(self, header: MessageHeader, body: Any) -> None:
        number, nbytes = header.number, header.length
        with self._lock:
            if number in self._open_offers or number in self.incoming:
                raise self._broken(f"it offers message {number} twice")
            self._open_offers.add(number)
            if len(self._open_offers) > MAX_OFFERS:
                raise self._broken(f"it offers more than {MAX_OFFERS} messages at once")

        def accept(posted: PostedReceive | None) -> None:
            with self._lock:
                self._open_offers.discard(number)
                if posted is None:
                    self._send_frame(DONE, number)  # refused: its bytes are not wanted
                    return
                if self._loss is not None:
                    posted.error = self._loss(posted)
                    posted.finish()
                    return
                incoming = self.incoming[number] = _IncomingMessage(posted, nbytes, header.channel)
                incoming.accepted = min(nbytes, MAX_INFLIGHT_BYTES)
                if nbytes:
                    self._send_frame(ACCEPT, number, incoming.accepted)
                else:
                    self._complete(number, incoming)

        self._mailbox(header.channel).offer(nbytes, self.peer, header.tag, accept)

    def _receive_accept(self, header: MessageHeader, body: Any) -> None:
        with self._lock:
            outgoing = self.offers.get(header.number)
            if outgoing is None or header.length > outgoing.nbytes:
                raise self._broken(
                    f"it accepts {header.length} bytes of message {header.number}, which was not offered"
                )
            if outgoing.done:  # abandoned: its buffer must not be read any more
                if not outgoing.peer_knows:
                    outgoing.peer_knows = True
                    self._send_frame(ABANDONED, header.number)
                return
            while outgoing.sent < header.length:
                first, after = outgoing.sent, min(outgoing.sent + PART_BYTES, header.length)
                self._send_frame(PART, header.number, after - first, outgoing.data[first:after])
                outgoing.sent = after

    def _receive_part(self, header: MessageHeader, body: Any) -> None:
        with self._lock:
            incoming = self.incoming.get(header.number)
            if incoming is None or len(body) != header.length:
                raise self._broken(f"a part of message {header.number}, which was not accepted")
            first, after = incoming.received, incoming.received + header.length
            if after > incoming.accepted:
                raise self._broken(f"more of message {header.number} than was accepted")
        with self._writing:
            if not incoming.posted.abandoned:
                np.copyto(incoming.place[first:after], np.frombuffer(body, np.uint8))
        with self._lock:
            incoming.received = after
            if after == incoming.nbytes:
                self._complete(header.number, incoming)
            elif incoming.accepted < incoming.nbytes and incoming.accepted - after <= MAX_INFLIGHT_BYTES // 2:
                incoming.accepted = min(incoming.nbytes, after + MAX_INFLIGHT_BYTES)
                self._send_frame(ACCEPT, header.number, incoming.accepted)

    def _complete(self, number: int, incoming: _IncomingMessage) -> None:
        del self.incoming[number]
        if not incoming.posted.done:
            incoming.posted.finish()
        self._send_frame(DONE, number)

    def _receive_done(self, header: MessageHeader, body: Any) -> None:
        with self._lock:
            outgoing = self.offers.pop(header.number, None)
            if outgoing is None:
                raise self._broken(f"it has message {header.number}, which was not offered")
            if not outgoing.done:
                outgoing.finish()

    def _receive_abandoned(self, header: MessageHeader, body: Any) -> None:
        with self._lock:
            incoming = self.incoming.pop(header.number, None)
            if incoming is None:
                raise self._broken(f"it gives up message {header.number}, which was not accepted")
            self._send_frame(DONE, header.number)
            posted = incoming.posted
            if not posted.done:
                pending, reason = f"a message (tag {posted.tag})", "it has given the message up"
                posted.error = peer_lost_error(f"rank {self._me}", self.peer, f"rank {self.peer}", pending, 0.0, reason)
                posted.finish()

    def _broken(self, reason: str) -> ProtocolError:
        return ProtocolError(f"rank {self.peer} broke the protocol: {reason}", peer=self.peer)

    def lose(self, reason: str, error: Callable[[PostedReceive], Exception]) -> None:
        """End everything that waits for the peer, which is lost."""
        with self._lock:
            self.gone, self.left, self._loss = reason, reason, error
            for outgoing in self.offers.values():
                if not outgoing.done:
                    outgoing.finish(self.gone)
            self.offers.clear()
            for incoming in self.incoming.values():
                if not incoming.posted.done:
                    self._fail(incoming, error)
            self.incoming.clear()


_RECEIVERS: dict[int, Callable[[PeerConnection, MessageHeader, Any], None]] = {
    OFFER: PeerConnection._receive_offer,
    ACCEPT: PeerConnection._receive_accept,
    PART: PeerConnection._receive_part,
    DONE: PeerConnection._receive_done,
    CREDIT: PeerConnection._receive_credit,
    ABANDONED: PeerConnection._receive_abandoned,
}
