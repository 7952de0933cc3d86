"""The runtime contract: tasks, events, queues, locks and time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Event", "Lock", "Queue", "Runtime", "Task"]

T = TypeVar("T")


class Task(Protocol):
    """A function that runs concurrently with its caller."""

    name: str

    def done(self) -> bool:
        """Whether it has returned or raised."""
        ...

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it ends; False at the timeout. Raises the exception of the task."""
        ...


class Event(Protocol):
    """A flag that tasks wait for."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None, why: object = "", hang: bool = False) -> bool:
        """Wait until set; False at the timeout.

        `str(why)` names the peer and the operation in a deadlock report. `hang` marks a timeout that means an error:
        the simulator reports a deadlock without waiting for it.
        """
        ...


class Queue(Protocol, Generic[T]):
    """A bounded queue of items between tasks. At the timeout it raises a `TimeoutError`."""

    def put(self, item: T, timeout: float | None = None) -> None: ...

    def get(self, timeout: float | None = None) -> T: ...

    def __len__(self) -> int: ...


class Lock(Protocol):
    """Mutual exclusion; used with `with`."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Runtime(Protocol):
    """Runs concurrent code: on threads and the wall clock, or in the simulator."""

    def spawn(self, fn: Callable[..., Any], *args: Any, name: str = "task") -> Task:
        """Start `fn(*args)` as a task, in a copy of the caller's context."""
        ...

    def event(self) -> Event: ...

    def queue(self, capacity: int) -> Queue[Any]: ...

    def lock(self, short: bool = False) -> Lock:
        """Make a lock. `short` promises that no task waits for anything while it holds the lock."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        ...
