"""The simulator: tasks that run one at a time, and a queue of events in virtual time.

One task runs at a time, and another one can run only while it is in `block`. The task that blocks processes the next
events itself, so that a switch goes directly from one task to the next::

    task A                      simulator                   task B
    ───────                     ─────────                   ───────
    block("recv from B")  ──►   pop entries, fire them
                                 … entry resumes B    ──►   returns from its block()
    (waits)                                                 send(A) schedules a delivery
                                 pop: delivery → resume A   block(…)
    returns from block    ◄──

Tasks are greenlets of one thread, the home thread: a switch wakes no other thread. A backward pass runs on a separate
thread, because torch cannot interleave two of them on one thread. With `threads=True` each task is a thread. A thread
waits for its `resume_lock`. The home thread waits for such a lock too while another thread runs.

Time advances only when no event is left at the present time. In chaos mode the seed draws any pending event instead
of the earliest. Deadlines then fire only when no other event is left.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import math
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, NoReturn

import torch
from greenlet import getcurrent, greenlet
from torch.autograd import Variable

from syncline.errors import DeadlockError, UnsupportedError
from syncline.runtime.thread_state import RandomStates, ThreadState

__all__ = [
    "Interrupted",
    "ScheduledEvent",
    "SimulatedTask",
    "Simulator",
    "backward_on_threads",
    "one_processor",
    "one_torch_thread",
    "rare_garbage_collection",
]

logger = logging.getLogger("syncline")


@contextmanager
def one_processor() -> Iterator[None]:
    """Keep this thread, and those it starts, on its current processor, if the system allows it.

    Only one task of a simulation runs at a time, and waking a thread on another processor takes longer.
    """
    try:
        allowed = os.sched_getaffinity(0)
        # The 39th field of stat; the 2nd is a name in brackets that may hold spaces.
        here = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
        os.sched_setaffinity(0, {here} & allowed or {min(allowed)})
    except (AttributeError, OSError, ValueError, IndexError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Use one torch thread: one pool per rank would overload the machine, and sums would vary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage less often: a simulation makes millions of small objects without cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100 * max(700, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


_variable: Any = Variable
_engine_type: Any = type(_variable._execution_engine)
_call_by_thread: dict[int, Callable[..., Any]] = {}
_lock = threading.Lock()


class _ThreadedEngine(_engine_type):  # type: ignore[misc]
    """torch's engine. Backward passes that begin on the simulator's thread run on separate threads."""

    def run_backward(self, *args: Any, **options: Any) -> Any:
        call = _call_by_thread.get(threading.get_ident())
        run = super().run_backward
        return run(*args, **options) if call is None else call(run, *args, **options)


@contextmanager
def backward_on_threads(call: Callable[..., Any]) -> Iterator[None]:
    """Let `call(run, *args, **options)` run the backward passes that begin on this thread."""
    with _lock:
        if not _call_by_thread:
            _variable._execution_engine = _ThreadedEngine()
        _call_by_thread[threading.get_ident()] = call
    try:
        yield
    finally:
        with _lock:
            del _call_by_thread[threading.get_ident()]
            if not _call_by_thread:
                _variable._execution_engine = _engine_type()


Fire = Callable[[], "SimulatedTask | None"]
NEVER = math.inf
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that calls this function, or −1 outside of one."""
SLOW_BACKWARD_S = 5.0
"""Seconds of real time after which a backward pass that has not waited for others is logged as a warning."""
PROGRESS_EVERY_S = 1.0
"""Seconds of real time between two calls of `progress`."""


class Interrupted(BaseException):
    """Ends a simulated task whose rank was killed or whose simulation is over. Do not catch it."""


class ScheduledEvent:
    """An event in the future: a task resumes, a message arrives, a deadline passes."""

    __slots__ = ("fire", "live", "time")

    def __init__(self, time: float, fire: Fire | SimulatedTask) -> None:
        self.time = time
        self.fire: Fire | SimulatedTask = fire
        self.live = True


class SimulatedTask:
    """A task of one rank: a greenlet of the home thread, or a thread that runs only while it holds its resume_lock."""

    def __init__(
        self, simulator: Simulator, rank: int, name: str, fn: Callable[..., Any], args: tuple[Any, ...], threads: bool
    ) -> None:
        self.simulator = simulator
        self.rank = rank
        self.name = name
        self.thread_name = f"rank{rank}-{name}"
        self.result: Any = None
        self.error: BaseException | None = None
        self.error_seen = False  # a caller has received the error
        self.why: object = ""
        self.since = 0.0
        self.hangs_at = NEVER
        self.hung = False
        self.interrupt = False
        self.draws = True
        """Whether this task may draw random numbers before its next wait."""
        self.default_modes = False
        """Whether torch's modes are known to be those of a new thread until the next wait of this task."""
        self._finished = False
        self._joiners: list[SimulatedTask] = []
        self.resume_entry: ScheduledEvent | None = None
        self.resume_lock = make_resume_lock() if threads else None
        """The lock that its thread waits for; None while it runs on the home thread."""
        self._work = (fn, args)
        self._context = contextvars.copy_context()
        self._started = False
        self.greenlet: greenlet | None = None

    def switch(self) -> SimulatedTask | None:
        """Resume this task. Called by the hub. Returns the task to resume next, or None if a thread runs next."""
        if self.greenlet is None:
            self._started = True
            self.greenlet = greenlet(self._run, parent=self.simulator.hub)
        following: SimulatedTask | None = self.greenlet.switch()
        return following

    def release(self) -> None:
        """Resume this task on its thread."""
        assert self.resume_lock is not None, "a task without a thread is switched to"
        if not self._started:
            self._started = True
            threading.Thread(
                target=self._run_on_thread, args=(self.resume_lock,), daemon=True, name=self.thread_name
            ).start()
        self.resume_lock.release()

    def _run_on_thread(self, resume_lock: threading.Lock) -> None:
        resume_lock.acquire()
        try:
            self._run()
        except BaseException as error:
            self.simulator.end(error)

    def _run(self) -> SimulatedTask | None:
        fn, args = self._work
        del self._work
        try:
            if not self.interrupt:
                self.result = self._context.run(fn, *args)
        except Interrupted:
            pass
        except BaseException as error:
            self.error = error
        del fn, args
        if self.resume_lock is None:
            self._reset_thread_state()
        self._finished = True
        return self.simulator.finished(self)

    def _reset_thread_state(self) -> None:
        """Reset the modes that this task has set and not reset, because other tasks use the home thread."""
        try:
            self.simulator.thread_state.save_and_reset()
        except UnsupportedError as error:
            self.error = self.error or error

    def done(self) -> bool:
        return self._finished

    def join(self, timeout: float | None = None) -> bool:
        simulator = self.simulator
        if not self._finished:
            waiter = simulator.running()
            self._joiners.append(waiter)
            if not simulator.block_until(timeout, f"task {self.name!r} of rank {self.rank} to end"):
                self._joiners.remove(waiter)
                return False
        if self.error is not None:
            self.error_seen = True
            raise self.error
        return True

    def wake_joiners(self) -> None:
        for joiner in self._joiners:
            self.simulator.wake(joiner)
        self._joiners.clear()

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


def make_resume_lock() -> threading.Lock:
    """A lock that is already acquired: the next one to acquire it waits for its release."""
    resume_lock = threading.Lock()
    resume_lock.acquire()
    return resume_lock


class _NoUserCode:
    """A context in which the running task executes no user code.

    The task draws no random numbers and changes no mode of torch. A switch need not save and restore them.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def __enter__(self) -> None:
        task = self._simulator.running()
        task.draws = False
        task.default_modes = task.resume_lock is None and self._simulator.thread_state.has_default_modes()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = self._simulator.running()
        task.draws, task.default_modes = True, False
        self._simulator.restore_random_state(task)


class _ThreadCall:
    """A function that a task calls on a separate thread, in the same context and with the same thread state."""

    def __init__(
        self, simulator: Simulator, task: SimulatedTask, restore: Callable[[], None] | None, fn: Callable[[], Any]
    ) -> None:
        self._simulator, self._task, self._restore, self._fn = simulator, task, restore, fn
        self._context: contextvars.Context | None = getcurrent().gr_context
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function. The thread runs this."""
        try:
            worker = greenlet(self._call)
            worker.gr_context = self._context  # a context of Python cannot be entered twice
            worker.switch()
        except BaseException as error:
            self._error = error
        self._simulator.return_home(self._task)

    def _call(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
        try:
            self._result = self._fn()
        finally:
            self._restore = self._simulator.thread_state.save_and_reset()

    def result(self) -> Any:
        """Restore the thread state after the function; return its result or raise its error. Called by the task."""
        if self._restore is not None:
            self._restore()
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class _HomeThread(threading.Thread):
    """The thread of a simulation's greenlets. It has the name of the task that runs on it."""

    def __init__(self, simulator: Simulator, ready: threading.Lock) -> None:
        super().__init__(target=simulator.host, args=(ready,), daemon=True, name="simulator")
        self._simulator = simulator

    @property
    def name(self) -> str:
        task = self._simulator._current
        return "simulator" if task is None or task.resume_lock is not None else task.thread_name

    @name.setter
    def name(self, name: str) -> None:
        self._simulator.running().thread_name = name


class Simulator:
    """Virtual time and the order of events, drawn from a seed."""

    def __init__(self, seed: int = 0, chaos: bool = False, threads: bool = False) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.chaos = chaos
        self.faulted = False
        """Whether a fault has happened. From then on waiting tasks do not prove a deadlock: deadlines decide."""
        self.stopping = False
        self.deadlock: DeadlockError | None = None
        self.on_finish: Callable[[SimulatedTask], None] = lambda task: None
        self.tasks: list[SimulatedTask] = []
        self._states = RandomStates(seed)
        self.no_user_code = _NoUserCode(self)
        self._heap: list[tuple[float, float, int, ScheduledEvent]] = []
        self._unordered: list[ScheduledEvent] = []
        self._sequence = 0
        self._hang_bound = NEVER  # no waiting task times out before this
        self._frozen: dict[int, set[SimulatedTask]] = {}
        """By rank that is frozen: its tasks that were about to run."""
        self._current: SimulatedTask | None = None
        self._mains: set[SimulatedTask] = set()
        self._main_ranks: set[int] = set()
        self._unfinished = 0
        self._threads = threads
        self._outside = make_resume_lock()
        self._home = make_resume_lock()
        self._home_ident = -1
        self._handovers = 0
        self._warned = False
        self._over = False
        self._failure: BaseException | None = None
        self.hub: greenlet | None = None
        """The greenlet of the home thread that waits while a thread runs."""

    # The event queue.

    def schedule(self, delay: float, fire: Fire, *, deadline: bool = False) -> ScheduledEvent:
        """Call `fire` in `delay` seconds; it returns the task to resume, or None."""
        return self.schedule_at(self.now + delay, fire, deadline=deadline)

    def schedule_at(self, time: float, fire: Fire | SimulatedTask, *, deadline: bool = False) -> ScheduledEvent:
        """Call `fire`, or resume a task, at that time, or now if it has passed."""
        entry = ScheduledEvent(time, fire)
        if self.chaos and not deadline:
            self._unordered.append(entry)
        else:
            self._sequence += 1
            heappush(self._heap, (time, self.random.random(), self._sequence, entry))
        return entry

    def cancel(self, entry: ScheduledEvent) -> None:
        """Cancel an event that has not happened yet."""
        entry.live = False

    def _pop(self) -> ScheduledEvent | None:
        unordered, draw = self._unordered, self.random.getrandbits
        while unordered:
            count = len(unordered)
            bits = count.bit_length()
            index = draw(bits)
            while index >= count:  # as random.randrange draws, without its checks
                index = draw(bits)
            unordered[index], unordered[-1] = unordered[-1], unordered[index]
            entry = unordered.pop()
            if entry.live:
                return entry
        heap = self._heap
        while heap:
            entry = heappop(heap)[3]
            if entry.live:
                return entry
        return None

    def _next(self) -> SimulatedTask | None:
        """Process events until one resumes a task; None when all ranks have ended."""
        heap, unordered = self._heap, self._unordered
        while True:
            if not self._mains and not self.stopping:
                self.stop()
            if self.stopping and not self._unfinished:
                return None
            entry = heappop(heap)[3] if heap and not unordered else self._pop()
            if entry is not None and not entry.live:
                continue
            if entry is None or (entry.time > self._hang_bound and not self.chaos):
                task = self._give_up(NEVER if entry is None else entry.time)
                if entry is not None and task is not None:
                    self._sequence += 1
                    heappush(self._heap, (entry.time, 0.0, self._sequence, entry))  # it fires later
                if task is not None:
                    return task
                if entry is None:
                    self._report_deadlock()
                    continue
            entry.live = False
            if entry.time > self.now:
                self.now = entry.time
            fire = entry.fire
            task = fire if isinstance(fire, SimulatedTask) else fire()
            if task is not None and not task._finished:
                if task.rank in self._frozen and not task.interrupt:
                    self._frozen[task.rank].add(task)
                    continue
                return task

    def _give_up(self, before: float) -> SimulatedTask | None:
        """The task that times out first, if it does so before that time. It then reports what is broken.

        If no event is left, it is a deadlock instead, unless a fault has happened that explains the silence.
        """
        waiting = [
            task
            for task in self.tasks
            if not task.done()
            and task.hangs_at < NEVER
            and task.rank not in self._frozen
            and not (task.resume_entry is not None and task.resume_entry.live)
        ]
        first = min(waiting, key=lambda task: task.hangs_at, default=None)
        self._hang_bound = NEVER if first is None else first.hangs_at
        if first is None or first.hangs_at >= before or (before == NEVER and not self.faulted) or self.stopping:
            return None
        self.now = max(self.now, first.hangs_at)
        first.hung = True
        return first

    def _report_deadlock(self) -> None:
        waiting = [
            f"  {task} waits since t={task.since:.6g} s for {task.why or 'something it did not name'}"
            for task in self.tasks
            if not task.done()
        ]
        failed = [f"  {task} has failed: {task.error!r}" for task in self.tasks if task.error is not None]
        ended = sorted(self._main_ranks - {task.rank for task in self._mains})
        gone = [f"  ended already: rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))}"] if ended else []
        self.deadlock = DeadlockError(
            "\n".join([f"deadlock at t={self.now:.6g} s: no task can continue", *waiting, *failed, *gone])
        )
        self.stop()

    # Tasks.

    def spawn(self, rank: int, name: str, fn: Callable[..., Any], *args: Any, main: bool = False) -> SimulatedTask:
        """Start a task of `rank`. The simulation lasts until every main task has ended."""
        task = SimulatedTask(self, rank, name, fn, args, self._threads)
        self.tasks.append(task)
        self._unfinished += 1
        if main:
            self._mains.add(task)
            self._main_ranks.add(rank)
        self.wake(task)
        return task

    def running(self) -> SimulatedTask:
        """The running task."""
        assert self._current is not None, "only simulated tasks may wait on the simulator"
        return self._current

    def wake(self, task: SimulatedTask, at: float | None = None) -> None:
        """Resume a blocked task, now or at a later time."""
        if task.resume_entry is None or not task.resume_entry.live:
            task.resume_entry = self.schedule_at(self.now if at is None else at, task)

    def freeze(self, rank: int) -> None:
        """Stop all tasks of a rank where they wait. Time passes for the others."""
        self._frozen.setdefault(rank, set())

    def thaw(self, rank: int) -> None:
        """Let the tasks of a frozen rank continue."""
        tasks = self._frozen.pop(rank, set())
        for task in (each for each in self.tasks if each in tasks and not each.done()):
            self.wake(task)
        self._hang_bound = self.now  # their waits may have timed out meanwhile

    def block(self, why: object) -> None:
        """Suspend the running task until another wakes it. `str(why)` appears in the deadlock report."""
        task = self._current or self.running()
        if self.stopping or task.interrupt:
            raise Interrupted
        resume_lock = task.resume_lock
        if resume_lock is None and (get_ident() != self._home_ident or current_graph_task() != -1):
            self._refuse_wait()
        task.why, task.since = why, self.now
        following = self._next()
        if following is not task:
            assert following is not None, "the running task has not ended"
            if resume_lock is None:
                self._switch_to(following, task)
            else:
                self._hand_to(following)
                resume_lock.acquire()
        task.why = ""
        if task.interrupt:
            raise Interrupted

    def block_until(self, timeout: float | None, why: object, hang: bool = False) -> bool:
        """Block until woken (True) or until the timeout passes (False)."""
        if timeout is None:
            self.block(why)
            return True
        task = self._current or self.running()
        if hang:
            task.hung, task.hangs_at = False, self.now + timeout
            if task.hangs_at < self._hang_bound:
                self._hang_bound = task.hangs_at
            try:
                self.block(why)
            finally:
                task.hangs_at = NEVER
            return not task.hung
        expired = False

        def expire() -> SimulatedTask | None:
            nonlocal expired
            if task.resume_entry is not None and task.resume_entry.live:
                return None  # it is woken at the same time
            expired = True
            return task

        deadline = self.schedule(timeout, expire, deadline=True)
        try:
            self.block(why)
        finally:
            self.cancel(deadline)
        return not expired

    def finished(self, task: SimulatedTask) -> SimulatedTask | None:
        """End a task. Returns the next task of the home thread; None if that thread waits for its lock."""
        self._mains.discard(task)
        self._unfinished -= 1
        task.wake_joiners()
        self.on_finish(task)
        following = self._next()
        if task.resume_lock is None and following is not None and following.resume_lock is None:
            self._make_current(following)
            return following
        self._hand_to(following)
        return None

    # Switching tasks.

    def restore_random_state(self, task: SimulatedTask) -> None:
        """Give the running task the random-number states of its rank."""
        self._states.switch(task.rank)

    def _make_current(self, task: SimulatedTask | None) -> None:
        if task is not None and task.draws:
            self._states.switch(task.rank)
        self._current = task

    def _to_hub(self, following: SimulatedTask | None) -> None:
        """Let the hub run `following`, or wait for the home thread's lock. Returns when the calling task is resumed."""
        assert self.hub is not None, "the task runs on the home thread"
        self.hub.switch(following)

    def _switch_to(self, following: SimulatedTask, task: SimulatedTask) -> None:
        """On the home thread: let another task run until this one is resumed."""
        try:
            restore = self.thread_state.save_and_reset(task.default_modes)
        except UnsupportedError:
            self.wake(following)
            raise
        if following.resume_lock is None:
            self._make_current(following)
            task.greenlet = getcurrent()  # user code may use greenlets, so this need not be the first one
            if following.greenlet is not None:
                following.greenlet.switch()
            else:  # the hub starts new greenlets, so that their stacks do not begin on top of this one
                self._to_hub(following)
        else:
            task.greenlet = getcurrent()
            self._hand_to(following)
            self._to_hub(None)
        if restore is not None:
            restore()

    def _hand_to(self, task: SimulatedTask | None) -> None:
        """Resume a task on another thread. Without a task the simulation is over."""
        self._handovers += 1
        self._make_current(task)
        if task is None:
            self.end()
        elif task.resume_lock is None:
            self._home.release()
        else:
            try:
                task.release()
            except RuntimeError as error:  # the system starts no more threads
                self.end(error)

    def _refuse_wait(self) -> NoReturn:
        """Refuse a wait that would keep the home thread from running the other tasks."""
        where = "a backward pass" if get_ident() == self._home_ident else "a thread that it has started"
        raise UnsupportedError(
            f"{self._current} of a simulation waits for others inside {where}, where no other rank can run: "
            "call sl.simulate(…, threads=True)"
        )

    def _call_on_thread(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `fn` as the running task on a separate thread. Called on the home thread."""
        task = self.running()
        try:
            restore = self.thread_state.save_and_reset()
        except UnsupportedError:  # then nothing in it may wait for others
            return fn(*args, **options)
        call = _ThreadCall(self, task, restore, partial(fn, *args, **options))
        name = f"{task.thread_name}-backward"
        task.resume_lock = make_resume_lock()  # from here on its waits are those of a thread
        try:
            threading.Thread(target=call.run, daemon=True, name=name).start()
        except RuntimeError:
            task.resume_lock = None
            if restore is not None:
                restore()
            raise
        task.greenlet = getcurrent()
        self._to_hub(None)
        return call.result()

    def return_home(self, task: SimulatedTask) -> None:
        """Resume a task on the home thread after its separate thread has ended."""
        task.resume_lock = None
        self._home.release()

    def host(self, ready: threading.Lock) -> None:
        """The home thread: run greenlets until the simulation is over."""
        try:
            self.thread_state = ThreadState()
            self._home_ident = threading.get_ident()
            self.hub = getcurrent()
            following: SimulatedTask | None = None
            with backward_on_threads(self._call_on_thread):
                ready.release()
                while True:
                    if following is None:
                        self._await_home()
                        following = self._current
                        if following is None:
                            return
                    following = following.switch()
        except BaseException as error:
            self.end(error)
        finally:
            if ready.locked():
                ready.release()

    def _await_home(self) -> None:
        """Wait until a task runs on the home thread. Warn once about a backward pass that neither ends nor waits."""
        handovers = self._handovers
        while not self._home.acquire(timeout=-1 if self._threads or self._warned else SLOW_BACKWARD_S):
            task = self._current
            if task is not None and handovers == self._handovers:
                self._warned = True
                logger.warning(
                    "the backward pass of %s of a simulation has run for %.3g s without waiting for others. "
                    "If a hook waits for a lock that is held around backward(), it never ends: call "
                    "sl.simulate(…, threads=True)",
                    task,
                    SLOW_BACKWARD_S,
                )
            handovers = self._handovers

    # Start and end.

    def run(self, progress: Callable[[], None] | None = None) -> None:
        """Run until every main task has ended. Called from outside, by a thread that is no task.

        That thread calls `progress` about every second of real time. An exception from it ends the run, as Ctrl-C does.
        """
        ready = make_resume_lock()
        home = _HomeThread(self, ready)
        with one_processor(), rare_garbage_collection(), one_torch_thread():
            home.start()
            ready.acquire()
            self._states.enter()
            try:
                try:
                    if not self._over:
                        self._begin()
                    while not self._outside.acquire(timeout=PROGRESS_EVERY_S):
                        if progress is not None:
                            progress()
                except BaseException:  # Ctrl-C: unwind the tasks, then let it through
                    self.stopping = True
                    while not self._outside.acquire(timeout=PROGRESS_EVERY_S):
                        pass  # Python handles a signal that came just before the wait
                    raise
            finally:
                self._states.leave()
                if self._over:  # otherwise a second Ctrl-C has come: a task runs on, on a daemon thread
                    home.join()
            if self._failure is not None:
                raise self._failure

    def _begin(self) -> None:
        """Run the first task."""
        try:
            self._hand_to(self._next())
        except Exception as error:
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Let `run` return, or raise the error of a simulator that cannot continue. Called by the running thread."""
        if not self._over:
            self._over, self._failure, self._current = True, error, None
            self._outside.release()
            self._home.release()

    def interrupt(self, tasks: Iterable[SimulatedTask]) -> None:
        """End these tasks wherever they wait."""
        for task in tasks:
            if not task.done():
                task.interrupt = True
                if task.resume_entry is not None:
                    self.cancel(task.resume_entry)  # it may be asleep
                self.wake(task)

    def stop(self) -> None:
        """End the simulation and every task."""
        self.stopping = True
        self.interrupt(self.tasks)
