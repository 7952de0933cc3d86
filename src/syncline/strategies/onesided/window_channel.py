"""A control channel on one-sided windows. Each worker writes rows in its own memory and reads those of the others.

    window of worker i    │ stop │ posts written │ … │ steps of all │ finished of all │ rings of all │
                            ▲ put by whoever stops        its own are true, the others' a copy of what was last read

The layout is that of `SharedMemoryChannel`. The other workers' rows are fetched before they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from syncline.errors import PeerLostError
from syncline.runtime import Lock
from syncline.strategies.control import (
    DONE,
    HEADER_WORDS,
    MAX_POSTS,
    POLL_SECONDS,
    POST_WORDS,
    Post,
    SharedMemoryChannel,
)
from syncline.world import World

__all__ = ["WindowChannel"]

logger = logging.getLogger("syncline")

STOP, WRITTEN = 0, 1
"""Words of the head: somebody wants all to stop, and how many posts this worker has written."""
READ_TIMEOUT_S = 5.0
"""Seconds that a look at another's rows may take: who does not answer is as far as it was."""


class WindowChannel:
    """One worker's door to it. Made by all workers together."""

    def __init__(self, world: World, load_weights: Callable[[nn.Module], None]) -> None:
        self._world = world
        self._window = world.transport.memory.window(SharedMemoryChannel.words(world.size), torch.int64)
        self._words = self._window.local
        self._lock: Lock = world.runtime.lock()
        self._local = SharedMemoryChannel(self._words, world.rank, world.size, world.runtime.lock(), load_weights)
        self._known = [0] * world.size
        """Posts of each worker whose entries are here."""

    # Of this worker alone.

    def count(self) -> None:
        """This worker has taken a step."""
        self._local.count()

    def resume(self, steps: int) -> None:
        """This worker goes on after so many steps."""
        self._local.resume(steps)

    def stop_requested(self) -> bool:
        return self._local.stop_requested()

    def post(self, kind: str, values: Sequence[float]) -> None:
        self._local.post(kind, values)
        self._words[WRITTEN] += 1  # after the entry: who reads it finds that

    def finish(self) -> None:
        self._local.finish()

    def load_weights(self, model: nn.Module) -> None:
        self._local.load_weights(model)

    # Of all.

    def steps(self) -> list[int]:
        self._fetch(posts=False)
        return self._local.steps()

    def finished(self) -> list[bool]:
        """Who has said that it takes no more steps; who was killed has not."""
        self._fetch(posts=False)
        return self._local.finished()

    def read_posts(self, since: int) -> list[Post]:
        self._fetch(posts=True)
        return self._local.read_posts(since)

    def announce_done(self) -> None:
        """Announce that this worker has read the final weights, and wait until the others have: they read its memory.

        A worker that cannot be reached has left already.
        """
        self._local.announce_done()
        runtime, (gap, longest) = self._world.runtime, POLL_SECONDS
        until = runtime.now() + self._world.transport.timeout
        while (waiting := [rank for rank in self.others() if not self._is_done(rank)]) and runtime.now() < until:
            runtime.sleep(gap)
            gap = min(2 * gap, longest)
        if waiting:
            logger.warning("rank %d leaves while ranks %s may still read its weights", self._world.rank, waiting)

    def _is_done(self, rank: int) -> bool:
        place = HEADER_WORDS + self._world.size + rank
        try:
            with self._lock:
                self._fetch_from(rank, posts=False)
        except PeerLostError:
            return True
        return int(self._words[place]) == DONE

    def request_stop(self) -> None:
        for rank in self.others():
            try:
                self._window.put(torch.ones(1, dtype=torch.int64), rank, STOP)
                self._window.flush(rank)
            except PeerLostError:  # it needs no telling
                continue
        self._local.request_stop()

    def others(self) -> list[int]:
        """The other workers that are not known to be gone."""
        gone = self._world.lost
        return [rank for rank in range(self._world.size) if rank != self._world.rank and rank not in gone]

    def close(self) -> None:
        """Let the memory go; a worker's run does so, together with the others."""

    def release(self) -> None:
        """Let the memory go. Every worker calls it."""
        self._window.close()

    # Within.

    def _fetch(self, posts: bool) -> None:
        with self._lock:
            for rank in self.others():
                try:
                    self._fetch_from(rank, posts)
                except PeerLostError:  # as far as it was; whether it is lost is the transport's to say
                    continue

    def _fetch_from(self, rank: int, posts: bool) -> None:
        size, words = self._world.size, self._words
        told = torch.zeros(HEADER_WORDS + 2 * size, dtype=torch.int64)
        self._window.get(told, rank).wait(READ_TIMEOUT_S)
        for place in (HEADER_WORDS + rank, HEADER_WORDS + size + rank):
            words[place] = told[place]
        written = int(told[WRITTEN])
        first = max(self._known[rank], written - MAX_POSTS)
        while posts and first < written:
            at = first % MAX_POSTS
            count = min(written - first, MAX_POSTS - at)  # the ring ends there, and goes on at its beginning
            offset = HEADER_WORDS + 2 * size + (rank * MAX_POSTS + at) * POST_WORDS
            entries = torch.zeros(count * POST_WORDS, dtype=torch.int64)
            self._window.get(entries, rank, offset).wait(READ_TIMEOUT_S)
            words[offset : offset + len(entries)] = entries
            first += count
            self._known[rank] = first
