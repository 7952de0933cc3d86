"""Running a schedule over a transport.

A lane is one execution of the schedule over one part of the data. Several lanes of one call take turns, so that
one combines what it received while the bytes of the next are on their way::

    lane 0   post 1 │ wait 1, merge │ post 2 │            │ wait 2, merge │ …
    lane 1          │               │ post 1 │ … on the wire …            │ wait 1, merge │ …

Lanes go round by round together, idle rounds included: what is waited for in round k of one lane was sent by
then on every rank, so lanes cannot wait for each other in a circle. Within a lane a round's receives are posted
before its sends, and merged in the order the schedule lists them, whatever order they came in: the result does
not depend on timing. Chunks of no bytes are not sent. A large send to one peer is let through before the next round
sends to another: side by side they would share the port, and who waits for the first would wait for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from syncline.collectives.base import Move, Round
from syncline.collectives.carriers import Carrier
from syncline.transports import Handle, Transport
from syncline.transports.base import LANE_TAGS

__all__ = ["Lane", "execute"]

MOST_SENDING = 4
"""Sends of earlier rounds that a lane lets run on before it waits for the oldest."""
ONE_AT_A_TIME = 1 << 17
"""Bytes from which on a send is worth waiting for before another peer's begins."""


def execute(transport: Transport, lanes: Sequence[tuple[Iterator[Round], Carrier]]) -> None:
    """Run every lane to its end. Each lane has a tag of its own; a channel runs one call at a time."""
    with transport.timing.no_user_code():
        active = [Lane(transport, rounds, carrier, LANE_TAGS + lane) for lane, (rounds, carrier) in enumerate(lanes)]
        active = [lane for lane in active if lane.post()]
        while active:
            active = [lane for lane in active if lane.advance()]


class _Send(NamedTuple):
    """A send under way: its chunks from `first` to before `end` must not be overwritten yet."""

    first: int
    end: int
    peer: int
    nbytes: int
    handle: Handle


class Lane:
    """One execution of a schedule."""

    def __init__(self, transport: Transport, rounds: Iterator[Round], carrier: Carrier, tag: int) -> None:
        self._transport = transport
        self._rounds = rounds
        self._carrier = carrier
        self._tag = tag
        self._landing: list[tuple[Move, Tensor, Handle]] = []
        self._sending: deque[_Send] = deque()

    def post(self) -> bool:
        """Start the next round; at the end of the schedule wait for what is still being sent, and return False."""
        transport, carrier, tag = self._transport, self._carrier, self._tag
        now = next(self._rounds, None)
        if now is None:
            for send in self._sending:
                send.handle.wait()
            self._sending.clear()
            return False
        for move in now.recvs:
            if carrier.nbytes(move):
                if not move.combine:
                    self._finish_sending(move)  # it lands in place
                data = carrier.landing(move)
                self._landing.append((move, data, transport.recv(data, move.peer, tag, exact=True)))
        if self._sending:
            self._let_through(now.sends)
        for move in now.sends:
            nbytes = carrier.nbytes(move)
            if nbytes:
                peer, chunk, width, _ = move
                handle = transport.send(carrier.read(move), peer, tag, exact=True)
                self._sending.append(_Send(chunk, chunk + width, peer, nbytes, handle))
        while len(self._sending) > MOST_SENDING + len(now.sends):
            self._sending.popleft().handle.wait()  # from many rounds ago: surely gone by now
        return True

    def advance(self) -> bool:
        """Finish the round under way and start the next one."""
        for _, _, handle in self._landing:
            handle.wait()
        combined = 0
        for move, data, _ in self._landing:
            if move.combine:
                self._finish_sending(move)
                combined += self._carrier.nbytes(move)
            self._carrier.merge(move, data)
        self._landing.clear()
        if combined:
            self._transport.timing.reduced(combined)
        return self.post()

    def _let_through(self, sends: Sequence[Move]) -> None:
        """Wait for large sends of earlier rounds to other peers than the next ones."""
        for sent in self._sending:
            if sent.nbytes >= ONE_AT_A_TIME and sends and all(move.peer != sent.peer for move in sends):
                sent.handle.wait()

    def _finish_sending(self, move: Move) -> None:
        """Wait for the sends that still read what this move will overwrite."""
        chunk, end = move.chunk, move.chunk + move.width
        for sent in self._sending:
            if sent.first < end and chunk < sent.end:
                break
        else:
            return
        for sent in [each for each in self._sending if each.first < end and chunk < each.end]:
            sent.handle.wait()
            self._sending.remove(sent)
