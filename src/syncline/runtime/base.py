"""The contract of concurrency."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Event", "Lock", "Queue", "Runtime", "Task"]

T = TypeVar("T")


class Task(Protocol):
    """Something that runs beside its spawner."""

    name: str

    def done(self) -> bool:
        """Whether it has returned or raised."""
        ...

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; False when the timeout came first. Raises what the task raised."""
        ...


class Event(Protocol):
    """A flag that tasks wait for."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None, why: object = "", hang: bool = False) -> bool:
        """Wait until set; False when the timeout came first.

        `str(why)` names the peer and the operation, in a report of who waits for whom. `hang` marks a timeout that
        stands for "something is broken" rather than for a plan: the simulator does not wait for it to
        pass before it calls a deadlock by its name.
        """
        ...


class Queue(Protocol, Generic[T]):
    """A bounded line of items between tasks. A timeout that passes raises `TimeoutError`."""

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
    """Where concurrent code runs: on threads and the wall clock, or in the simulator."""

    def spawn(self, fn: Callable[..., Any], *args: Any, name: str = "task") -> Task:
        """Start `fn(*args)` as a task, in a copy of the caller's context."""
        ...

    def event(self) -> Event: ...

    def queue(self, capacity: int) -> Queue[Any]: ...

    def lock(self) -> Lock: ...

    def sleep(self, seconds: float) -> None: ...

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        ...
