"""What transports share that end in this process's own memory: handles over a mailbox, a window of one's own."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.errors import WorldError
from syncline.transports.base import (
    COMPARISON_TAGS,
    LANE_TAGS,
    Handle,
    Transport,
    check_span,
    event_timeout,
    format_bytes,
)
from syncline.transports.mailbox import Mailbox, Posted

__all__ = ["Completed", "LocalWindow", "MailboxHandle", "describe_recv", "no_more", "tag_name"]


class Completed:
    """A handle of something that is already done."""

    def __init__(self, nbytes: int, source: int = -1) -> None:
        self.nbytes = nbytes
        self.source = source

    def wait(self, timeout: float | None = None) -> None:
        return


class MailboxHandle:
    """A receive that a mailbox will fill. Its `str` says what it waits for."""

    __slots__ = ("_mailbox", "_posted", "_transport", "nbytes", "source")

    def __init__(self, transport: Transport, mailbox: Mailbox, posted: Posted) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._posted = posted
        self.source = -1
        self.nbytes = 0

    def done(self) -> bool:
        """Whether a wait would return at once."""
        return self._posted.settled

    def wait(self, timeout: float | None = None) -> None:
        posted, transport = self._posted, self._transport
        event = None if posted.settled else self._mailbox.event_of(posted)
        if event is not None:
            patience = transport.timeout if timeout is None else timeout
            if not event.wait(event_timeout(patience), self, hang=timeout is None) and self._mailbox.withdraw(posted):
                raise transport.failure(posted.wanted, str(self), patience, None)
        if posted.error is not None:
            raise posted.error
        self.source, self.nbytes = posted.source, posted.nbytes

    def __str__(self) -> str:
        posted = self._posted
        return describe_recv(self._transport, posted.wanted, posted.tag, posted.data.numel())


def no_more(posted: Posted) -> WorldError:
    """What a receive is told on a channel that this rank has closed or given up."""
    return WorldError(f"this rank has closed the channel: nothing comes for {tag_name(posted.tag)} any more")


def describe_recv(transport: Transport, source: int | None, tag: int, nbytes: int) -> str:
    """For whom and for what a receive waits, in the world's ranks."""
    whom = "anyone" if source is None else f"rank {transport.members[source]}"
    return f"a message from {whom} ({tag_name(tag)}, {format_bytes(nbytes)})"


def tag_name(tag: int) -> str:
    """A tag as people know it."""
    if tag >= COMPARISON_TAGS:
        return "comparison of calls"
    return f"tag {tag}" if tag < LANE_TAGS else f"lane {tag - LANE_TAGS}"


class LocalWindow:
    """The window of a world of one."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.local = torch.zeros(numel, dtype=dtype)

    def put(self, values: Tensor, to: int, offset: int = 0) -> None:
        check_span(self.local, values, offset)
        self.local[offset : offset + values.numel()].copy_(values.reshape(-1))

    def get(self, into: Tensor, source: int, offset: int = 0) -> Handle:
        check_span(self.local, into, offset)
        into.view(-1).copy_(self.local[offset : offset + into.numel()])
        return Completed(into.numel() * into.element_size(), 0)

    def accumulate(self, values: Tensor, to: int, offset: int = 0) -> None:
        check_span(self.local, values, offset)
        self.local[offset : offset + values.numel()].add_(values.reshape(-1))

    def flush(self, to: int | None = None) -> None:
        return

    def close(self) -> None:
        return
