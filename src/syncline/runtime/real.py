"""The runtime on threads and the wall clock."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from syncline.runtime.base import Event, Lock, Queue, Task

__all__ = ["RealRuntime", "caller"]

logger = logging.getLogger("syncline")


def caller() -> int:
    """The identifier of the calling thread."""
    return threading.get_ident()


class RealRuntime:
    """Tasks are daemon threads, so that a running one does not keep the process from ending.

    >>> runtime = RealRuntime()
    >>> done = runtime.event()
    >>> task = runtime.spawn(done.set)
    >>> done.wait(timeout=10)
    True
    """

    def spawn(self, fn: Callable[..., Any], *args: Any, name: str = "task") -> Task:
        return _ThreadTask(fn, args, name)

    def event(self) -> Event:
        return _ThreadEvent()

    def queue(self, capacity: int) -> Queue[Any]:
        return _ThreadQueue(capacity)

    def lock(self, short: bool = False) -> Lock:
        return threading.Lock()  # type: ignore[return-value]  # its __enter__ returns bool

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    now = staticmethod(time.monotonic)


class _ThreadTask:
    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self.name = name
        self._error: BaseException | None = None
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._run, args=(fn, args), name=f"syncline-{name}", daemon=True)
        self._thread.start()

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._context.run(fn, *args)
        except BaseException as error:
            self._error = error
            logger.debug("task %s ended with %r", self.name, error)

    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


class _ThreadEvent:
    def __init__(self) -> None:
        self._event = threading.Event()
        self.set, self.clear, self.is_set = self._event.set, self._event.clear, self._event.is_set

    def wait(self, timeout: float | None = None, why: object = "", hang: bool = False) -> bool:
        return self._event.wait(timeout)


class _ThreadQueue:
    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a queue holds at least one item (capacity: {capacity})")
        self._queue: queue.Queue[Any] = queue.Queue(capacity)

    def put(self, item: Any, timeout: float | None = None) -> None:
        try:
            self._queue.put(item, timeout=None if timeout is None else max(0.0, timeout))
        except queue.Full:
            raise TimeoutError(f"the queue stayed full for {timeout} s") from None

    def get(self, timeout: float | None = None) -> Any:
        try:
            return self._queue.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"the queue stayed empty for {timeout} s") from None

    def __len__(self) -> int:
        return self._queue.qsize()
