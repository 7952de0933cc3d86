"""Messages: their header on the wire, and the mailbox that matches them with receives.

The header precedes a body whose length the receiver does not know::

    0      4   5    6       8        12    16        24       28        32     36
    ┌──────┬───┬────┬───────┬────────┬─────┬─────────┬────────┬─────────┬──────┐
    │ SYNC │ v │kind│   0   │ sender │ tag │ length  │ number │ channel │ crc  │
    └──────┴───┴────┴───────┴────────┴─────┴─────────┴────────┴─────────┴──────┘

`number` counts the sender's messages and pairs a header with its body. `channel` is 0 if every channel has its own
connections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, WorldError
from syncline.runtime import Event, Runtime
from syncline.transports.base import (
    COMPARISON_TAGS,
    LANE_TAGS,
    Transport,
    event_timeout,
    format_bytes,
    mismatch_hint,
)
from syncline.wire import WireHeader

__all__ = [
    "HEADER_BYTES",
    "ArrivedMessage",
    "CompletedHandle",
    "Mailbox",
    "MailboxHandle",
    "MessageHeader",
    "PostedReceive",
    "WarningLog",
    "channel_closed",
    "describe_recv",
    "do_nothing",
    "pack_header",
    "peer_lost_error",
    "tag_name",
]

MESSAGE = 1
"""The kind of a header that announces a message. Engines add kinds of their own."""
ONLY_MESSAGES = frozenset({MESSAGE})
MAX_MESSAGE_BYTES = 1 << 40
MAX_UNRECEIVED_BYTES = 1 << 30
"""Bytes that may wait in a mailbox without a receive. More is a leak and is refused."""
MAX_SINGLE_WARNINGS = 5
"""Number of warnings that are logged one by one."""
SUMMARY_EVERY_S = 60.0
"""Seconds between two log lines after that."""

_HEADER = WireHeader(b"SYNC", version=1, fields="BHIIQII")
HEADER_BYTES = _HEADER.nbytes


class MessageHeader(NamedTuple):
    """The sender, tag and length of a message.

    >>> MessageHeader.read(MessageHeader(sender=3, tag=7, length=4096, number=1).pack(), peer=3).length
    4096
    """

    sender: int
    tag: int
    length: int
    number: int
    kind: int = MESSAGE
    channel: int = 0

    def pack(self) -> bytes:
        """The 36 bytes on the wire."""
        return pack_header(*self)

    @staticmethod
    def read(data: bytes | memoryview, peer: int, kinds: Container[int] = ONLY_MESSAGES) -> MessageHeader:
        """Read a header that came from `peer`. Raises a `ProtocolError` if it is malformed."""
        if len(data) != HEADER_BYTES:
            raise _refuse_header(peer, f"{len(data)} bytes where {HEADER_BYTES} were expected")
        try:
            kind, reserved, sender, tag, length, number, channel = _HEADER.read(data, ProtocolError)
        except ProtocolError as error:
            raise _refuse_header(peer, str(error)) from None
        if kind not in kinds or reserved:
            raise _refuse_header(peer, f"unknown kind {kind} (reserved: {reserved})")
        if sender != peer:
            raise _refuse_header(peer, f"it claims to come from rank {sender}")
        if length > MAX_MESSAGE_BYTES:
            raise _refuse_header(peer, f"a length of {length} bytes")
        return MessageHeader(sender, tag, length, number, kind, channel)


def _refuse_header(peer: int, reason: str) -> ProtocolError:
    return ProtocolError(f"header from rank {peer} refused: {reason}", peer=peer)


def pack_header(sender: int, tag: int, length: int, number: int, kind: int = MESSAGE, channel: int = 0) -> bytes:
    """A header on the wire, without the object."""
    return _HEADER.pack(kind, 0, sender, tag, length, number, channel)


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A receive that waits for its message."""

    data: Tensor
    wanted: int | None
    tag: int
    exact: bool
    source: int = -1
    nbytes: int = 0
    error: Exception | None = None
    done: bool = False
    abandoned: bool = False
    """True if no task waits any more: bytes that still arrive must not be written."""
    event: Event | None = None
    """Created when a task has to wait. Most receives find their message in the mailbox."""
    max_bytes: int = -1
    """For a receive without a buffer: the largest message. It keeps the memory in which the message arrived."""
    content: memoryview | None = None
    via: int | None = None
    """Another rank whose loss ends the receive too."""
    on_done: Callable[[PostedReceive], None] | None = None
    """Called when it is done, under locks: it must only schedule work."""

    def needs(self, rank: int) -> bool:
        """Whether the loss of a rank ends the receive."""
        return rank in (self.wanted, self.via)

    def finish(self) -> None:
        """Mark it as done: the message is in place, or `error` is set."""
        self.done = True
        if self.on_done is not None:
            self.on_done(self)
        if self.event is not None:
            self.event.set()


@dataclass(eq=False, slots=True)
class ArrivedMessage:
    """A message that has arrived, or that its sender offers."""

    nbytes: int
    source: int
    tag: int
    data: Tensor | memoryview | None
    matched: Callable[[], None]
    accept: Callable[[PostedReceive | None], None] | None = None


class Mailbox:
    """The incoming messages of one rank on one channel."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._lock = runtime.lock(short=True)
        self.posted: list[PostedReceive] = []
        self.arrived: list[ArrivedMessage] = []
        self.waiting_bytes = 0
        self._changed = runtime.event()  # set when a message was taken or a receive posted: there may be space
        self._closed_error: Callable[[PostedReceive], Exception] | None = None
        self._listeners: dict[int, Callable[[ArrivedMessage], None]] = {}

    def listen(self, tag: int, on_message: Callable[[ArrivedMessage], None] | None) -> None:
        """Pass all messages with a tag to a function, those already here first; None stops that.

        The function is called under locks and must only schedule work.
        """
        with self._lock:
            if on_message is None:
                self._listeners.pop(tag, None)
                return
            for message in [each for each in self.arrived if each.tag == tag]:
                self.arrived.remove(message)
                self.waiting_bytes -= 0 if message.data is None else message.nbytes
                on_message(message)
            self._listeners[tag] = on_message

    def deliver(
        self, data: Tensor | memoryview, source: int, tag: int, matched: Callable[[], None] | None = None
    ) -> None:
        """Add a message. `matched` is called when a receive takes it."""
        nbytes = data.numel() if isinstance(data, Tensor) else len(data)
        message = ArrivedMessage(nbytes, source, tag, data, matched or do_nothing)
        with self._lock:
            if self._place(message):
                return
            if self.waiting_bytes + nbytes > MAX_UNRECEIVED_BYTES:
                self.arrived.pop()
                raise ProtocolError(
                    f"{format_bytes(self.waiting_bytes)} wait unreceived and rank {source} sends "
                    f"{format_bytes(nbytes)} more (tag {tag}); receive before sending on",
                    peer=source,
                )
            self.waiting_bytes += nbytes

    def offer(self, nbytes: int, source: int, tag: int, accept: Callable[[PostedReceive | None], None]) -> None:
        """Announce a message whose bytes are still with its sender.

        `accept` is called with the matching receive, which the caller fills and finishes. It is called with None if the
        message does not fit; the receive then has an error.
        """
        with self._lock:
            self._place(ArrivedMessage(nbytes, source, tag, None, do_nothing, accept))

    def _place(self, message: ArrivedMessage) -> bool:
        """Pass a message to its listener or to the first matching receive; else keep it and return False."""
        on_message = self._listeners.get(message.tag)
        if on_message is not None:
            on_message(message)
            return True
        for index, posted in enumerate(self.posted):
            if posted.tag == message.tag and (posted.wanted is None or posted.wanted == message.source):
                del self.posted[index]
                _match(posted, message)
                return True
        if self._closed_error is not None:
            _discard(message)
            return True
        self.arrived.append(message)
        return False

    def post(
        self,
        data: Tensor,
        wanted: int | None,
        tag: int,
        exact: bool,
        on_done: Callable[[PostedReceive], None] | None = None,
    ) -> PostedReceive:
        """Post a receive for the earliest matching message, now or later."""
        return self.add(PostedReceive(data, wanted, tag, exact, on_done=on_done))

    def add(self, posted: PostedReceive) -> PostedReceive:
        """Post a receive that exists already."""
        with self._lock:
            if not self._changed.is_set():
                self._changed.set()
            for index, message in enumerate(self.arrived):
                if message.tag == posted.tag and (posted.wanted is None or posted.wanted == message.source):
                    del self.arrived[index]
                    self.waiting_bytes -= 0 if message.data is None else message.nbytes
                    _match(posted, message)
                    return posted
            if self._closed_error is not None:
                posted.error = self._closed_error(posted)
                posted.finish()
                return posted
            self.posted.append(posted)
        return posted

    def wait_for_space(self, nbytes: int, source: int, tag: int) -> None:
        """Wait until a message may be delivered: there is space, or a receive that takes it at once.

        A message longer than both the limit and the waiting receive is refused.
        """
        while True:
            with self._lock:
                takers = [p for p in self.posted if p.tag == tag and p.wanted in (None, source)]
                if takers and nbytes > max(MAX_UNRECEIVED_BYTES, takers[0].data.numel()):
                    raise ProtocolError(
                        f"rank {source} announces {format_bytes(nbytes)} (tag {tag}) where at most "
                        f"{format_bytes(takers[0].data.numel())} were expected",
                        peer=source,
                    )
                has_space = self.waiting_bytes + nbytes <= MAX_UNRECEIVED_BYTES
                if takers or self._closed_error is not None or has_space:
                    return
                self._changed.clear()
            self._changed.wait(why=f"space for {format_bytes(nbytes)} from rank {source}")

    def withdraw(self, posted: PostedReceive) -> bool:
        """Cancel a receive; False if its message has arrived meanwhile."""
        with self._lock:
            if posted.done:
                return False
            posted.abandoned = True
            if posted in self.posted:
                self.posted.remove(posted)
            return True

    def cancel(self, posted: PostedReceive) -> None:
        """End a receive, and the wait of a task for it, unless its message has arrived."""
        text = f"the receive from rank {posted.wanted} ({tag_name(posted.tag)}) was cancelled"
        self.fail(lambda each: PeerLostError(text, peer=posted.wanted) if each is posted else None)

    def has_receive(self, matches: Callable[[PostedReceive], bool]) -> bool:
        """Whether such a receive waits."""
        with self._lock:
            return any(matches(posted) for posted in self.posted)

    def fail(self, error: Callable[[PostedReceive], Exception | None]) -> None:
        """End the receives for which `error` returns an exception."""
        with self._lock:
            for posted in list(self.posted):
                posted.error = error(posted)
                if posted.error is not None:
                    self.posted.remove(posted)
                    posted.finish()

    def close(self, error: Callable[[PostedReceive], Exception]) -> None:
        """End every receive, and discard all messages, those that still arrive too.

        The senders of discarded messages get their credit back.
        """
        with self._lock:
            if self._closed_error is not None:
                return
            self._closed_error = error
            arrived, self.arrived, self.waiting_bytes = self.arrived, [], 0
            for message in arrived:
                _discard(message)
            posted, self.posted = self.posted, []
            for receive in posted:
                receive.error = error(receive)
                receive.finish()
            self._changed.set()

    @property
    def closed(self) -> bool:
        """Whether every receive fails."""
        return self._closed_error is not None

    def event_of(self, posted: PostedReceive) -> Event | None:
        """The event to wait on for a receive; None if it is done."""
        with self._lock:
            if not posted.done and posted.event is None:
                posted.event = self.runtime.event()
            return None if posted.done else posted.event


def _match(posted: PostedReceive, message: ArrivedMessage) -> None:
    """Put a message into a receive, or set the error of a receive that it does not fit."""
    length, max_length = message.nbytes, posted.data.numel() if posted.max_bytes < 0 else posted.max_bytes
    posted.source, posted.nbytes = message.source, length
    if length > max_length or (posted.exact and length < max_length):
        posted.error = ProtocolError(
            f"rank {message.source} sent {format_bytes(length)} (tag {message.tag}) where "
            f"{'exactly' if posted.exact else 'at most'} {format_bytes(max_length)} were expected"
            f"{mismatch_hint(message.tag)}",
            peer=message.source,
        )
    elif posted.max_bytes >= 0:
        if message.data is None:
            posted.data = torch.empty(length, dtype=torch.uint8)
            posted.content = posted.data.numpy().data
        else:
            posted.content = message.data.numpy().data if isinstance(message.data, Tensor) else message.data
    elif isinstance(message.data, Tensor):
        (posted.data if length == max_length else posted.data[:length]).copy_(message.data)
    elif length and message.data is not None:
        posted.data.numpy().data[:length] = message.data
    if message.accept is None:
        message.matched()
        posted.finish()
    elif posted.error is None:
        message.accept(posted)
    else:
        message.accept(None)
        posted.finish()


def _discard(message: ArrivedMessage) -> None:
    if message.accept is None:
        message.matched()
    else:
        message.accept(None)


def do_nothing() -> None:
    """The callback of a message whose sender need not know of its receive."""


class CompletedHandle:
    """A handle of an operation that is already done."""

    def __init__(self, nbytes: int, source: int = -1) -> None:
        self.nbytes = nbytes
        self.source = source

    def wait(self, timeout: float | None = None) -> None:
        return


class MailboxHandle:
    """A receive that a mailbox will fill. Its `str` describes what it waits for."""

    __slots__ = ("_mailbox", "_posted", "_transport", "nbytes", "source")

    def __init__(self, transport: Transport, mailbox: Mailbox, posted: PostedReceive) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._posted = posted
        self.source = -1
        self.nbytes = 0

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._posted.done

    def wait(self, timeout: float | None = None) -> None:
        posted, transport = self._posted, self._transport
        event = None if posted.done else self._mailbox.event_of(posted)
        if event is not None:
            limit = transport.timeout if timeout is None else timeout
            if not event.wait(event_timeout(limit), self, hang=timeout is None) and self._mailbox.withdraw(posted):
                raise transport.failure(posted.wanted, str(self), limit, None)
        if posted.error is not None:
            raise posted.error
        self.source, self.nbytes = posted.source, posted.nbytes

    def __str__(self) -> str:
        posted = self._posted
        return describe_recv(self._transport, posted.wanted, posted.tag, posted.data.numel())


def channel_closed(posted: PostedReceive) -> WorldError:
    """The error of a receive on a channel that this rank has closed or aborted."""
    return WorldError(f"this rank has closed the channel: no message arrives for {tag_name(posted.tag)} any more")


def peer_lost_error(
    me: str, peer: int | None, peer_name: str, pending: str, seconds: float, reason: str
) -> PeerLostError:
    """The error of a rank whose wait for `peer` has failed after `seconds`; 0 if it failed at once."""
    after = f" after {seconds:.3g} s" if seconds else ""
    return PeerLostError(
        f"{me} lost {peer_name}{after} while waiting for {pending}: {reason}",
        peer=peer,
        pending=pending,
        seconds=seconds,
    )


def describe_recv(transport: Transport, source: int | None, tag: int, nbytes: int) -> str:
    """The sender and the size of the message that a receive waits for, with world ranks."""
    sender = "anyone" if source is None else f"rank {transport.members[source]}"
    name = tag_name(tag) if transport.name_message is None else transport.name_message(tag)
    return f"a message from {sender} ({name}, {format_bytes(nbytes)})"


def tag_name(tag: int) -> str:
    """A tag as error messages show it."""
    if tag >= COMPARISON_TAGS:
        return "comparison of calls"
    return f"tag {tag}" if tag < LANE_TAGS else f"lane {tag - LANE_TAGS}"


class WarningLog:
    """Logs warnings that unknown senders can cause: the first few, then at most one line a minute with their number.

    >>> lines = WarningLog(logging.getLogger("syncline.example"), now=lambda: 0.0)
    >>> [lines.warn("an unknown sender") for _ in range(6)]
    [True, True, True, True, True, False]
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float]) -> None:
        self._logger = logger
        self._now = now
        self._logged = 0
        self._suppressed = 0
        self._next = 0.0

    def warn(self, text: str) -> bool:
        """Log a warning, or only count it. Returns whether it was logged."""
        now = self._now()
        if self._logged >= MAX_SINGLE_WARNINGS and now < self._next:
            self._suppressed += 1
            return False
        more = f" (and {self._suppressed} more like it)" if self._suppressed else ""
        self._logger.warning("%s%s", text, more)
        self._logged += 1
        self._suppressed = 0
        self._next = now + SUMMARY_EVERY_S
        return True
