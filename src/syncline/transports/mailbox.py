"""Matching messages that have arrived with receives that were posted, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.runtime import Event, Runtime
from syncline.transports.base import format_bytes, mismatch_hint

__all__ = ["Arrived", "Mailbox", "Posted"]

LIMIT = 1 << 30
"""Bytes that may wait unreceived: more is a leak, and is refused."""


@dataclass(eq=False, slots=True)
class Posted:
    """A receive that waits for its message."""

    data: Tensor
    wanted: int | None
    tag: int
    exact: bool
    source: int = -1
    nbytes: int = 0
    error: Exception | None = None
    settled: bool = False
    given_up: bool = False
    """Nobody waits for it any more: what is still on its way must not be written."""
    event: Event | None = None
    """Made when somebody has to wait: most receives find their message there."""
    most: int = -1
    """Of a receive without a buffer: how long its message may be. It keeps what came as it came."""
    content: memoryview | None = None
    then: Callable[[Posted], None] | None = None
    """Called when it is settled, under locks: it only notes that."""

    def settle(self) -> None:
        """The message is in place, or `error` says why not."""
        self.settled = True
        if self.then is not None:
            self.then(self)
        if self.event is not None:
            self.event.set()


@dataclass(eq=False, slots=True)
class Arrived:
    """A message that has come, or whose sender offers it."""

    nbytes: int
    source: int
    tag: int
    data: Tensor | memoryview | None
    matched: Callable[[], None]
    accept: Callable[[Posted | None], None] | None = None


class Mailbox:
    """One rank's incoming messages on one channel."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._lock = runtime.lock()
        self._posted: list[Posted] = []
        self._arrived: list[Arrived] = []
        self._waiting_bytes = 0
        self._changed = runtime.event()  # something was taken or posted: there may be room again
        self._shut: Callable[[Posted], Exception] | None = None
        self._ears: dict[int, Callable[[Arrived], None]] = {}

    def listen(self, tag: int, ear: Callable[[Arrived], None] | None) -> None:
        """Give what comes under a tag to an ear, what has come already first; None: to nobody any more.

        It is called under locks, and only notes what it is given.
        """
        with self._lock:
            if ear is None:
                self._ears.pop(tag, None)
                return
            self._ears[tag] = ear
            for message in [each for each in self._arrived if each.tag == tag]:
                self._arrived.remove(message)
                self._waiting_bytes -= 0 if message.data is None else message.nbytes
                ear(message)

    def deliver(
        self, data: Tensor | memoryview, source: int, tag: int, matched: Callable[[], None] | None = None
    ) -> None:
        """A message is here; `matched` is called when a receive takes it."""
        nbytes = data.numel() if isinstance(data, Tensor) else len(data)
        with self._lock:
            if self._place(Arrived(nbytes, source, tag, data, matched or _nothing)):
                return
            if self._waiting_bytes + nbytes > LIMIT:
                self._arrived.pop()
                raise ProtocolError(
                    f"{format_bytes(self._waiting_bytes)} wait unreceived and rank {source} sends "
                    f"{format_bytes(nbytes)} more (tag {tag}); receive before sending on",
                    peer=source,
                )
            self._waiting_bytes += nbytes

    def offer(self, nbytes: int, source: int, tag: int, accept: Callable[[Posted | None], None]) -> None:
        """A message is announced whose bytes are still with its sender.

        `accept` is called with the receive that takes it, which the caller fills and settles; or with None where
        the message does not fit and the receive was told so.
        """
        with self._lock:
            self._place(Arrived(nbytes, source, tag, None, _nothing, accept))

    def _place(self, message: Arrived) -> bool:
        """Give a message to who listens, or to the first receive that fits, or keep it."""
        ear = self._ears.get(message.tag)
        if ear is not None:
            ear(message)
            return True
        for index, posted in enumerate(self._posted):
            if posted.tag == message.tag and (posted.wanted is None or posted.wanted == message.source):
                del self._posted[index]
                _hand_over(posted, message)
                return True
        if self._shut is not None:
            _turn_away(message)
            return True
        self._arrived.append(message)
        return False

    def post(
        self, data: Tensor, wanted: int | None, tag: int, exact: bool, then: Callable[[Posted], None] | None = None
    ) -> Posted:
        """Wait for a message: the earliest that fits, now or later."""
        return self.add(Posted(data, wanted, tag, exact, then=then))

    def add(self, posted: Posted) -> Posted:
        """The same, for a receive that was made already."""
        with self._lock:
            if not self._changed.is_set():
                self._changed.set()
            for index, message in enumerate(self._arrived):
                if message.tag == posted.tag and (posted.wanted is None or posted.wanted == message.source):
                    del self._arrived[index]
                    self._waiting_bytes -= 0 if message.data is None else message.nbytes
                    _hand_over(posted, message)
                    return posted
            if self._shut is not None:
                posted.error = self._shut(posted)
                posted.settle()
                return posted
            self._posted.append(posted)
        return posted

    def await_room(self, nbytes: int, source: int, tag: int) -> None:
        """Wait until a message may be delivered: there is room for it, or a receive that takes it at once.

        One that is longer than the limit and than the receive that waits for it is refused.
        """
        while True:
            with self._lock:
                takers = [p for p in self._posted if p.tag == tag and p.wanted in (None, source)]
                if takers and nbytes > max(LIMIT, takers[0].data.numel()):
                    raise ProtocolError(
                        f"rank {source} announces {format_bytes(nbytes)} (tag {tag}) where at most "
                        f"{format_bytes(takers[0].data.numel())} were due",
                        peer=source,
                    )
                if takers or self._shut is not None or self._waiting_bytes + nbytes <= LIMIT:
                    return
                self._changed.clear()
            self._changed.wait(why=f"room for {format_bytes(nbytes)} from rank {source}")

    def withdraw(self, posted: Posted) -> bool:
        """Take a receive back that was given up; False if its message has come meanwhile."""
        with self._lock:
            if posted.settled:
                return False
            posted.given_up = True
            if posted in self._posted:
                self._posted.remove(posted)
            return True

    def waits(self, which: Callable[[Posted], bool]) -> bool:
        """Whether such a receive is waiting."""
        with self._lock:
            return any(which(posted) for posted in self._posted)

    def fail(self, error: Callable[[Posted], Exception | None]) -> None:
        """Break the receives for which `error` gives one."""
        with self._lock:
            for posted in list(self._posted):
                posted.error = error(posted)
                if posted.error is not None:
                    self._posted.remove(posted)
                    posted.settle()

    def close(self, error: Callable[[Posted], Exception]) -> None:
        """Nobody receives here any more: turn away what has arrived and what still comes, and break every receive.

        Those who sent it are told that it is done with, so that it holds no room of theirs.
        """
        with self._lock:
            if self._shut is not None:
                return
            self._shut = error
            arrived, self._arrived, self._waiting_bytes = self._arrived, [], 0
            for message in arrived:
                _turn_away(message)
            posted, self._posted = self._posted, []
            for receive in posted:
                receive.error = error(receive)
                receive.settle()
            self._changed.set()

    def event_of(self, posted: Posted) -> Event | None:
        """What to wait on for a receive; None when it is settled."""
        with self._lock:
            if not posted.settled and posted.event is None:
                posted.event = self.runtime.event()
            return None if posted.settled else posted.event


def _hand_over(posted: Posted, message: Arrived) -> None:
    length, room = message.nbytes, posted.data.numel() if posted.most < 0 else posted.most
    posted.source, posted.nbytes = message.source, length
    if length > room or (posted.exact and length < room):
        posted.error = ProtocolError(
            f"rank {message.source} sent {format_bytes(length)} (tag {message.tag}) where "
            f"{'exactly' if posted.exact else 'at most'} {format_bytes(room)} were due{mismatch_hint(message.tag)}",
            peer=message.source,
        )
    elif posted.most >= 0:
        if message.data is None:
            posted.data = torch.empty(length, dtype=torch.uint8)
            posted.content = posted.data.numpy().data
        else:
            posted.content = message.data.numpy().data if isinstance(message.data, Tensor) else message.data
    elif isinstance(message.data, Tensor):
        (posted.data if length == room else posted.data[:length]).copy_(message.data)
    elif length and message.data is not None:
        posted.data.numpy().data[:length] = message.data
    if message.accept is None:
        message.matched()
        posted.settle()
    elif posted.error is None:
        message.accept(posted)
    else:
        message.accept(None)
        posted.settle()


def _turn_away(message: Arrived) -> None:
    if message.accept is None:
        message.matched()
    else:
        message.accept(None)


def _nothing() -> None:
    return
