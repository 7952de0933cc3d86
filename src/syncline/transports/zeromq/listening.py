"""Messages that are heard by whoever turns the crank, in the order they were sent: no thread is woken for them.

A message whose bytes are still with its sender is accepted, and what the same rank sends meanwhile waits behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.transports.base import as_bytes
from syncline.transports.mailbox import Arrived, Mailbox, Posted
from syncline.transports.zeromq.node import Node

__all__ = ["Ears", "ZmqListening"]

NOTHING = memoryview(b"")


class Ears(NamedTuple):
    """Who listens. `place` gives a rank of the world as its channel counts, `rank_of` the other way round."""

    place: Callable[[int], int]
    rank_of: Callable[[int], int]
    hear: Callable[[int, memoryview], None]
    lost: Callable[[int], None]


class ZmqListening:
    """One tag of one channel."""

    def __init__(self, node: Node, mailbox: Mailbox, tag: int, most: int, ears: Ears) -> None:
        self._node = node
        self._mailbox = mailbox
        self._tag = tag
        self._most = most
        self._ears = ears
        self._came: deque[Arrived] = deque()
        self._behind: dict[int, deque[Arrived]] = {}
        """By rank: what waits until the message before it is whole."""
        mailbox.listen(tag, self._note)
        node.mourn(self._note_loss)
        for rank in node.lost_links():
            self._note_loss(rank)
        node.nudge()

    def fetch(self, buffer: Tensor, source: int, tag: int, then: Callable[[Exception | None], None]) -> None:
        rank = self._ears.rank_of(source)

        def filled(posted: Posted) -> None:
            self._node.crank.defer(lambda: then(posted.error))

        posted = self._mailbox.post(as_bytes(buffer), rank, tag, True, filled)
        gone = "" if rank == self._node.rank else self._node.link(rank).gone
        if gone and self._mailbox.withdraw(posted):
            posted.error = self._node.lost(rank, gone, f"a message (tag {tag})", 0.0)
            posted.settle()

    def close(self) -> None:
        self._mailbox.listen(self._tag, None)
        self._node.unmourn(self._note_loss)

    # Noted under locks, done by the driver.

    def _note(self, message: Arrived) -> None:
        self._came.append(message)
        self._node.crank.defer(self._next)

    def _note_loss(self, rank: int) -> None:
        self._node.crank.defer(partial(self._lose, rank))

    def _next(self) -> None:
        message = self._came.popleft()
        behind = self._behind.get(message.source) if self._behind else None
        if behind is None:
            self._take(message)
        else:
            behind.append(message)

    def _take(self, message: Arrived) -> None:
        accept, source = message.accept, message.source
        if accept is None:
            data = message.data
            assert data is not None, "what is not offered has come"
            view = data.numpy().data if isinstance(data, Tensor) else data
            try:
                self._ears.hear(self._ears.place(source), view if len(view) <= self._most else NOTHING)
            finally:
                message.matched()
        elif message.nbytes > self._most:
            accept(None)
            self._ears.hear(self._ears.place(source), NOTHING)
        else:
            self._behind[source] = deque()
            room = torch.empty(message.nbytes, dtype=torch.uint8)
            accept(Posted(room, source, self._tag, True, source, message.nbytes, then=self._whole))

    def _whole(self, posted: Posted) -> None:
        self._node.crank.defer(lambda: self._go_on(posted))

    def _go_on(self, posted: Posted) -> None:
        """A message that was offered is here: hear it, and what came meanwhile."""
        behind = self._behind.pop(posted.source)
        if posted.error is None:
            self._ears.hear(self._ears.place(posted.source), posted.data.numpy().data)
        while behind:
            self._take(behind.popleft())
            if posted.source in self._behind:
                self._behind[posted.source].extend(behind)
                return

    def _lose(self, rank: int) -> None:
        with suppress(ValueError):  # nobody of this channel
            self._ears.lost(self._ears.place(rank))
