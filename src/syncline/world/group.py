"""An independent channel among some ranks, and the queue of its asynchronous calls."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from syncline.collectives import BufferPool, Channel
from syncline.costs import Auto
from syncline.errors import WorldError
from syncline.runtime import Queue, Runtime, Task
from syncline.transports import Transport

if TYPE_CHECKING:
    from syncline.world.world import World

__all__ = ["Group", "Pending"]

T = TypeVar("T")

FIRST_CHECKED_CALLS = 32
"""Number of first collectives of a group that are compared between the ranks."""
MAX_CHECKED_KINDS = 64
"""Largest number of different later collectives that are compared, once each. New shapes then cost nothing."""
MAX_QUEUED_CALLS = 1024
"""Calls that may wait for a group's communication task. The next call waits for room."""


class Pending(Generic[T]):
    """A collective in progress: `wait()` returns its result.

    >>> import torch, syncline as sl
    >>> with sl.init() as world:
    ...     pending = sl.allreduce(torch.ones(2), op="sum", async_=True)
    ...     pending.wait()
    tensor([1., 1.])
    """

    def __init__(self, runtime: Runtime, describe: str, timeout: float) -> None:
        self._event = runtime.event()
        self._describe = describe
        self._timeout = timeout
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._event.is_set()

    def wait(self) -> T:
        """Wait for the result. An error of the collective is raised here."""
        # The waits of the call have the timeout; this one must not end before them.
        while not self._event.wait(self._timeout, f"{self._describe} in the comm task", hang=True):
            continue
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def settle(self, work: Callable[[], T]) -> None:
        """Run the collective and store its result or error."""
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._event.set()


class Group:
    """Ranks with their own channel: messages of one group never mix with those of another.

    `World.group` makes it, in the same order on every rank. A rank that is not a member gets a group too, with
    `member` False. It cannot call collectives on it.

    >>> import torch, syncline as sl
    >>> def halves(world):
    ...     group = world.group([0, 1])
    ...     return sl.allreduce(torch.tensor([world.rank]), op="sum", group=group) if group.member else None
    >>> sl.simulate(halves, ranks=3).results
    (tensor([1]), tensor([1]), None)
    """

    def __init__(
        self, world: World, ranks: Sequence[int], transport: Transport | None, hosts: tuple[int, ...], lanes: int
    ) -> None:
        self.world = world
        self.ranks = tuple(ranks)
        self._transport = transport
        self._hosts, self._lanes = hosts, lanes
        self._channel = None if transport is None else Channel(transport, hosts, BufferPool(transport.runtime), lanes)
        self._queue: Queue[Callable[[], None] | None] | None = None
        self._task: Task | None = None
        self._auto: Auto | None = None
        self._calls = 0
        self._checked: set[str] = set()
        self._guard = world.runtime.lock()
        self._calling = False
        self._closed = False

    def rebind(self, transport: Transport, ranks: Sequence[int], hosts: tuple[int, ...], lanes: int) -> None:
        """Continue with another team: the same object, on another channel with other ranks."""
        self.release()
        self._closed = False
        self.ranks = tuple(ranks)
        self._transport = transport
        self._hosts, self._lanes = hosts, lanes
        self._channel = Channel(transport, hosts, BufferPool(transport.runtime), lanes)
        self._calls, self._calling = 0, False
        self._checked.clear()
        self._auto = None

    def abort(self) -> None:
        """Break every wait on the channel, also at the other ranks: the team changes."""
        if self._transport is not None and not self._closed:
            self._transport.abort()

    @property
    def member(self) -> bool:
        """Whether this rank belongs to the group."""
        return self._transport is not None

    @property
    def transport(self) -> Transport:
        """The channel's transport."""
        return self.channel.transport

    @property
    def channel(self) -> Channel:
        """The channel on which the collectives run."""
        self.world.check_open()
        if self._closed:
            raise WorldError(f"{self!r} is closed; make another with world.group()")
        if self._channel is None:
            raise WorldError(f"rank {self.world.rank} is not in the group of ranks {list(self.ranks)}")
        return self._channel

    @property
    def auto(self) -> Auto:
        """The choices of `algorithm="auto"` in this group."""
        if self._auto is None:
            self._auto = Auto(self.channel, self._where(), self.world.events.point)
        return self._auto

    @property
    def choices(self) -> dict[str, str]:
        """The algorithm that `algorithm="auto"` has chosen for each class of sizes, also after the group is closed."""
        return {} if self._auto is None else {key: choice.algorithm for key, choice in self._auto.choices.items()}

    def _where(self) -> str:
        """The cache key of this network's calibration: everything that makes it different from another network.

        Simulated networks have none, because they must not depend on earlier simulations.
        """
        if self.transport.timing.virtual:
            return ""
        hosts = [self.world.hosts[rank] for rank in self.ranks]
        places = ",".join(f"{host}:{len(list(ranks))}" for host, ranks in groupby(hosts))
        marks = [f"{name}={os.environ[name]}" for name in ("SYNCLINE_LAB", "GLOO_SOCKET_IFNAME") if name in os.environ]
        key = ["with a key"] if os.environ.get("SYNCLINE_KEY", "none") != "none" else []
        engine = f"{self.transport.name}, torch {torch.__version__}"
        return "; ".join([engine, places, f"{os.cpu_count()} cores", *marks, *key])

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def duplicate(self) -> Group:
        """A group of the same ranks with another channel. Its members call it in the same order; others need not.

        >>> import torch, syncline as sl
        >>> def pair(world):
        ...     group = world.group([0, 1])
        ...     return sl.allreduce(torch.ones(1), op="sum", group=group.duplicate()) if group.member else None
        >>> sl.simulate(pair, ranks=3).results
        (tensor([2.]), tensor([2.]), None)
        """
        copy = Group(self.world, self.ranks, self.transport.split(range(self.size)), self._hosts, self._lanes)
        self.world.add_group(copy)
        return copy

    def next_call(self) -> int:
        """The number of the collective that begins now."""
        self._calls += 1
        return self._calls

    def is_new(self, description: str) -> bool:
        """Whether this call is one of the first, or different from all before it.

        Ranks whose calls were the same so far get the same answer for the same next call.
        """
        new = description not in self._checked and len(self._checked) < MAX_CHECKED_KINDS
        if new:
            self._checked.add(description)
        return new or self._calls <= FIRST_CHECKED_CALLS

    def call(self, describe: str, work: Callable[[], T], async_: bool) -> T | Pending[T]:
        """Run one collective after all earlier ones: here, or in the group's communication task.

        Only one thread may call it: with two, the ranks could run them in different orders and mix their messages.
        """
        self.world.finish_left()
        runtime = self.transport.runtime
        with self._guard:
            if self._calling:
                raise WorldError(
                    f"two threads call collectives on {self!r} at once ({describe}): give each its own world.group()"
                )
            self._calling = True
        try:
            if self._queue is None and not async_:
                return work()
            if self._queue is None:
                self._queue = runtime.queue(MAX_QUEUED_CALLS)
                self._task = runtime.spawn(self._serve, self._queue, name=f"comm-{self.ranks[0]}")
            pending: Pending[T] = Pending(runtime, describe, self.transport.timeout)
            context = contextvars.copy_context()
            self._queue.put(lambda: context.run(pending.settle, work))
            return pending if async_ else pending.wait()
        finally:
            self._calling = False

    @staticmethod
    def _serve(queue: Queue[Callable[[], Any] | None]) -> None:
        while (call := queue.get()) is not None:
            call()

    def drain(self, timeout: float | None = None) -> None:
        """Wait until the asynchronous calls have ended, and end their task."""
        if self._queue is not None and self._task is not None:
            timeout = self.world.transport.timeout if timeout is None else timeout
            self._queue.put(None, timeout=timeout)
            if not self._task.join(timeout):
                raise TimeoutError(f"{self!r} has asynchronous calls that have not ended within {timeout:.3g} s")
            self._queue = self._task = None

    def close(self) -> None:
        """Release the channel. `World.close` closes every group; call it earlier for groups of short life."""
        self.drain()
        self.release()

    def release(self) -> None:
        """Release the channel at once, without waiting for calls in progress."""
        self.stop_task()
        if not self._closed and self._transport is not None:
            self._transport.close()
        self._closed = True

    def stop_task(self) -> None:
        """End a task that is inside a call: it could otherwise return while Python shuts down."""
        if self._task is not None and self._transport is not None:
            try:
                self.drain(timeout=0.5)
            except TimeoutError:
                self._transport.abort()
                self._queue = self._task = None

    def __repr__(self) -> str:
        return f"Group(ranks={list(self.ranks)})"
