"""What workers that go at their own pace tell each other: step counts, a wish to stop, and small posts.

```text
worker 0 ──┐  steps()  stopping()  read_posts()      ┌── evaluator
worker 1 ──┼──────────────►  board  ◄────────────────┤   weights_into(), post("evaluation", …), stop()
worker 2 ──┘  post("finished", …)  stop()  finish()  └── nobody waits for anybody
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from syncline.errors import IncompatibleError, PeerLostError
from syncline.server import Post
from syncline.world import World

__all__ = ["Board", "BoardBarrier", "Post"]

POLL_SECONDS = (1e-3, 0.25)
"""Seconds between two reads of the board: at first, and at most."""
LOOK_FOR_LEFT_S = 1.0
"""Seconds between two looks for workers that have left: on some transports each asks the launcher's store."""


class Board(Protocol):
    """A loose run's door to the others. Its methods may be called from any task of the process, also beside a step."""

    def steps(self) -> list[int]:
        """Steps taken by each worker so far."""
        ...

    def weights_into(self, model: nn.Module) -> None:
        """Fill a model's parameters and floating-point buffers with the weights as they are now."""
        ...

    def stopping(self) -> bool:
        """Whether somebody has called `stop()`. Sends nothing: asked after every step."""
        ...

    def stop(self) -> None:
        """All workers are to end soon."""
        ...

    def post(self, kind: str, values: Sequence[float]) -> None:
        """Leave some numbers: a kind of at most 32 bytes, at most 24 values."""
        ...

    def read_posts(self, since: int) -> list[Post]:
        """Posts with a number above `since`."""
        ...

    def finish(self) -> None:
        """This worker takes no more steps: its clock holds nobody back."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class BoardBarrier:
    """A barrier among the workers of an asynchronous run, by posts: a lost worker does not break it.

    ```text
    worker 0   wait("agreed") ── waits ──┐ both continue
    worker 1                  wait("agreed")            worker 2 is lost: the others do not wait for it
    ```
    """

    MET, CLOSED = "met", "closed"

    def __init__(self, world: World, board: Board) -> None:
        self._world = world
        self._board = board
        self._number = 0
        self._seen = 0
        self._met: dict[int, int] = {}
        """How often each worker has called `wait`."""
        self._closed: set[int] = set()

    def wait(self, what: str) -> None:
        """Return when every worker that is not lost has called it as often as this one. `what` is for messages."""
        self._number += 1
        self._board.post(self.MET, [self._world.rank, self._number])
        self._wait(what, lambda rank: self._met.get(rank, 0) >= self._number)

    def close(self) -> None:
        """Return when every worker that is not lost has called it: no worker takes steps any more."""
        self._closed.add(self._world.rank)
        self._board.post(self.CLOSED, [self._world.rank])
        self._wait("close their runs", lambda rank: rank in self._closed)

    def _missing(self, there: Callable[[int], bool]) -> list[int]:
        while True:
            posts = self._board.read_posts(self._seen)
            for post in posts:
                self._seen = max(self._seen, post.number)
                if post.kind == self.MET:
                    rank, number = int(post.values[0]), int(post.values[1])
                    self._met[rank] = max(self._met.get(rank, 0), number)
                elif post.kind == self.CLOSED:
                    self._closed.add(int(post.values[0]))
            if not posts:
                break
        world = self._world
        others = [rank for rank in range(world.size) if rank != world.rank and rank not in world.lost]
        return [rank for rank in others if not there(rank)]

    def _wait(self, what: str, there: Callable[[int], bool]) -> None:
        """Wait as long as the board shows progress: steps or posts of any worker."""
        runtime, timeout, rank = self._world.runtime, self._world.transport.timeout, self._world.rank
        gap, longest = POLL_SECONDS
        since, known = runtime.now(), (self._seen, [0])
        look = since + LOOK_FOR_LEFT_S
        while missing := self._missing(there):
            if runtime.now() >= look:
                self._refuse_those_who_left(what, there, missing)
                look = runtime.now() + LOOK_FOR_LEFT_S
            gone = [each for each in missing if each in self._closed]
            if gone and rank not in self._closed:
                raise IncompatibleError(
                    f"rank {rank} waits for all workers to {what}, and rank {gone[0]} has closed its run: every worker "
                    "must make this call, as often as the others"
                )
            now = (self._seen, self._board.steps())
            if now != known:
                since, known = runtime.now(), now
            waited = runtime.now() - since
            if waited > timeout:
                raise PeerLostError(
                    f"rank {rank} has waited {waited:.0f} s for ranks {missing} to {what}, and no worker took a step "
                    f"meanwhile (steps: {now[1]}): every worker must make this call",
                    peer=missing[0],
                    pending=f"ranks {missing} to {what}",
                    seconds=waited,
                )
            runtime.sleep(gap)
            gap = min(2 * gap, longest)

    def _refuse_those_who_left(self, what: str, there: Callable[[int], bool], missing: Sequence[int]) -> None:
        """Raise where one of those that are missing has left the world, and never comes."""
        left = {rank: why for rank in missing if (why := self._world.gone(rank))}
        still = self._missing(there) if left else []  # once more: a post may have come just before it left
        for rank in (each for each in still if each in left):
            raise PeerLostError(
                f"rank {self._world.rank} waits for ranks {missing} to {what}, and rank {rank} has ended without "
                f"closing its run ({left[rank]}): every worker closes it, by run.close() or a with block",
                peer=rank,
                pending=f"ranks {missing} to {what}",
            )
