"""How far each worker is. Pure.

A worker's clock counts the steps that it has pushed. `least` is the slowest's: what everyone has done. Workers that are
lost or through hold nobody back.

    clocks   0: 5   1: 3   2: 7 (lost)   3: 4          least 3, steps 19
"""

from __future__ import annotations

from collections.abc import Iterable

from syncline.errors import ProtocolError

__all__ = ["FOREVER", "Clocks"]

FOREVER = 1 << 62
"""The least clock where nobody trains any more."""


class Clocks:
    """One clock for each worker.

    >>> clocks = Clocks([0, 1])
    >>> clocks.tick(0, 0)
    >>> clocks.least, clocks.steps
    (0, 1)
    >>> clocks.leave(1)
    True
    >>> clocks.least
    1
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.of = dict.fromkeys(workers, 0)
        self.steps = 0
        """That all have taken together."""
        self.least = 0
        """The slowest's."""
        self._there = set(self.of)
        self._look()

    @property
    def live(self) -> int:
        """Workers that are there and still train."""
        return len(self._there)

    def _look(self) -> None:
        self.steps = sum(self.of.values())
        self.least = min((self.of[worker] for worker in self._there), default=FOREVER)

    def trains(self, worker: int) -> bool:
        """Whether a worker is there and still trains."""
        return worker in self._there

    def check(self, worker: int, clock: int) -> None:
        """Refuse a step that is not this worker's next."""
        if worker not in self.of:
            raise ProtocolError(f"member {worker} has no clock here: workers are {sorted(self.of)}")
        if clock != self.of[worker]:
            raise ProtocolError(f"worker {worker} is at clock {self.of[worker]}, and sends a step of clock {clock}")

    def tick(self, worker: int, clock: int) -> None:
        """A worker has pushed all it had for its step."""
        self.check(worker, clock)
        self.of[worker] = clock + 1
        self._look()

    def set(self, worker: int, clock: int) -> None:
        """A worker goes on from another step: it was late, or comes out of a checkpoint."""
        self.of[worker] = clock
        self._look()

    def leave(self, worker: int) -> bool:
        """A worker is lost, or through; whether it was there."""
        if worker not in self._there:
            return False
        self._there.discard(worker)
        self._look()
        return True
