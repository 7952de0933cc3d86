"""The mailboxes of one node: of the channels it has, of those it will have, and of those it has closed."""

from __future__ import annotations

from collections.abc import Callable

from syncline.errors import WorldError
from syncline.runtime import Runtime
from syncline.transports.mailbox import Mailbox, Posted

__all__ = ["Channels"]

MOST_CLOSED = 10_000
"""Closed channels that are remembered: what comes late for an older one lies unreceived."""


class Channels:
    """A mailbox for each channel, made by whoever needs it first: a peer may be quicker than this rank."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._mailboxes: dict[int, Mailbox] = {}
        self._closed: dict[int, None] = {}
        self._waste = Mailbox(runtime)
        self._waste.close(_no_more)

    def mailbox(self, channel: int) -> Mailbox:
        """What has come for a channel, made here already or not; one that is closed turns everything away."""
        known = self._mailboxes.get(channel)
        if known is not None:
            return known
        with self._lock:
            if channel in self._closed:
                return self._waste
            return self._mailboxes.setdefault(channel, Mailbox(self._runtime))

    def close(self, channel: int) -> None:
        """Turn away what has come for a channel and what still comes; so its senders get their room back."""
        with self._lock:
            mailbox = self._mailboxes.pop(channel, self._waste)
            self._closed[channel] = None
            if len(self._closed) > MOST_CLOSED:
                del self._closed[next(iter(self._closed))]
        mailbox.close(_no_more)

    def fail(self, error: Callable[[Posted], Exception | None]) -> None:
        """Break the receives, on any channel, for which `error` gives one."""
        for mailbox in list(self._mailboxes.values()):
            mailbox.fail(error)


def _no_more(posted: Posted) -> Exception:
    return WorldError(f"this channel is closed: nothing comes for tag {posted.tag} any more")
