"""Who reads a node's sockets: whoever waits, so that a message wakes the thread that wants it and no other on the way.

When nobody waits, a task of the node's own does it: offers are accepted and bytes flow while the program computes. One
at a time: a driver. The task steps aside at once when a thread comes to wait, and takes over again some milliseconds
after the last has left. What is to be done about a message, where that needs no particular thread, the driver does too.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from syncline.errors import WorldError
from syncline.runtime import Event, Runtime, caller

__all__ = ["Crank", "Waited"]

logger = logging.getLogger("syncline")

PAUSE = 0.002
"""Seconds that the node's own task leaves the sockets to the threads that wait."""
WARN_AFTER = 10.0
LONGEST = 3600.0  # what an idle wait sleeps at once: no clock counts without end


class Waited(Protocol):
    """What a thread waits for."""

    settled: bool
    event: Event | None


class Crank:
    """`take_in` waits for the next message and takes it in, True when it was the bell; `ring` rings that bell."""

    def __init__(self, runtime: Runtime, take_in: Callable[[], bool], ring: Callable[[], None]) -> None:
        self.name = "rank -1"
        """Of this process, for messages: a server or an evaluator is no rank."""
        self.stopped = False
        self._runtime = runtime
        self._take_in = take_in
        self._ring = ring
        self._lock = runtime.lock()
        self._driver = ""
        self._thread = 0
        self._free = runtime.event()
        self._waiting: dict[int, Waited] = {}
        self._last_driven = 0.0
        self._deeds: deque[Callable[[], None]] = deque()

    # Deeds.

    def defer(self, deed: Callable[[], None]) -> None:
        """Let the driver do something, in order, when it holds no lock. Another thread rings afterwards."""
        self._deeds.append(deed)

    def do_deeds(self) -> None:
        """Do what was deferred. What a deed raises ends nobody else's."""
        deeds = self._deeds
        while deeds:
            try:
                deeds.popleft()()
            except Exception:
                logger.exception("%s could not deal with a message", self.name)

    @property
    def drives(self) -> bool:
        """Whether the calling thread is the driver: it must not wait for what only a driver can bring."""
        return bool(self._driver) and self._thread == caller()

    # Waiting.

    def wait(self, thing: Waited, timeout: float, pending: Callable[[], str]) -> bool:
        """Work until `thing` is settled; False when the timeout came first. A wait without end warns of nothing."""
        now = self._runtime.now()
        deadline, warn = now + timeout, now + (WARN_AFTER if timeout < math.inf else math.inf)
        while not thing.settled:
            if self.stopped:
                raise WorldError(f"{self.name} has closed its transport while it waited for {pending()}")
            now = self._runtime.now()
            if now >= deadline:
                return False
            if now >= warn:
                warn = deadline
                logger.warning("%s has waited %.0f s for %s", self.name, WARN_AFTER, pending())
            until = min(deadline, warn)
            if self.take("thread"):
                try:
                    while not (thing.settled or self.stopped) and self._left(until):
                        self._take_in()
                finally:
                    self._leave()
            else:
                self._wait_for_the_driver(thing, until, pending)
        return True

    def _left(self, until: float) -> bool:
        return self._runtime.now() < until

    def take(self, who: str) -> bool:
        """Become the driver; False where there is one."""
        with self._lock:
            if self._driver:
                return False
            self._driver = who
            self._thread = caller()
            return True

    def _leave(self) -> None:
        self._last_driven = self._runtime.now()
        with self._lock:
            self._driver = ""
            if not self._free.is_set():  # setting it again would take longer than asking
                self._free.set()
            for other in self._waiting.values():  # the next driver; if it has gone, our own task takes over
                if other.event is not None and not other.settled:
                    other.event.set()
                    break

    def _wait_for_the_driver(self, thing: Waited, until: float, pending: Callable[[], str]) -> None:
        """Another turns the crank: wait until it has settled this, or has left."""
        if self.drives:
            raise WorldError(f"{self.name} would wait for {pending()} while it deals with a message")
        with self._lock:
            background = self._driver == "background"
            if background:
                self._free.clear()
                self._ring()
            elif self._driver:
                thing.event = thing.event or self._runtime.event()
                thing.event.clear()
                self._waiting[id(thing)] = thing
            else:
                return
        event = self._free if background else thing.event
        assert event is not None
        try:
            if not thing.settled:
                event.wait(min(max(0.0, until - self._runtime.now()), LONGEST))
        finally:
            with self._lock:
                self._waiting.pop(id(thing), None)

    # The node's own task, and the end.

    def turn_where_nobody_waits(self, chores: Callable[[float], None]) -> None:
        """Drive while no thread waits, until the end; `chores` is called over and over."""
        while not self.stopped:
            now = self._runtime.now()
            chores(now)
            if now - self._last_driven < PAUSE or not self.take("background"):
                self._runtime.sleep(PAUSE)
                continue
            try:
                if self._take_in():
                    self._last_driven = self._runtime.now()  # somebody wants to drive
            finally:
                with self._lock:
                    self._driver = ""
                    self._free.set()

    def stop(self, linger: float) -> None:
        """Nobody reads the sockets any more: those who wait are told, and this thread is the last driver."""
        self.stopped = True
        until = self._runtime.now() + linger
        while not self.take("closing") and self._left(until):
            self._ring()
            self._runtime.sleep(PAUSE)
        with self._lock:
            self._free.set()
            for other in self._waiting.values():
                if other.event is not None:
                    other.event.set()
