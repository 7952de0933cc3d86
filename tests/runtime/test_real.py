"""The runtime contract on threads and the wall clock."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import pytest

from syncline.runtime import RealRuntime, Task

LONG = 60.0
"""Seconds that no wait takes unless something is broken."""
SHORT = 0.02
"""Seconds for a wait that is meant to end by its timeout."""

place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


@pytest.fixture
def runtime() -> RealRuntime:
    return RealRuntime()


def test_spawn_and_join(runtime: RealRuntime) -> None:
    """A task gets its arguments, runs beside its spawner, and is done when joined."""
    seen: list[tuple[int, str]] = []
    go = runtime.event()

    def work(number: int, word: str) -> None:
        assert go.wait(LONG)
        seen.append((number, word))

    task = runtime.spawn(work, 3, "three", name="worker")
    assert task.name == "worker"
    assert not task.done()
    assert task.join(SHORT) is False
    go.set()
    assert task.join(LONG) is True
    assert task.done()
    assert seen == [(3, "three")]


def test_join_raises_what_the_task_raised(runtime: RealRuntime) -> None:
    """The error comes out of `join`, the very same, each time."""
    error = ValueError("wrong")

    def work() -> None:
        raise error

    task = runtime.spawn(work)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong") as caught:
            task.join(LONG)
        assert caught.value is error
    assert task.done()


def test_join_raises_even_exits(runtime: RealRuntime) -> None:
    """SystemExit in a task ends the task, and `join` raises it."""

    def work() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        runtime.spawn(work).join(LONG)


def test_context_is_copied(runtime: RealRuntime) -> None:
    """A task sees the spawner's context variables as they were, and what it sets stays its own."""
    seen: list[str] = []
    go = runtime.event()

    def work() -> None:
        assert go.wait(LONG)
        seen.append(place.get())
        place.set("task")

    token = place.set("spawner")
    try:
        task = runtime.spawn(work)
        place.set("later")
        go.set()
        task.join(LONG)
        assert seen == ["spawner"]
        assert place.get() == "later"
    finally:
        place.reset(token)


def test_event(runtime: RealRuntime) -> None:
    """A wait ends with False at its timeout and with True when set; `clear` starts over."""
    event = runtime.event()
    assert not event.is_set()
    assert event.wait(SHORT, why="nobody sets it") is False
    assert event.wait(0.0) is False
    event.set()
    assert event.is_set()
    assert event.wait(0.0) is True
    assert event.wait() is True
    event.clear()
    assert not event.is_set()
    assert event.wait(SHORT, hang=True) is False


def test_event_wakes_every_waiter(runtime: RealRuntime) -> None:
    """All tasks that wait go on when the event is set."""
    event, ready = runtime.event(), runtime.queue(3)

    def work() -> None:
        ready.put(None, LONG)
        assert event.wait(LONG)

    tasks = [runtime.spawn(work) for _ in range(3)]
    for _ in tasks:
        ready.get(LONG)
    event.set()
    assert all(task.join(LONG) for task in tasks)


def test_queue_keeps_order(runtime: RealRuntime) -> None:
    """First in, first out; its length is what it holds."""
    queue = runtime.queue(3)
    for item in "abc":
        queue.put(item)
    assert len(queue) == 3
    assert [queue.get(LONG) for _ in range(3)] == ["a", "b", "c"]
    assert len(queue) == 0


@pytest.mark.parametrize("timeout", [SHORT, 0.0, -1.0])
def test_queue_timeouts(runtime: RealRuntime, timeout: float) -> None:
    """A full queue refuses `put` and an empty one `get`, with TimeoutError, also when no time was left at all."""
    queue = runtime.queue(1)
    with pytest.raises(TimeoutError, match=f"the queue stayed empty for {timeout} s"):
        queue.get(timeout)
    queue.put("a")
    with pytest.raises(TimeoutError, match=f"the queue stayed full for {timeout} s"):
        queue.put("b", timeout)
    assert queue.get(LONG) == "a"
    assert len(queue) == 0


def test_queue_blocks_until_there_is_room(runtime: RealRuntime) -> None:
    """A task that puts into a full queue goes on when an item is taken."""
    queue = runtime.queue(1)
    queue.put("a")
    task = runtime.spawn(queue.put, "b")
    assert task.join(SHORT) is False
    assert queue.get(LONG) == "a"
    assert task.join(LONG)
    assert queue.get(LONG) == "b"


def test_queue_blocks_until_there_is_an_item(runtime: RealRuntime) -> None:
    """A task that takes from an empty queue goes on when an item is put."""
    queue, seen = runtime.queue(1), runtime.queue(1)
    task = runtime.spawn(lambda: seen.put(queue.get()))
    assert task.join(SHORT) is False
    queue.put("a", LONG)
    assert task.join(LONG)
    assert seen.get(LONG) == "a"


@pytest.mark.parametrize("capacity", [0, -1])
def test_queues_are_bounded(runtime: RealRuntime, capacity: int) -> None:
    """A queue without a bound, or without room, is refused."""
    with pytest.raises(ValueError, match=rf"at least one item \(capacity: {capacity}\)"):
        runtime.queue(capacity)


def holder(runtime: RealRuntime) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Counts the tasks inside a lock, and records whether two were inside at once."""
    lock, inside, crowded = runtime.lock(), [0], [False]

    def enter() -> None:
        with lock:
            inside[0] += 1
            crowded[0] |= inside[0] > 1
            runtime.event().wait(1e-4)  # give the others a chance to come in
            inside[0] -= 1

    return enter, lambda: crowded[0]


def test_lock_excludes(runtime: RealRuntime) -> None:
    """Of many tasks, one at a time is inside."""
    enter, crowded = holder(runtime)
    tasks = [runtime.spawn(lambda: [enter() for _ in range(10)]) for _ in range(4)]
    assert all(task.join(LONG) for task in tasks)
    assert not crowded()


def test_lock_is_held_until_left(runtime: RealRuntime) -> None:
    """The second task enters when the first has left, also if that one raised an error."""
    lock = runtime.lock()
    inside = runtime.event()
    tasks: list[Task] = []

    def second() -> None:
        with lock:
            inside.set()

    def first() -> None:
        with lock:
            tasks.append(runtime.spawn(second))
            assert inside.wait(SHORT) is False
            raise KeyError

    with pytest.raises(KeyError):
        first()
    assert inside.wait(LONG)
    assert tasks[0].join(LONG)


def test_now_never_goes_back(runtime: RealRuntime) -> None:
    """Readings do not fall, and a wait shows in them."""
    readings = [runtime.now() for _ in range(1000)]
    assert readings == sorted(readings)
    before = runtime.now()
    assert not runtime.event().wait(SHORT)
    assert runtime.now() - before >= SHORT / 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.001])
def test_sleep_takes_at_least_its_time(runtime: RealRuntime, seconds: float) -> None:
    """Sleeping lasts as long as asked, and a time in the past is no error."""
    before = runtime.now()
    runtime.sleep(seconds)
    assert runtime.now() - before >= seconds
