"""A control channel on one-sided windows. Each worker writes rows in its own memory and reads those of the others.

    window of worker i    │ stop │ posts written │ … │ steps of all │ finished of all │ rings of all │
                            ▲ put by other workers        its own row is current; others are copies of the last read

The layout is that of `SharedMemoryChannel`. The other workers' rows are fetched before they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from syncline.errors import PeerLostError
from syncline.strategies.control import (
    DONE,
    HEADER_WORDS,
    MAX_POSTS,
    POST_WORDS,
    Post,
    SharedMemoryChannel,
    poll,
)
from syncline.world import World

__all__ = ["WindowChannel"]

logger = logging.getLogger("syncline")

STOP, WRITTEN = 0, 1
"""Words of the header: the request to stop, and the number of this worker's posts."""
READ_TIMEOUT_S = 5.0
"""Timeout of a read of another worker's memory. After it, the worker's last known values are used."""


class WindowChannel(SharedMemoryChannel):
    """One worker's channel. All workers construct it together."""

    def __init__(self, world: World, load_weights: Callable[[nn.Module], None]) -> None:
        self._world = world
        self._window = world.transport.memory.window(SharedMemoryChannel.words(world.size), torch.int64)
        self._words = self._window.local
        super().__init__(self._words, world.rank, world.size, world.runtime.lock(), load_weights)
        self._fetching = world.runtime.lock()
        self._fetched_posts = [0] * world.size
        """The number of each worker's posts that are copied here."""

    def post(self, kind: str, values: Sequence[float]) -> None:
        super().post(kind, values)
        self._words[WRITTEN] += 1  # after the post, so that a reader of the count finds it

    def steps(self) -> list[int]:
        self._fetch(posts=False)
        return super().steps()

    def finished(self) -> list[bool]:
        self._fetch(posts=False)
        return super().finished()

    def read_posts(self, since: int) -> list[Post]:
        self._fetch(posts=True)
        return super().read_posts(since)

    def announce_done(self) -> None:
        """Announce that this worker has read the final weights, and wait for the others, which read its memory.

        A worker that cannot be reached has already left.
        """
        super().announce_done()
        now = self._world.runtime.now
        until = now() + self._world.transport.timeout
        for _ in poll(self._world.runtime):
            waiting = [rank for rank in self.others() if not self._is_done(rank)]
            if not waiting:
                return
            if now() >= until:
                logger.warning("rank %d leaves while ranks %s may still read its weights", self._world.rank, waiting)
                return

    def _is_done(self, rank: int) -> bool:
        try:
            with self._fetching:
                self._fetch_from(rank, posts=False)
        except PeerLostError:
            return True
        return int(self._words[HEADER_WORDS + self._world.size + rank]) == DONE

    def request_stop(self) -> None:
        for rank in self.others():
            try:
                self._window.put(torch.ones(1, dtype=torch.int64), rank, STOP)
                self._window.flush(rank)
            except PeerLostError:  # a lost worker has stopped
                continue
        super().request_stop()

    def others(self) -> list[int]:
        """The other workers that are not known to be lost."""
        lost = self._world.lost
        return [rank for rank in range(self._world.size) if rank != self._world.rank and rank not in lost]

    def release(self) -> None:
        """Free the window. Every worker calls it."""
        self._window.close()

    def _fetch(self, posts: bool) -> None:
        with self._fetching:
            for rank in self.others():
                try:
                    self._fetch_from(rank, posts)
                except PeerLostError:  # keep the last values; the transport decides whether the worker is lost
                    continue

    def _fetch_from(self, rank: int, posts: bool) -> None:
        size, words = self._world.size, self._words
        header = torch.zeros(HEADER_WORDS + 2 * size, dtype=torch.int64)
        self._window.get(header, rank).wait(READ_TIMEOUT_S)
        for place in (HEADER_WORDS + rank, HEADER_WORDS + size + rank):
            words[place] = header[place]
        written = int(header[WRITTEN])
        first = max(self._fetched_posts[rank], written - MAX_POSTS)
        while posts and first < written:
            at = first % MAX_POSTS
            count = min(written - first, MAX_POSTS - at)  # up to the end of the ring
            offset = HEADER_WORDS + 2 * size + (rank * MAX_POSTS + at) * POST_WORDS
            entries = torch.zeros(count * POST_WORDS, dtype=torch.int64)
            self._window.get(entries, rank, offset).wait(READ_TIMEOUT_S)
            words[offset : offset + len(entries)] = entries
            first += count
            self._fetched_posts[rank] = first
