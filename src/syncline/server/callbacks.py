"""Calls back when answers are there: a bounded number of tasks for each client.

request with a callback ─► a task is free? ─► it waits for the answers, calls back, and is free again
                              └ no: the caller waits; a callback that asks for another leaves it to its own task
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar

from syncline.errors import WorldError
from syncline.runtime import Runtime
from syncline.server.future import Future
from syncline.server.protocol import WINDOW

__all__ = ["Callbacks"]

Callback = Callable[[Future], None]


class _Task:
    """What one task has to do yet."""

    def __init__(self, of: Callbacks) -> None:
        self.of = of
        self.rest: deque[tuple[Future, Callback]] = deque()


_current: ContextVar[_Task | None] = ContextVar("syncline_callback", default=None)
"""The task that is calling back: it must not wait for a task to be free, as it may be the one."""


class Callbacks:
    """The callbacks of one client, at most `WINDOW` at once."""

    def __init__(self, runtime: Runtime, patience: float) -> None:
        self._runtime = runtime
        self._patience = patience
        self._lock = runtime.lock()
        self._busy = 0
        self._freed = runtime.event()

    def add(self, future: Future, callback: Callback) -> None:
        """Have the future waited for, and the callback called with it."""
        until = self._runtime.now() + self._patience
        own = _current.get()
        while True:
            with self._lock:
                if self._busy < WINDOW:
                    self._busy += 1
                    break
                self._freed.clear()
            if own is not None and own.of is self:
                own.rest.append((future, callback))
                return
            left = until - self._runtime.now()
            if left <= 0 or not self._freed.wait(left, f"one of {WINDOW} callbacks to return", hang=True):
                raise WorldError(
                    f"{WINDOW} callbacks have not returned within {self._patience:.0f} s, and no more are called at "
                    "once: let them return, or wait for futures instead"
                )
        self._runtime.spawn(self._run, future, callback, name="callback")

    def _run(self, future: Future, callback: Callback) -> None:
        task = _Task(self)
        _current.set(task)
        task.rest.append((future, callback))
        try:
            while task.rest:
                _call_back(*task.rest.popleft())
        finally:
            with self._lock:
                self._busy -= 1
                self._freed.set()


def _call_back(future: Future, callback: Callback) -> None:
    try:
        future.wait()
    finally:
        callback(future)
