"""The runtime contract on the simulator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from syncline.runtime.base import Event, Lock, Queue, Task
from syncline.runtime.simulator import SimulatedTask, Simulator

__all__ = ["SimulatedRuntime"]


class SimulatedRuntime:
    """The runtime of one simulated rank."""

    def __init__(self, simulator: Simulator, rank: int) -> None:
        self.simulator = simulator
        self.rank = rank

    def spawn(self, fn: Callable[..., Any], *args: Any, name: str = "task") -> Task:
        return self.simulator.spawn(self.rank, name, fn, *args)

    def event(self) -> Event:
        return _SimulatedEvent(self.simulator)

    def queue(self, capacity: int) -> Queue[Any]:
        return _SimulatedQueue(self.simulator, capacity)

    def lock(self, short: bool = False) -> Lock:
        # One task runs at a time, and others run only while it waits: a short lock is always free.
        return threading.Lock() if short else _SimulatedLock(self.simulator)  # type: ignore[return-value]

    def sleep(self, seconds: float) -> None:
        self.sleep_until(self.simulator.now + max(0.0, seconds))

    def sleep_until(self, time: float) -> None:
        """Sleep until that virtual time."""
        self.simulator.wake(self.simulator.running(), at=time)
        self.simulator.block(_Until(time))

    def now(self) -> float:
        return self.simulator.now


class _Until:
    """What a sleeping task waits for. The text is made only for a deadlock report."""

    __slots__ = ("_time",)

    def __init__(self, time: float) -> None:
        self._time = time

    def __str__(self) -> str:
        return f"t={self._time:.6g} s"


class _Waiters:
    """The waiting tasks, in order of arrival."""

    __slots__ = ("simulator", "tasks")

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.tasks: list[SimulatedTask] = []

    def wait(self, timeout: float | None, why: object, hang: bool = False) -> bool:
        task = self.simulator.running()
        self.tasks.append(task)
        try:
            return self.simulator.block_until(timeout, why, hang)
        finally:
            if task in self.tasks:
                self.tasks.remove(task)

    def wake_one(self) -> None:
        if self.tasks:
            self.simulator.wake(self.tasks.pop(0))


class _SimulatedEvent(_Waiters):
    __slots__ = ("_flag",)

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.tasks, self._flag = simulator, [], False

    def set(self) -> None:
        self._flag = True
        if self.tasks:
            for task in self.tasks:
                self.simulator.wake(task)
            self.tasks.clear()

    def clear(self) -> None:
        self._flag = False

    def is_set(self) -> bool:
        return self._flag

    def wait(self, timeout: float | None = None, why: object = "", hang: bool = False) -> bool:
        return self._flag or super().wait(timeout, why or "an event", hang)


class _SimulatedQueue:
    def __init__(self, simulator: Simulator, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a queue holds at least one item (capacity: {capacity})")
        self.simulator = simulator
        self._capacity = capacity
        self._items: deque[Any] = deque()
        self._putters = _Waiters(simulator)
        self._getters = _Waiters(simulator)

    def put(self, item: Any, timeout: float | None = None) -> None:
        deadline = None if timeout is None else self.simulator.now + timeout
        while len(self._items) >= self._capacity:
            left = None if deadline is None else deadline - self.simulator.now
            if (left is not None and left < 0) or not self._putters.wait(left, "room in a full queue"):
                raise TimeoutError(f"the queue stayed full for {timeout} s")
        self._items.append(item)
        self._getters.wake_one()

    def get(self, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self.simulator.now + timeout
        while not self._items:
            left = None if deadline is None else deadline - self.simulator.now
            if (left is not None and left < 0) or not self._getters.wait(left, "an item in an empty queue"):
                raise TimeoutError(f"the queue stayed empty for {timeout} s")
        item = self._items.popleft()
        self._putters.wake_one()
        return item

    def __len__(self) -> int:
        return len(self._items)


class _SimulatedLock(_Waiters):
    __slots__ = ("_held",)

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(simulator)
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            self.wait(None, "a lock that another task holds")
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = False
        if self.tasks:
            self.wake_one()
