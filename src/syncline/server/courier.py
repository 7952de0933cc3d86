"""Carries a client's requests to the servers and brings their answers, each once, whatever the network does.

launch ─► room in the window? ─► number ─► send ─┐
             └ no: finish the oldest             ▼
finish ◄── settle ◄── in place ◄── answer ◄─── server        silence: ask again, all that may be lost
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from syncline.server import protocol
from syncline.server.flight import Flight, Line
from syncline.server.protocol import Reply, Request
from syncline.transports import Transport

__all__ = ["Courier", "nothing"]


class Courier:
    """One client's lines to the servers of a space. `settle` is called once for each answer."""

    def __init__(
        self,
        transport: Transport,
        mark: int,
        servers: tuple[int, ...],
        retry: float | None,
        settle: Callable[[Flight, Reply], None],
    ) -> None:
        self.lines = [Line(transport, member, at, mark) for at, member in enumerate(servers)]
        self.retry = retry
        self.bytes_sent = 0
        self._mark = mark
        self._settle = settle
        self._runtime = transport.runtime
        self._lock = self._runtime.lock()

    def launch(
        self,
        line: Line,
        request: Request,
        body: Tensor,
        out: Tensor | None = None,
        keys: Tensor | None = None,
        view: Tensor | None = None,
    ) -> Flight:
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
                    flight = Flight(line, request, body, out, self._runtime.lock(), keys=keys, view=view)
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

    def _finish_views(self, line: Line, request: Request) -> None:
        """Encoded answers tell what changed since the one before, so two about the same keys come one by one."""
        first, after = request.first, request.first + request.count
        for other in list(line.under_way.values()):
            there = other.request
            if other.view is not None and there.first < after and first < there.first + there.count:
                self.finish(other)

    def finish(self, flight: Flight) -> None:
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

    def _await_answer(self, flight: Flight) -> None:
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

    def _break_off(self, flight: Flight, error: Exception) -> None:
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

    def under_way(self) -> list[Flight]:
        """All that is not answered yet."""
        return [flight for line in self.lines for flight in list(line.under_way.values())]


def nothing() -> Tensor:
    """The body of a request that has none."""
    return torch.empty(0, dtype=torch.uint8)
