"""Operations in flight: their results, and the end of waits for a rank that has left.

`CollectiveCounter` counts the collectives that all ranks of a channel run in the same order:

```text
rank 0    1 done   2 done   3 …waits
rank 1    1 done   2 done   leaves: "2 are done"           → rank 0 stops waiting for 3 at once
rank 2    1 done   2 …waits for rank 1's message           → completes 2, and does not begin 3
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from syncline.compat.horovod.errors import HorovodInternalError
from syncline.compat.horovod.messages import OperationPlan, OperationRequest
from syncline.runtime import Event, Runtime


class PendingOperation:
    """One operation in flight on this rank: its tensors and its result."""

    action: Callable[[OperationPlan], Any] | None = None
    """Called instead of a collective when all ranks have requested the operation."""
    finish: Callable[[Any], Any] | None = None
    """Converts the result, in the thread that waits."""
    requested_at = 0.0
    result: Any = None
    error: Exception | None = None
    _done = False
    _event: Event | None = None
    """Created by a thread that has to wait; most operations are done before anyone waits."""

    def __init__(
        self, runtime: Runtime, request: OperationRequest, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        self._runtime = runtime
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        """The tensors for the results, if their shapes are known in advance."""

    def done(self) -> bool:
        return self._done

    def settle(self, result: Any = None, error: Exception | None = None) -> None:
        self.result, self.error = result, error
        self._done = True
        event = self._event  # read after `_done` is set: a thread that creates it later checks `_done` first
        if event is not None:
            event.set()

    def wait(self, timeout_s: float) -> Any:
        """Wait for the result. The coordinator fails stalled operations earlier than this timeout."""
        if not self._done:
            self._await(timeout_s)
        if self.error is not None:
            raise self.error
        return self.result if self.finish is None else self.finish(self.result)

    def _await(self, timeout_s: float) -> None:
        event = self._event = self._runtime.event()
        why = f"{self.request.kind} '{self.request.label}' to be submitted by all ranks"
        if not self._done and not event.wait(timeout_s, why, hang=True):
            raise HorovodInternalError(f"after {timeout_s:.3g} s this rank still waits for {why}")


LOST_GRACE_S = 5.0
"""Seconds that a collective may still take to complete after a rank was lost whose progress is unknown."""
RETRY_EVERY_S = 0.1
"""Seconds between attempts to end a wait."""


class CollectiveCounter:
    """Counts the collectives of one channel on this rank. `give_up` ends a wait on the channel, from another task.

    >>> from syncline.runtime import RealRuntime
    >>> steps = CollectiveCounter(RealRuntime(), give_up=lambda: None)
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
        """A sentence that names the rank that has left; empty if none has left."""
        self._runtime = runtime
        self._give_up = give_up
        self._running = False
        self._last: int | None = None
        """The last collective that can complete."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wraps the wait for the next collective. Raises if that collective cannot complete."""
        self._running = True  # before the check: a departure that arrives meanwhile sees it
        try:
            if self._cannot_complete():
                raise HorovodInternalError(self.why)
            yield
        finally:
            self._running = False
        self.completed += 1

    def departed(self, why: str, completed: int | None) -> None:
        """Another rank has left after `completed` collectives; None if that number is unknown."""
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
            self._runtime.sleep(RETRY_EVERY_S)  # one call ends only the current wait; another wait may follow
