"""A compressed reduction under way: a generator of requests, and the flights of those it waits for.

begin     encode, the first requests take off                   where the bucket filled: a hook, or the comm task
advance   they land; decode, or encode again and take off       at the end of backward, or the comm task
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from syncline.reduction.flights import Flight, take_off
from syncline.reduction.requests import Request
from syncline.reduction.stats import Place

if TYPE_CHECKING:
    from syncline.reduction.communicator import Communicator

__all__ = ["Coded", "Work"]

Work = Generator[Request | tuple[Request, ...], Any, Any]


class Coded:
    """One bucket's. `result` is what the generator returned."""

    def __init__(self, exchange: Communicator, work: Work, what: str, logical: int) -> None:
        self.result: Any = None
        self.done = False
        self._exchange = exchange
        self._work = work
        self._what = what
        self._logical = logical
        self._flights: tuple[Flight, ...] = ()
        self._single = True
        self._off = 0.0
        self._watched = exchange.stats.watching

    def begin(self, here: bool = False) -> None:
        """Encode; what is to be sent takes off."""
        self._next(None, here, "before")

    def advance(self, here: bool = False) -> None:
        """Wait for what is under way, decode, and go on to the next requests or the end."""
        if self.done:
            return
        answers = [flight.land() for flight in self._flights]
        if self._watched:
            self._exchange.stats.reduced(self._off, self._exchange.world.runtime.now(), self._what)
        self._next(answers[0] if self._single else answers, here, "within")

    def wait(self) -> None:
        """Go on to the end."""
        while not self.done:
            self.advance()

    def _next(self, answer: Any, here: bool, where: Place) -> None:
        exchange, now = self._exchange, self._exchange.world.runtime.now
        start = now()
        try:
            asked = self._work.send(answer)
        except StopIteration as end:
            self.result, self.done, self._flights = end.value, True, ()
            return
        finally:
            exchange.stats.coded(start, now(), self._what, "beside" if here else where)
        self._off = now()
        self._single = not isinstance(asked, tuple)
        requests = asked if isinstance(asked, tuple) else (asked,)
        self._flights = tuple(take_off(exchange, request, self._what, here) for request in requests)
        exchange.stats.sent(self._logical, sum(flight.sent for flight in self._flights))
        self._logical = 0  # once
