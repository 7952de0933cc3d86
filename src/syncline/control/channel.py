"""The control channel of an asynchronous run: step counts, a request to stop, and small messages.

```text
worker 0 ──┐  report_steps()  stop_requested()         ┌── evaluator
worker 1 ──┼──────────►  key-value store  ◄────────────┤   load_weights(), post("evaluation", …), request_stop()
worker 2 ──┘  post("finished", …)  finish()            └── no call waits for a worker
```

The store is the launcher's, so that the channel survives the loss of any worker. Without such a launcher rank 0 serves
it. Simulated ranks have one in memory. Its keys::

    control/ssp/1/steps/0     412                       the steps of worker 0
    control/ssp/1/log/17      {"kind": "post", …}       a post, or the request to stop: entries that all see alike

The calls that a worker makes after every step send nothing. They wake a task that writes the step count and reads the
new entries. During a long step the task reads at intervals.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from torch import nn

from syncline.control.log import ControlLog, LogEntry
from syncline.errors import IncompatibleError, PeerLostError, SpecError, SynclineError
from syncline.runtime import Event, Runtime, Task
from syncline.transports import TeamConnector, Transport
from syncline.transports.key_value_store import KeyValueStore

__all__ = ["ControlBarrier", "ControlChannel", "Post", "WorkerMembership", "poll"]

logger = logging.getLogger("syncline")

REFRESH_EVERY_S = 0.02
"""Shortest interval between two refreshes of a worker that takes steps."""
IDLE_SECONDS = (0.05, 5.0)
"""The interval between two refreshes during a step: the first, and the largest."""
MAX_IDLE_S = 3600.0
"""After so many seconds without a step the worker refreshes nothing until its next step."""
POLL_SECONDS = (1e-3, 0.25)
"""The interval between two reads of the channel: the first, and the largest."""
CHECK_LEFT_EVERY_S = 1.0
"""Interval between two checks for workers that have left. On some transports a check asks the launcher's store."""
MAX_POSTS = 4096
"""Entries that the store keeps, and a process. A task that reads later misses older ones."""
MAX_POST_VALUES = 24
MAX_KIND_BYTES = 32
LAST_BARRIERS = 1 << 40
"""The barriers of the workers that end a job are numbered from here on. All workers pass those before without them."""
POST, STOP, FINISHED = "post", "stop", "finished"
"""Kinds of entries in the log."""


@dataclass(frozen=True)
class Post:
    """Numbers that a member has published, numbered in the order of all posts from 1 on. Numbers may be left out.

    >>> Post(1, "finished", (2.0, 100.0)).kind
    'finished'
    """

    number: int
    kind: str
    values: tuple[float, ...]


class ControlChannel:
    """How the workers of an asynchronous run, and an evaluator, inform each other.

    `name` is the strategy's. Every worker opens its channels of one name in the same order. `rank` is None for an
    observer, which joins the first channel of that name. The methods may be called from any task of the process, also
    during a step. If the store does not answer they raise a `PeerLostError`.

    >>> from syncline.control import MemoryStore
    >>> from syncline.runtime import RealRuntime
    >>> store, runtime = MemoryStore(), RealRuntime()
    >>> worker, observer = (ControlChannel(store, runtime, "ssp", workers=1, rank=rank) for rank in (0, None))
    >>> worker.post("finished", [0, 100])
    >>> observer.read_posts(since=0)
    [Post(number=1, kind='finished', values=(0.0, 100.0))]
    >>> worker.close()
    """

    def __init__(
        self,
        store: KeyValueStore,
        runtime: Runtime,
        name: str,
        workers: int,
        rank: int | None = None,
        *,
        load_weights: Callable[[nn.Module], None] = lambda model: None,
        on_stop: Callable[[], None] = lambda: None,
        on_finish: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.load_weights = load_weights
        """Fills a model's parameters and floating-point buffers with the current weights. Given by the strategy."""
        self._store, self._runtime = store, runtime
        self._rank = rank
        self._on_stop, self._on_finish, self._on_close = on_stop, on_finish, on_close
        self._lock = runtime.lock()
        self.number = 1
        """How many channels of this name this worker has opened, this one included."""
        if rank is not None:
            with self._reached():
                self.number = store.add(f"control/{name}/opened/{rank}", 1)
        self._key = f"control/{name}/{self.number}"
        self._log = ControlLog(store, runtime.now, f"{self._key}/log", MAX_POSTS)
        self._posts: deque[Post] = deque(maxlen=MAX_POSTS)
        self.membership_log = ControlLog(store, runtime.now, f"{self._key}/workers")
        """The log of the workers of an elastic job, which `WorkerMembership` reads."""
        self.on_refresh: Callable[[], None] = lambda: None
        """Called by the task, at the end of each step and at intervals."""
        self.members: Sequence[int] = range(workers)
        """The numbers of the workers. In an elastic job `WorkerMembership` adds those that join."""
        self._steps = self._published = 0
        self._stop = self.closed = False
        self._finished: set[int | None] = set()
        self._task: Task | None = None
        self._wake = runtime.event()

    # Called after every step: these send nothing.

    def report_steps(self, steps: int) -> None:
        """Publish the number of this worker's steps, soon. Calls that follow each other closely are combined."""
        self._steps = steps
        self._refresh_soon()

    def stop_requested(self) -> bool:
        """Whether anyone called `request_stop()`, as far as this process has read the log. It soon reads further."""
        self._refresh_soon()
        return self._stop

    def _refresh_soon(self) -> None:
        if self._task is None and not self.closed:
            self._task = self._runtime.spawn(
                _refresh_while_open, weakref.ref(self), self._runtime, self._wake, name="control"
            )
        self._wake.set()

    # Calls of the store.

    def steps(self) -> list[int]:
        """The number of steps that each worker has taken. Those of a worker that takes short steps are a little old."""
        with self._reached():
            return [
                self._steps if worker == self._rank else self._store.add(self._steps_key(worker), 0)
                for worker in self.members
            ]

    def request_stop(self) -> None:
        """Ask all workers to end soon."""
        self._on_stop()
        with self._reached():
            self._append(STOP, {})
        self._stop = True

    def post(self, kind: str, values: Sequence[float]) -> None:
        """Publish a few numbers: a kind of at most 32 bytes and at most 24 values."""
        if len(kind.encode()) > MAX_KIND_BYTES or len(values) > MAX_POST_VALUES:
            raise SpecError(
                f"a post has a kind of at most {MAX_KIND_BYTES} bytes and at most {MAX_POST_VALUES} values "
                f"(kind: {kind!r}, values: {len(values)})"
            )
        with self._reached():
            self._append(POST, {"post": kind, "values": [float(value) for value in values]})

    def read_posts(self, since: int) -> list[Post]:
        """The posts with a number above `since`, in the same order on all processes."""
        with self._reached():
            self._fetch()
            newest = takewhile(lambda post: post.number > since, reversed(self._posts))
            return list(newest)[::-1]

    def finish(self) -> None:
        """This worker takes no more steps."""
        if self._rank not in self._finished:
            self._finished.add(self._rank)
            self._on_finish()
            with self._reached():
                self._append(FINISHED, {"worker": self._rank})

    def has_finished(self, worker: int) -> bool:
        """Whether a worker takes no more steps. It also reads whether anyone has requested a stop."""
        with self._reached():
            self._fetch()
            return worker in self._finished

    def close(self) -> None:
        """End the task. The other calls still work while the store does."""
        if not self.closed:
            self.closed = True
            self._wake.set()
            self._on_close()

    def refresh(self) -> None:
        """Write the step count and read the log."""
        try:
            with self._reached():
                self._publish()
                self._fetch()
            self.on_refresh()
        except PeerLostError as error:  # the store may answer later; a call that needs it raises the error
            logger.debug("%s", error)

    # Values that one member writes once, and others wait for.

    def set_value(self, key: str, value: str) -> None:
        """Publish a text under a key of this channel."""
        with self._reached():
            self._store.set(f"{self._key}/{key}", value)

    def compare_value(self, key: str, expected: str, desired: str) -> str:
        """Set a text if it is the expected one, or absent and "" is expected. Returns the text afterwards."""
        with self._reached():
            return self._store.compare_set(f"{self._key}/{key}", expected, desired).decode()

    def value(self, key: str) -> str | None:
        """The text under a key; None if there is none yet."""
        with self._reached():
            found = self._store.check([f"{self._key}/{key}"])
            return self._store.get(f"{self._key}/{key}").decode() if found else None

    def append_to_membership_log(self, kind: str, only_next: bool = False, **fields: object) -> bool:
        """Append to the log of the workers; with `only_next`, only if all other entries were read."""
        with self._reached():
            if only_next:
                return self.membership_log.append_next(kind, **fields)
            self.membership_log.append(kind, **fields)
            return True

    def read_membership_log(self) -> list[LogEntry]:
        """The new entries of the log of the workers."""
        with self._reached():
            return self.membership_log.read()

    # Below: the caller holds the lock.

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Hold the lock, and report a store that does not answer."""
        with self._lock:
            try:
                yield
            except SynclineError:
                raise
            except RuntimeError as error:
                raise PeerLostError(
                    f"the key-value store of the control channel does not answer ({error}): `syncline run` serves it "
                    "as long as the job runs; with other launchers it ends with rank 0",
                    pending="the control channel",
                ) from error

    def _steps_key(self, worker: int) -> str:
        return f"{self._key}/steps/{worker}"

    def _append(self, kind: str, fields: Mapping[str, object]) -> None:
        self._publish()  # a reader of the entry finds the steps before it
        self._fetch()  # the next free number is after the entries that were read
        self._log.append(kind, **fields)

    def _publish(self) -> None:
        steps = self._steps
        if self._rank is not None and steps != self._published:
            self._store.set(self._steps_key(self._rank), str(steps))
            self._published = steps

    def _fetch(self) -> None:
        for entry in self._log.read():
            if entry.kind == STOP:
                self._stop = True
            elif entry.kind == FINISHED:
                self._finished.add(entry.fields["worker"])
            else:
                values = tuple(float(value) for value in entry.fields["values"])
                self._posts.append(Post(entry.number + 1, str(entry.fields["post"]), values))


def _refresh_while_open(reference: weakref.ref[ControlChannel], runtime: Runtime, wake: Event) -> None:
    """Refresh a channel at the end of each step, and at intervals during a long one. It does not keep the run alive."""
    (pause, longest), idle_s, never = IDLE_SECONDS, 0.0, runtime.event()
    while True:
        stepped = wake.wait(pause if idle_s < MAX_IDLE_S else None, why="the next step")
        wake.clear()
        channel = reference()
        if channel is None or channel.closed:
            return
        channel.refresh()
        del channel
        idle_s = 0.0 if stepped else idle_s + pause
        pause = IDLE_SECONDS[0] if stepped else min(1.5 * pause, longest)
        never.wait(REFRESH_EVERY_S)


def poll(runtime: Runtime) -> Iterator[None]:
    """Yields again and again, with growing pauses in between. The caller leaves the loop."""
    interval, longest = POLL_SECONDS
    never = runtime.event()  # a deadline, not a sleep: in chaos mode the simulator lets all other events happen first
    while True:
        yield
        never.wait(interval)
        interval = min(2 * interval, longest)


class Workers(Protocol):
    """The workers of a run, as a `World` describes them."""

    rank: int
    size: int
    transport: Transport

    @property
    def lost(self) -> dict[int, str]: ...

    def gone_reason(self, rank: int) -> str: ...


class ControlBarrier:
    """A barrier among the workers of an asynchronous run, by posts: a lost worker does not break it.

    ```text
    worker 0   wait("agreed") ── waits ──┐ both continue
    worker 1                  wait("agreed")            worker 2 is lost: the others do not wait for it
    ```
    """

    ARRIVED, CLOSED = "met", "closed"

    def __init__(self, world: Workers, channel: ControlChannel) -> None:
        self._world = world
        self._channel = channel
        self._number = 0
        self._read_until = 0
        """The number of the last post that was read."""
        self._arrivals: dict[int, int] = {}
        """How often each worker has called `wait`."""
        self._closed: set[int] = set()

    def wait(self, what: str) -> None:
        """Return when every worker that is not lost has called it as often as this one. `what` is for messages."""
        self._number += 1
        self._channel.post(self.ARRIVED, [self._world.rank, self._number])
        self._wait(what, lambda rank: self._arrivals.get(rank, 0) >= self._number)

    def close(self) -> None:
        """Return when every worker that is not lost has called it: no worker takes steps any more."""
        self._closed.add(self._world.rank)
        self._channel.post(self.CLOSED, [self._world.rank])
        self._wait("close their runs", lambda rank: rank in self._closed)

    def _missing(self, arrived: Callable[[int], bool]) -> list[int]:
        while posts := self._channel.read_posts(self._read_until):
            for post in posts:
                self._read_until = max(self._read_until, post.number)
                if post.kind == self.ARRIVED:
                    rank, number = int(post.values[0]), int(post.values[1])
                    self._arrivals[rank] = max(self._arrivals.get(rank, 0), number)
                elif post.kind == self.CLOSED:
                    self._closed.add(int(post.values[0]))
        world = self._world
        others = [rank for rank in range(world.size) if rank != world.rank and rank not in world.lost]
        return [rank for rank in others if not arrived(rank)]

    def _wait(self, what: str, arrived: Callable[[int], bool]) -> None:
        """Wait as long as the channel shows progress: steps or posts of any worker."""
        runtime, timeout, rank = self._world.transport.runtime, self._world.transport.timeout, self._world.rank
        since, progress = runtime.now(), (self._read_until, [0])
        next_check = since + CHECK_LEFT_EVERY_S
        for _ in poll(runtime):
            if rank in (lost := self._world.lost):
                raise PeerLostError(
                    f"rank {rank} waits for all workers to {what}, and was declared lost ({lost[rank]}): the others "
                    "continue without it",
                    peer=rank,
                    pending=what,
                )
            missing = self._missing(arrived)
            if not missing:
                return
            if runtime.now() >= next_check:
                self._raise_if_left(what, arrived, missing)
                next_check = runtime.now() + CHECK_LEFT_EVERY_S
            closed = [each for each in missing if each in self._closed]
            if closed and rank not in self._closed:
                raise IncompatibleError(
                    f"rank {rank} waits for all workers to {what}, and rank {closed[0]} has closed its run: every "
                    "worker must make this call, as often as the others"
                )
            now = (self._read_until, self._channel.steps())
            if now != progress:
                since, progress = runtime.now(), now
            waited = runtime.now() - since
            if waited > timeout:
                raise PeerLostError(
                    f"rank {rank} has waited {waited:.0f} s for ranks {missing} to {what}, and no worker took a step "
                    f"meanwhile (steps: {now[1]}): every worker must make this call",
                    peer=missing[0],
                    pending=f"ranks {missing} to {what}",
                    seconds=waited,
                )

    def _raise_if_left(self, what: str, arrived: Callable[[int], bool], missing: Sequence[int]) -> None:
        """Raise if a missing worker has left the world, because it never arrives."""
        left = {rank: why for rank in missing if (why := self._world.gone_reason(rank))}
        still = self._missing(arrived) if left else []  # again: a post may have come just before the worker left
        for rank in (each for each in still if each in left):
            raise PeerLostError(
                f"rank {self._world.rank} waits for ranks {missing} to {what}, and rank {rank} has ended without "
                f"closing its run ({left[rank]}): every worker closes it, by run.close() or a with block",
                peer=rank,
                pending=f"ranks {missing} to {what}",
            )


class WorkerMembership:
    """The workers of an asynchronous elastic job, and the barrier among those that are present.

    A log has the workers that join, and their arrivals at the barrier, in the same order for all workers. An entry
    "passed" ends a barrier. It is only appended right after the last entry that its writer has read, so all workers
    agree which workers take part::

        joined 4 · arrived 0 · arrived 4 · passed 1 · arrived 2 …        worker 1 is lost: no worker waits for it

    A newcomer joins before a barrier that is not passed yet; a later entry is ignored. The others do not wait for a
    worker that has left by itself. An arrival may contain numbers that its worker offers. The entry "passed" has the
    numbers that all offer (`agree`), and the workers that took part (`exchange`).
    """

    JOINED, ARRIVED, PASSED, CLOSED, ENDED, LEFT = "joined", "arrived", "passed", "closed", "ended", "left"

    def __init__(
        self,
        channel: ControlChannel,
        connector: TeamConnector,
        member: int,
        launched: int,
        timeout_s: float,
    ) -> None:
        """`launched` is the number of workers that the launcher has started at first."""
        self.member = member
        self.number = 0
        """How often this worker has called `wait`."""
        self.ended = False
        """Whether all workers have closed their runs."""
        self.on_read: Callable[[], None] = lambda: None
        """Called after the log was read. Several tasks may call it."""
        self._channel = channel
        self._lost = connector.lost
        self._follow = connector.follow
        self._runtime = connector.runtime
        self._timeout_s = timeout_s
        self._lock = connector.runtime.lock()
        self._launched = launched
        self._arrivals = dict.fromkeys(range(launched), 0)
        """By worker: how often it has called `wait`."""
        self._passed = 0
        self._offered: dict[int, set[int]] = {}
        """By worker: the numbers in its latest arrival."""
        self._common: list[int] = []
        """The numbers that all workers offered at the latest barrier."""
        self.participants: list[int] = [member]
        """The workers that took part in the latest barrier."""
        self.workers = len(set(range(launched)) - connector.lost().keys())
        """The number of workers that are neither lost nor have left, when the log was last read."""
        self._closed: set[int] = set()
        self._departed: dict[int, None] = {}
        """The workers that have left, in their order."""

    def lost(self) -> Mapping[int, str]:
        """The lost workers, each with the reason."""
        return self._lost()

    def raise_if_declared_lost(self, doing: str, cause: Exception | None = None) -> None:
        """Raise an error if this worker itself was declared lost. `doing` is what it does, and `cause` what failed."""
        reason = self._lost().get(self.member)
        if reason is not None:
            raise PeerLostError(
                f"worker {self.member} {doing}, and was declared lost ({reason}): the others continue without it",
                peer=self.member,
            ) from cause

    def present(self) -> list[int]:
        """The workers that are not lost, and have neither left nor closed their runs, as far as this process knows."""
        gone = {*self._lost(), *self._closed, *self._departed}
        return [each for each in sorted(self._arrivals) if each not in gone]

    def alive(self) -> list[int]:
        """The workers that are not lost and have not left, also those that have closed their runs, as far as is known.

        Raises a `PeerLostError` if this worker was declared lost.
        """
        self.raise_if_declared_lost("waits for the other workers")
        gone = {*self._lost(), *self._departed}
        return [each for each in sorted(self._arrivals) if each not in gone]

    def join(self, number: int) -> bool:
        """In a newcomer: take part from the barrier after `number` on. Returns False if the others have passed it."""
        self._channel.append_to_membership_log(self.JOINED, member=self.member, number=number)
        self.refresh()
        self.number = number
        return self.member in self._arrivals

    def wait(self, what: str) -> None:
        """Return when every worker that is present has called it as often as this one. `what` is for messages."""
        self.agree(what, ())

    def agree(self, what: str, numbers: Iterable[int]) -> list[int]:
        """As `wait`. Returns the numbers that all workers have passed, the same list on all of them."""
        if self.member in self._departed:  # no worker waits for this one, and it waits for none
            self.participants = [self.member]
            return sorted(numbers)
        self.number += 1
        number = self.number
        self._channel.append_to_membership_log(self.ARRIVED, member=self.member, number=number, held=sorted(numbers))
        self._wait(
            what,
            lambda: self._passed >= number,
            lambda member: self._arrivals[member] >= number,
            lambda present: self._channel.append_to_membership_log(
                self.PASSED,
                only_next=True,
                number=number,
                held=sorted(set.intersection(*(self._offered[each] for each in present))),
                present=list(present),
            ),
        )
        return self._common

    def exchange(self, what: str, text: str) -> dict[int, str]:
        """As `wait`. Returns the texts of all workers that call this for the same barrier, the same on all of them."""
        if self.member in self._departed:
            self.participants = [self.member]
            return {self.member: text}
        number = self.number + 1
        # A worker writes the next but one when all have read this one.
        key = f"texts/{number % 2 + 2 * (number > LAST_BARRIERS)}"
        self._channel.set_value(f"{key}/{self.member}", json.dumps([number, text]))
        self.wait(what)
        found = {each: self._channel.value(f"{key}/{each}") for each in self.participants}
        texts = {each: json.loads(value) for each, value in found.items() if value is not None}
        return {each: theirs for each, (of, theirs) in texts.items() if of == number}

    def end(self) -> None:
        """The job ends: wait only for workers that call this too. Earlier barriers do not wait for this one."""
        self.number = max(self.number, LAST_BARRIERS)

    def close(self) -> None:
        """Return when every worker that is present has called it: no worker takes steps any more."""
        self._channel.append_to_membership_log(self.CLOSED, member=self.member)
        self._wait(
            "close their runs",
            lambda: self.ended,
            lambda member: member in self._closed,
            lambda present: self._channel.append_to_membership_log(self.ENDED, only_next=True),
        )

    def leave(self) -> None:
        """This worker leaves: the others do not wait for it any more."""
        self._channel.append_to_membership_log(self.LEFT, member=self.member)
        self.refresh()

    def left_last(self) -> bool:
        """Whether this worker has left after all others had left, or were lost. It is True on one worker at most."""
        return self.workers == 0 and [*self._departed][-1:] == [self.member]

    def refresh(self) -> None:
        """Read the log."""
        with self._lock:
            for entry in self._channel.read_membership_log():
                member, number = int(entry.fields.get("member", -1)), int(entry.fields.get("number", 0))
                if entry.kind == self.JOINED and self._passed <= number and not self.ended:
                    self._arrivals[member] = number
                elif entry.kind == self.ARRIVED and member in self._arrivals:
                    self._arrivals[member] = max(self._arrivals[member], number)
                    self._offered[member] = set(entry.fields["held"])
                elif entry.kind == self.PASSED and number > self._passed:
                    self._passed, self._common = number, list(entry.fields["held"])
                    self.participants = list(entry.fields["present"])
                elif entry.kind == self.CLOSED:
                    self._closed.add(member)
                elif entry.kind == self.LEFT:
                    self._departed.setdefault(member)
                elif entry.kind == self.ENDED:
                    self.ended = True
            self._channel.members = sorted(self._arrivals)
            self.workers = len(self._arrivals.keys() - self._lost().keys() - self._departed.keys())
        self._follow(self._channel.members)
        self.on_read()

    def _wait(
        self,
        what: str,
        done: Callable[[], bool],
        arrived: Callable[[int], bool],
        decide: Callable[[Sequence[int]], bool],
    ) -> None:
        """Wait as long as the channel shows progress: steps of any worker, or entries.

        `decide` appends the entry that ends the wait, when all workers have arrived. It gets those that are not lost.
        """
        since, progress = self._runtime.now(), (0, [0])
        for _ in poll(self._runtime):
            self.refresh()
            if done():
                return
            self.raise_if_declared_lost(f"waits for all workers to {what}")
            gone = {*self._lost(), *self._departed, *(self._closed if self.number > LAST_BARRIERS else ())}
            with self._lock:  # no other task reads entries between the two
                present = [each for each in sorted(self._arrivals) if each not in gone]
                missing = [each for each in present if not arrived(each)]
                if not missing:
                    decide(present)
            if not missing:
                continue
            if not self.ended and (closed := [each for each in missing if each in self._closed]):
                raise IncompatibleError(
                    f"worker {self.member} waits for all workers to {what}, and worker {closed[0]} has closed its run: "
                    "every worker must make this call, as often as the others"
                )
            entries = sum(self._arrivals.values()) + len(self._closed) + len(self._departed)
            now = (entries, self._channel.steps())
            if now != progress:
                since, progress = self._runtime.now(), now
            waited = self._runtime.now() - since
            if waited > self._timeout_s:
                raise PeerLostError(
                    f"worker {self.member} has waited {waited:.0f} s for workers {missing} to {what}, and no worker "
                    f"took a step meanwhile (steps: {now[1]}): every worker must make this call",
                    peer=missing[0],
                    pending=f"workers {missing} to {what}",
                    seconds=waited,
                )
