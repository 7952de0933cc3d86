"""Collectives that all ranks of a channel run in one order, and the end of a wait for a rank that has left.

```text
rank 0    1 done   2 done   3 …waits
rank 1    1 done   2 done   left: told that 2 are done     → rank 0 gives 3 up at once
rank 2    1 done   2 …what rank 1 owes is on its way       → completes 2, and does not begin 3
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from syncline.compat.horovod.errors import HorovodInternalError
from syncline.runtime import Runtime

__all__ = ["Lockstep"]

LOST_GRACE_S = 5.0
"""Seconds for a collective to complete after a rank was lost of which nobody knows how far it went."""
AGAIN_S = 0.1
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
        """Who has left, once somebody has."""
        self._runtime = runtime
        self._give_up = give_up
        self._running = False
        self._last: int | None = None
        """The last collective that can complete."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for the next collective within it; refused where that cannot complete."""
        self._running = True  # before the look: a departure that comes meanwhile looks the other way round
        try:
            if self._in_vain():
                raise HorovodInternalError(self.why)
            yield
        finally:
            self._running = False
        self.completed += 1

    def departed(self, why: str, completed: int | None) -> None:
        """Another rank takes part in nothing more after so many collectives; None: nobody knows after how many."""
        last = self.completed + self._running if completed is None else completed
        if self._last is None or last < self._last:
            self.why, self._last = why, last
        if self._in_vain() or (completed is None and self._running):
            grace = 0.0 if self._in_vain() else LOST_GRACE_S
            self._runtime.spawn(self._end_wait, self.completed, grace, name="hvd-gives-up")

    def _in_vain(self) -> bool:
        return self._running and self._last is not None and self.completed >= self._last

    def _end_wait(self, completed: int, grace: float) -> None:
        self._runtime.sleep(grace)
        while self._running and self.completed == completed:
            self._give_up()
            self._runtime.sleep(AGAIN_S)  # it may break only what waits at this moment, and another wait may follow
