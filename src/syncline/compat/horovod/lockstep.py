"""Counts collectives that all ranks of a channel run in the same order, and ends waits for a rank that has left.

```text
rank 0    1 done   2 done   3 …waits
rank 1    1 done   2 done   leaves: "2 are done"           → rank 0 stops waiting for 3 at once
rank 2    1 done   2 …waits for rank 1's message           → completes 2, and does not begin 3
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from syncline.compat.horovod.errors import HorovodInternalError
from syncline.runtime import Runtime

__all__ = ["Lockstep"]

LOST_GRACE_S = 5.0
"""Seconds that a collective may still take to complete after a rank was lost whose progress is unknown."""
RETRY_EVERY_S = 0.1
"""Seconds between attempts to break a wait."""


class Lockstep:
    """Counts the collectives of one channel on this rank. `give_up` breaks a wait on it, from another task.

    >>> from syncline.runtime import RealRuntime
    >>> steps = Lockstep(RealRuntime(), give_up=lambda: None)
    >>> with steps.waiting():
    ...     pass
    >>> steps.departed("rank 1 has left", completed=1)
    >>> with steps.waiting():
    ...     pass
    Traceback (most recent call last):
    ...
    syncline.compat.horovod.errors.HorovodInternalError: rank 1 has left
    """

    def __init__(self, runtime: Runtime, give_up: Callable[[], None]) -> None:
        self.completed = 0
        self.why = ""
        """Which rank has left, as a sentence for errors; empty while all are there."""
        self._runtime = runtime
        self._give_up = give_up
        self._running = False
        self._last: int | None = None
        """The last collective that can complete."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wraps the wait for the next collective. Raises where that collective cannot complete."""
        self._running = True  # before the check: a departure that arrives meanwhile sees it
        try:
            if self._cannot_complete():
                raise HorovodInternalError(self.why)
            yield
        finally:
            self._running = False
        self.completed += 1

    def departed(self, why: str, completed: int | None) -> None:
        """Another rank has left after `completed` collectives; None where that number is unknown."""
        last = self.completed + self._running if completed is None else completed
        if self._last is None or last < self._last:
            self.why, self._last = why, last
        if self._cannot_complete() or (completed is None and self._running):
            grace = 0.0 if self._cannot_complete() else LOST_GRACE_S
            self._runtime.spawn(self._end_wait, self.completed, grace, name="hvd-gives-up")

    def _cannot_complete(self) -> bool:
        return self._running and self._last is not None and self.completed >= self._last

    def _end_wait(self, completed: int, grace: float) -> None:
        self._runtime.sleep(grace)
        while self._running and self.completed == completed:
            self._give_up()
            self._runtime.sleep(RETRY_EVERY_S)  # one call breaks the current wait only; another may follow
