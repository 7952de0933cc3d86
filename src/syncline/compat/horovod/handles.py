"""Operations under way, as the user holds them: by a number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from torch import Tensor

from syncline.compat.horovod.errors import HorovodInternalError
from syncline.compat.horovod.requests import Plan, Request
from syncline.errors import IncompatibleError
from syncline.runtime import Event, Runtime

__all__ = ["Handles", "Pending"]


class Pending:
    """One operation of this rank: its tensors, and what comes of it."""

    action: Callable[[Plan], Any] | None = None
    """What is done when all ranks have asked, where no tensors are moved."""
    finish: Callable[[Any], Any] | None = None
    """What the waiting thread makes of the result."""
    asked_at = 0.0
    result: Any = None
    error: Exception | None = None
    _done = False
    _event: Event | None = None
    """Made by who has to wait: most of many are done by then."""

    def __init__(self, runtime: Runtime, request: Request, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._runtime = runtime
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        """Where the results go, for those kinds whose results have known shapes."""

    def done(self) -> bool:
        return self._done

    def settle(self, result: Any = None, error: Exception | None = None) -> None:
        self.result, self.error = result, error
        self._done = True
        event = self._event  # looked at after it is done: who makes one later looks whether it is
        if event is not None:
            event.set()

    def wait(self, patience: float) -> Any:
        """The result. The coordinator gives up what stalls; this wait only must not be for ever if that fails."""
        if not self._done:
            self._await(patience)
        if self.error is not None:
            raise self.error
        return self.result if self.finish is None else self.finish(self.result)

    def _await(self, patience: float) -> None:
        event = self._event = self._runtime.event()
        why = f"{self.request.kind} '{self.request.label}' to be submitted by all ranks"
        if not self._done and not event.wait(patience, why, hang=True):
            raise HorovodInternalError(f"after {patience:.3g} s this rank still waits for {why}")


class Handles:
    """The numbers under which operations are known to the user; each is waited for once.

    >>> Handles(lock=__import__("contextlib").nullcontext()).peek(3)
    Traceback (most recent call last):
    ...
    syncline.errors.IncompatibleError: Handle 3 was not created or has been cleared. Each is waited for once.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._numbers = count(1)  # never 0: scripts ask `if handle`
        self._held: dict[int, Any] = {}

    def add(self, waiter: Any) -> int:
        """A number for something that can be waited for."""
        with self._lock:
            number = next(self._numbers)
            self._held[number] = waiter
        return number

    def peek(self, number: int) -> Any:
        """What a number stands for."""
        with self._lock:
            found = self._held.get(number)
        if found is None:
            raise IncompatibleError(f"Handle {number} was not created or has been cleared. Each is waited for once.")
        return found

    def take(self, number: int) -> Any:
        """Remove a handle and return what it stood for; None for an unknown number."""
        with self._lock:
            return self._held.pop(number, None)
