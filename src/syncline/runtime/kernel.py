"""The simulator's kernel: tasks that pass a baton, and a queue of things to happen in virtual time.

One task runs at a time; it hands over only inside `block`. Whoever hands over looks up what happens next
itself, so that a switch costs one wake-up of one thread::

    task A                      kernel state                task B
    ───────                     ────────────                ───────
    block("recv from B")  ──►   pop entries, fire them
                                 … entry resumes B    ──►   returns from its block()
    (waits for its baton)                                   send(A) schedules a delivery
                                 pop: delivery → resume A   block(…)
    returns from block    ◄──

Time advances only when nothing is left to do at the present instant. In chaos mode the seed draws any pending
entry instead of the earliest; deadlines then fire only when nothing else is left.
"""

from __future__ import annotations

import contextvars
import heapq
import math
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

from syncline.errors import DeadlockError
from syncline.runtime.hosting import calm_collector, one_processor, one_torch_thread
from syncline.runtime.randomness import RandomStates

__all__ = ["Entry", "Interrupted", "Kernel", "SimulatedTask"]

Fire = Callable[[], "SimulatedTask | None"]
NEVER = math.inf
PROGRESS_EVERY_S = 1.0
"""Seconds of real time between two calls of `progress`."""


class Interrupted(BaseException):
    """Unwinds a simulated task whose rank was killed or whose simulation is over. Not for catching."""


class Entry:
    """Something that is to happen: a task resumes, a message arrives, a deadline passes."""

    __slots__ = ("fire", "live", "time")

    def __init__(self, time: float, fire: Fire) -> None:
        self.time = time
        self.fire = fire
        self.live = True


class SimulatedTask:
    """A task of one rank: a thread that runs only while it holds the baton."""

    def __init__(self, kernel: Kernel, rank: int, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.rank = rank
        self.name = name
        self.result: Any = None
        self.error: BaseException | None = None
        self.claimed = False  # somebody has seen the error
        self.why = ""
        self.since = 0.0
        self.hangs_at = NEVER
        self.hung = False
        self.interrupt = False
        self._finished = False
        self._joiners: list[SimulatedTask] = []
        self.resume_entry: Entry | None = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._run, args=(fn, args), daemon=True, name=f"rank{rank}-{name}")

    def start(self) -> None:
        """Let the thread come to its first wait for the baton."""
        self._thread.start()

    def started(self) -> bool:
        return self._thread.ident is not None

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.baton.acquire()
        try:
            if not self.interrupt:
                self.result = self._context.run(fn, *args)
        except Interrupted:
            pass
        except BaseException as error:
            self.error = error
        self._finished = True
        self.kernel.finished(self)

    def done(self) -> bool:
        return self._finished

    def join(self, timeout: float | None = None) -> bool:
        kernel = self.kernel
        if not self._finished:
            waiter = kernel.running()
            self._joiners.append(waiter)
            if not kernel.block_until(timeout, f"task {self.name!r} of rank {self.rank} to end"):
                self._joiners.remove(waiter)
                return False
        if self.error is not None:
            self.claimed = True
            raise self.error
        return True

    def wake_joiners(self) -> None:
        for joiner in self._joiners:
            self.kernel.wake(joiner)
        self._joiners.clear()

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


class Kernel:
    """Virtual time and the order of events, drawn from a seed."""

    def __init__(self, seed: int = 0, chaos: bool = False) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.chaos = chaos
        self.faulted = False
        """Set once a fault has struck: from then on silence is no proof of a deadlock, deadlines decide."""
        self.stopping = False
        self.deadlock: DeadlockError | None = None
        self.on_finish: Callable[[SimulatedTask], None] = lambda task: None
        self.tasks: list[SimulatedTask] = []
        self._states = RandomStates(seed)
        self._heap: list[tuple[float, float, int, Entry]] = []
        self._pool: list[Entry] = []
        self._sequence = 0
        self._hang_bound = NEVER  # no waiting task gives up before this
        self._current: SimulatedTask | None = None
        self._mains: set[SimulatedTask] = set()
        self._main_ranks: set[int] = set()
        self._outside = threading.Lock()
        self._outside.acquire()

    # What happens next.

    def schedule(self, delay: float, fire: Fire, *, deadline: bool = False) -> Entry:
        """Let `fire` happen `delay` seconds from now; it returns the task to resume, or None."""
        return self.schedule_at(self.now + delay, fire, deadline=deadline)

    def schedule_at(self, time: float, fire: Fire, *, deadline: bool = False) -> Entry:
        """Let `fire` happen at that time, or now if that has passed."""
        entry = Entry(time, fire)
        if self.chaos and not deadline:
            self._pool.append(entry)
        else:
            self._sequence += 1
            heapq.heappush(self._heap, (entry.time, self.random.random(), self._sequence, entry))
        return entry

    def cancel(self, entry: Entry) -> None:
        """Take back what has not happened yet."""
        entry.live = False

    def _pop(self) -> Entry | None:
        pool = self._pool
        while pool:
            index = self.random.randrange(len(pool))
            pool[index], pool[-1] = pool[-1], pool[index]
            entry = pool.pop()
            if entry.live:
                return entry
        while self._heap:
            entry = heapq.heappop(self._heap)[3]
            if entry.live:
                return entry
        return None

    def _next(self) -> SimulatedTask | None:
        """Fire entries until one resumes a task; None when all ranks are through."""
        while True:
            if not self._mains and not self.stopping:
                self.stop()
            if self.stopping and all(task.done() for task in self.tasks):
                return None
            entry = self._pop()
            if entry is None or (entry.time > self._hang_bound and not self.chaos):
                task = self._give_up(NEVER if entry is None else entry.time)
                if entry is not None and task is not None:
                    self._sequence += 1
                    heapq.heappush(self._heap, (entry.time, 0.0, self._sequence, entry))  # its time comes later
                if task is not None:
                    return task
                if entry is None:
                    self._call_deadlock()
                    continue
            self.cancel(entry)
            if entry.time > self.now:
                self.now = entry.time
            task = entry.fire()
            if task is not None and not task.done():
                return task

    def _give_up(self, before: float) -> SimulatedTask | None:
        """The task whose patience ends first, if it ends before that time: something is broken, and it is to say so.

        With nothing else left to happen that is a deadlock, unless a fault has struck that would explain the silence.
        """
        waiting = [task for task in self.tasks if not task.done() and task.hangs_at < NEVER]
        first = min(waiting, key=lambda task: task.hangs_at, default=None)
        self._hang_bound = NEVER if first is None else first.hangs_at
        if first is None or first.hangs_at >= before or (before == NEVER and not self.faulted) or self.stopping:
            return None
        self.now = max(self.now, first.hangs_at)
        first.hung = True
        return first

    def _call_deadlock(self) -> None:
        waiting = [
            f"  {task} waits since t={task.since:.6g} s for {task.why or 'something it did not name'}"
            for task in self.tasks
            if not task.done()
        ]
        failed = [f"  {task} has failed: {task.error!r}" for task in self.tasks if task.error is not None]
        ended = sorted(self._main_ranks - {task.rank for task in self._mains})
        gone = [f"  ended already: rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))}"] if ended else []
        self.deadlock = DeadlockError(
            "\n".join([f"deadlock at t={self.now:.6g} s: nobody can go on", *waiting, *failed, *gone])
        )
        self.stop()

    # Tasks.

    def spawn(self, rank: int, name: str, fn: Callable[..., Any], *args: Any, main: bool = False) -> SimulatedTask:
        """A new task of `rank`. The simulation lasts until every main task has ended."""
        task = SimulatedTask(self, rank, name, fn, args)
        self.tasks.append(task)
        if main:
            self._mains.add(task)
            self._main_ranks.add(rank)
        self.wake(task)
        return task

    def running(self) -> SimulatedTask:
        """The task that holds the baton."""
        assert self._current is not None, "only simulated tasks may wait on the simulator"
        return self._current

    def wake(self, task: SimulatedTask, at: float | None = None) -> None:
        """Let a blocked task go on, now or at a later time."""
        if task.resume_entry is None or not task.resume_entry.live:
            task.resume_entry = self.schedule_at(self.now if at is None else at, lambda: task)

    def block(self, why: str) -> None:
        """Hand the baton over until somebody wakes the running task."""
        task = self.running()
        if self.stopping or task.interrupt:
            raise Interrupted
        task.why, task.since = why, self.now
        following = self._next()
        if following is not task:
            self._hand_to(following)
            task.baton.acquire()
        task.why = ""
        if task.interrupt:
            raise Interrupted

    def block_until(self, timeout: float | None, why: str, hang: bool = False) -> bool:
        """Block until woken (True) or until the timeout passes (False)."""
        if timeout is None:
            self.block(why)
            return True
        task = self.running()
        if hang:
            task.hung, task.hangs_at = False, self.now + timeout
            self._hang_bound = min(self._hang_bound, task.hangs_at)
            try:
                self.block(why)
            finally:
                task.hangs_at = NEVER
            return not task.hung
        expired = False

        def expire() -> SimulatedTask | None:
            nonlocal expired
            if task.resume_entry is not None and task.resume_entry.live:
                return None  # woken at this very instant
            expired = True
            return task

        deadline = self.schedule(timeout, expire, deadline=True)
        try:
            self.block(why)
        finally:
            self.cancel(deadline)
        return not expired

    def finished(self, task: SimulatedTask) -> None:
        """The last act of a task's thread: pass the baton on for good."""
        self._mains.discard(task)
        task.wake_joiners()
        self.on_finish(task)
        self._hand_to(self._next())

    def _hand_to(self, task: SimulatedTask | None) -> None:
        self._states.switch(task.rank if task is not None else None)
        self._current = task
        if task is None:
            self._outside.release()
            return
        if not task.started():
            task.start()
        task.baton.release()

    # Beginning and end.

    def run(self, progress: Callable[[], None] | None = None) -> None:
        """Run until every main task has ended. Called from outside, by a thread that is no task.

        That thread calls `progress` about every second of real time. An exception from it ends the run, as Ctrl-C does.
        """
        with one_processor(), calm_collector(), one_torch_thread():
            self._states.enter()
            try:
                self._hand_to(self._next())
                try:
                    while not self._outside.acquire(timeout=-1 if progress is None else PROGRESS_EVERY_S):
                        assert progress is not None, "otherwise the wait has no timeout"
                        progress()
                except BaseException:  # Ctrl-C: unwind the tasks, then let it through
                    self.stopping = True
                    self._outside.acquire()
                    raise
            finally:
                self._states.leave()

    def interrupt(self, tasks: Iterable[SimulatedTask]) -> None:
        """Unwind these tasks wherever they wait."""
        for task in tasks:
            if not task.done():
                task.interrupt = True
                if task.resume_entry is not None:
                    self.cancel(task.resume_entry)  # it may be asleep
                self.wake(task)

    def stop(self) -> None:
        """End the simulation: every task is unwound."""
        self.stopping = True
        self.interrupt(self.tasks)
