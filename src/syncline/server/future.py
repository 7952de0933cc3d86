"""What a client gets for a request, and what answers tell of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from syncline.server import protocol
from syncline.server.courier import Courier
from syncline.server.flight import Flight

__all__ = ["Future", "Told"]


@dataclass(frozen=True)
class Told:
    """What the latest answer said of the others, without a message of its own."""

    stop: bool = False
    steps: int = 0
    live: int = 0
    min_clock: int = 0


class Future:
    """Requests under way; `wait()` gives what was pulled.

    `timestamp` may be named in a later request's `after`.

    >>> import torch, syncline as sl
    >>> with sl.init() as world, sl.store(2) as store:
    ...     first = store.push(None, torch.ones(2))
    ...     store.pull(after=[first.timestamp]).wait()
    tensor([1., 1.])
    """

    def __init__(self, courier: Courier, timestamp: int, flights: Sequence[Flight], out: Tensor | None = None) -> None:
        self.timestamp = timestamp
        self._courier = courier
        self._flights = flights
        self._out = out

    def done(self) -> bool:
        """Whether every server has answered, as far as that can be told without a wait.

        Then `wait()` returns at once, or when what an answer announces is in. Only `wait()` deals with a server that
        asks for a list of keys again and with answers that the network doubles. On MPI it is True once `wait()` was
        through.
        """
        return all(flight.arrived for flight in self._flights)

    def wait(self) -> Tensor | None:
        """Return when every server has answered; what one refuses is a `ProtocolError`."""
        for flight in self._flights:
            self._courier.finish(flight)
        for flight in self._flights:
            if flight.error is not None:
                raise flight.error
        return self._out

    @property
    def flights(self) -> Sequence[Flight]:
        """Its parts, one for each piece."""
        return self._flights

    def joined(self, other: Future) -> Future:
        """Both in one: what the other pulled, and its timestamp."""
        return Future(self._courier, other.timestamp, [*self._flights, *other._flights], other._out)

    @property
    def late(self) -> bool:
        """Whether a quorum had closed the step without this push, on any server."""
        return any(flight.reply is not None and flight.reply.status == protocol.LATE for flight in self._flights)

    @property
    def staleness(self) -> int:
        """Of what was read, or of what the push was computed from: the most over the servers; −1: not known."""
        return max((flight.reply.staleness for flight in self._flights if flight.reply is not None), default=-1)
