"""A board on windows: every worker keeps its own rows in its own memory, and reads the others' without their help.

    window of worker i    │ stop │ posts written │ … │ steps of all │ finished of all │ rings of all │
                            ▲ put by whoever stops        its own are true, the others' a copy of what was last read

The layout is that of `SharedBoard`, which reads and writes it; here the others' rows are fetched before it looks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from syncline.errors import PeerLostError
from syncline.runtime import Lock
from syncline.strategies.board import POLL_SECONDS, Post
from syncline.strategies.shared_board import DONE, ENTRY_WORDS, HEAD, MOST_POSTS, SharedBoard
from syncline.world import World

__all__ = ["WindowBoard"]

logger = logging.getLogger("syncline")

STOP, WRITTEN = 0, 1
"""Words of the head: somebody wants all to stop, and how many posts this worker has written."""
PATIENCE = 5.0
"""Seconds that a look at another's rows may take: who does not answer is as far as it was."""


class WindowBoard:
    """One worker's door to it. Made by all workers together."""

    def __init__(self, world: World, weights_into: Callable[[nn.Module], None]) -> None:
        self._world = world
        self._window = world.transport.window(SharedBoard.words(world.size), torch.int64)
        self._words = self._window.local
        self._lock: Lock = world.runtime.lock()
        self._board = SharedBoard(self._words, world.rank, world.size, world.runtime.lock(), weights_into)
        self._known = [0] * world.size
        """Posts of each worker whose entries are here."""

    # Of this worker alone.

    def count(self) -> None:
        """This worker has taken a step."""
        self._board.count()

    def resume(self, steps: int) -> None:
        """This worker goes on after so many steps."""
        self._board.resume(steps)

    def stopping(self) -> bool:
        return self._board.stopping()

    def post(self, kind: str, values: Sequence[float]) -> None:
        self._board.post(kind, values)
        self._words[WRITTEN] += 1  # after the entry: who reads it finds that

    def finish(self) -> None:
        self._board.finish()

    def weights_into(self, model: nn.Module) -> None:
        self._board.weights_into(model)

    # Of all.

    def steps(self) -> list[int]:
        self._fetch(posts=False)
        return self._board.steps()

    def finished(self) -> list[bool]:
        """Who has said that it takes no more steps; who was killed has not."""
        self._fetch(posts=False)
        return self._board.finished()

    def read_posts(self, since: int) -> list[Post]:
        self._fetch(posts=True)
        return self._board.read_posts(since)

    def announce_done(self) -> None:
        """Announce that this worker has read the final weights, and wait until the others have: they read its memory.

        A worker that cannot be reached has left already.
        """
        self._board.announce_done()
        runtime, (gap, longest) = self._world.runtime, POLL_SECONDS
        until = runtime.now() + self._world.transport.timeout
        while (waiting := [rank for rank in self.others() if not self._is_done(rank)]) and runtime.now() < until:
            runtime.sleep(gap)
            gap = min(2 * gap, longest)
        if waiting:
            logger.warning("rank %d leaves while ranks %s may still read its weights", self._world.rank, waiting)

    def _is_done(self, rank: int) -> bool:
        place = HEAD + self._world.size + rank
        try:
            with self._lock:
                self._fetch_from(rank, posts=False)
        except PeerLostError:
            return True
        return int(self._words[place]) == DONE

    def stop(self) -> None:
        for rank in self.others():
            try:
                self._window.put(torch.ones(1, dtype=torch.int64), rank, STOP)
                self._window.flush(rank)
            except PeerLostError:  # it needs no telling
                continue
        self._board.stop()

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
        told = torch.zeros(HEAD + 2 * size, dtype=torch.int64)
        self._window.get(told, rank).wait(PATIENCE)
        for place in (HEAD + rank, HEAD + size + rank):
            words[place] = told[place]
        written = int(told[WRITTEN])
        first = max(self._known[rank], written - MOST_POSTS)
        while posts and first < written:
            at = first % MOST_POSTS
            count = min(written - first, MOST_POSTS - at)  # the ring ends there, and goes on at its beginning
            offset = HEAD + 2 * size + (rank * MOST_POSTS + at) * ENTRY_WORDS
            entries = torch.zeros(count * ENTRY_WORDS, dtype=torch.int64)
            self._window.get(entries, rank, offset).wait(PATIENCE)
            words[offset : offset + len(entries)] = entries
            first += count
            self._known[rank] = first
