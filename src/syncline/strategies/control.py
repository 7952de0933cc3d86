"""The control channel of an asynchronous run: step counts, a request to stop, and small messages.

```text
worker 0 ──┐  steps()  stop_requested()  read_posts()    ┌── evaluator
worker 1 ──┼────────────►  ControlChannel  ◄─────────────┤   load_weights(), post("evaluation", …), request_stop()
worker 2 ──┘  post("finished", …)  finish()              └── no call waits for a worker
```

| implementation | where | used by |
|---|---|---|
| `SharedMemoryChannel` | memory of one host, here | hogwild |
| `WindowChannel` | one-sided windows, here | onesided |
| `ServerChannel` | server 0, beside the weights | strategies of the parameter server |
| `PairwiseChannel` | server 0, without weights, `gossip/pairwise.py` | gossip(pairwise=True) |
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError, PeerLostError, SpecError
from syncline.runtime import Lock, Runtime
from syncline.server import Post
from syncline.world import World

__all__ = ["ControlBarrier", "ControlChannel", "Post", "SharedMemoryChannel", "WindowChannel", "poll"]

logger = logging.getLogger("syncline")

POLL_SECONDS = (1e-3, 0.25)
"""The interval between two reads of the channel: the first, and the largest."""
CHECK_LEFT_EVERY_S = 1.0
"""Interval between two checks for workers that have left. On some transports a check asks the launcher's store."""


class ControlChannel(Protocol):
    """How the workers of an asynchronous run, and an evaluator, inform each other.

    The methods may be called from any task of the process, also during a step.
    """

    def steps(self) -> list[int]:
        """The number of steps that each worker has taken."""
        ...

    def load_weights(self, model: nn.Module) -> None:
        """Fill a model's parameters and floating-point buffers with the current weights."""
        ...

    def stop_requested(self) -> bool:
        """Whether `request_stop()` was called by anyone. Sends nothing, because it is called after every step."""
        ...

    def request_stop(self) -> None:
        """Ask all workers to end soon."""
        ...

    def post(self, kind: str, values: Sequence[float]) -> None:
        """Publish a few numbers: a kind of at most 32 bytes and at most 24 values."""
        ...

    def read_posts(self, since: int) -> list[Post]:
        """The posts with a number above `since`."""
        ...

    def finish(self) -> None:
        """This worker takes no more steps, so its clock delays no other worker."""
        ...

    def close(self) -> None:
        """Release the channel."""
        ...


def poll(runtime: Runtime) -> Iterator[None]:
    """Yields again and again, with growing pauses in between. The caller leaves the loop."""
    interval, longest = POLL_SECONDS
    while True:
        yield
        runtime.sleep(interval)
        interval = min(2 * interval, longest)


class ControlBarrier:
    """A barrier among the workers of an asynchronous run, by posts: a lost worker does not break it.

    ```text
    worker 0   wait("agreed") ── waits ──┐ both continue
    worker 1                  wait("agreed")            worker 2 is lost: the others do not wait for it
    ```
    """

    ARRIVED, CLOSED = "met", "closed"

    def __init__(self, world: World, channel: ControlChannel) -> None:
        self._world = world
        self._channel = channel
        self._number = 0
        self._read_until = 0
        """The number of the last post that was read."""
        self._arrivals: dict[int, int] = {}
        """How often each worker has called `wait`."""
        self._closed: set[int] = set()

    def wait(self, what: str) -> None:
        """Return when every worker that is not lost has called it as often as this one. `what` is for messages."""
        self._number += 1
        self._channel.post(self.ARRIVED, [self._world.rank, self._number])
        self._wait(what, lambda rank: self._arrivals.get(rank, 0) >= self._number)

    def close(self) -> None:
        """Return when every worker that is not lost has called it: no worker takes steps any more."""
        self._closed.add(self._world.rank)
        self._channel.post(self.CLOSED, [self._world.rank])
        self._wait("close their runs", lambda rank: rank in self._closed)

    def _missing(self, arrived: Callable[[int], bool]) -> list[int]:
        while posts := self._channel.read_posts(self._read_until):
            for post in posts:
                self._read_until = max(self._read_until, post.number)
                if post.kind == self.ARRIVED:
                    rank, number = int(post.values[0]), int(post.values[1])
                    self._arrivals[rank] = max(self._arrivals.get(rank, 0), number)
                elif post.kind == self.CLOSED:
                    self._closed.add(int(post.values[0]))
        world = self._world
        others = [rank for rank in range(world.size) if rank != world.rank and rank not in world.lost]
        return [rank for rank in others if not arrived(rank)]

    def _wait(self, what: str, arrived: Callable[[int], bool]) -> None:
        """Wait as long as the channel shows progress: steps or posts of any worker."""
        runtime, timeout, rank = self._world.runtime, self._world.transport.timeout, self._world.rank
        since, progress = runtime.now(), (self._read_until, [0])
        next_check = since + CHECK_LEFT_EVERY_S
        for _ in poll(runtime):
            missing = self._missing(arrived)
            if not missing:
                return
            if runtime.now() >= next_check:
                self._raise_if_left(what, arrived, missing)
                next_check = runtime.now() + CHECK_LEFT_EVERY_S
            closed = [each for each in missing if each in self._closed]
            if closed and rank not in self._closed:
                raise IncompatibleError(
                    f"rank {rank} waits for all workers to {what}, and rank {closed[0]} has closed its run: every "
                    "worker must make this call, as often as the others"
                )
            now = (self._read_until, self._channel.steps())
            if now != progress:
                since, progress = runtime.now(), now
            waited = runtime.now() - since
            if waited > timeout:
                raise PeerLostError(
                    f"rank {rank} has waited {waited:.0f} s for ranks {missing} to {what}, and no worker took a step "
                    f"meanwhile (steps: {now[1]}): every worker must make this call",
                    peer=missing[0],
                    pending=f"ranks {missing} to {what}",
                    seconds=waited,
                )

    def _raise_if_left(self, what: str, arrived: Callable[[int], bool], missing: Sequence[int]) -> None:
        """Raise if a missing worker has left the world, because it never arrives."""
        left = {rank: why for rank in missing if (why := self._world.gone_reason(rank))}
        still = self._missing(arrived) if left else []  # again: a post may have come just before the worker left
        for rank in (each for each in still if each in left):
            raise PeerLostError(
                f"rank {self._world.rank} waits for ranks {missing} to {what}, and rank {rank} has ended without "
                f"closing its run ({left[rank]}): every worker closes it, by run.close() or a with block",
                peer=rank,
                pending=f"ranks {missing} to {what}",
            )


HEADER_WORDS = 8
"""Words before the step counts."""
STOP, WRITTEN = 0, 1
"""Words of the header: the request to stop, and in a window the number of this worker's posts."""
READ_TIMEOUT_S = 5.0
"""Timeout of a read of another worker's window. After it, the worker's last known values are used."""
MAX_POSTS = 256
"""Posts that are kept of each worker. A reader that comes later misses older ones."""
MAX_POST_VALUES = 24
MAX_KIND_BYTES = 32
POST_CHECK = struct.Struct("<qI")
"""The post's number, and a checksum of the rest."""
POST_BODY = struct.Struct(f"<HH{MAX_KIND_BYTES}s{MAX_POST_VALUES}d")
"""The number of values, the length of the kind, the kind, the values."""
POST_WORDS = -(-(POST_CHECK.size + POST_BODY.size) // 8)


class SharedMemoryChannel:
    """A channel in memory that all workers of a host share, without locks between processes.

    ```text
    words    0        stop
             8 …      steps of each worker                one word each, written by that worker alone
             8+p …    1 for each worker that has read the final weights
    bytes    then     each worker's ring of posts: number, checksum, kind, values
    ```

    Every word has one writer, except the stop flag, which is only ever set. A post that is incomplete does not match
    its checksum, so a reader does not see it, or sees it later. The tasks of one process may use the object at once.
    """

    def __init__(
        self, memory: Tensor, rank: int, size: int, lock: Lock, load_weights: Callable[[nn.Module], None]
    ) -> None:
        words = memory.numpy()
        self._header = words[:HEADER_WORDS]
        self._steps = words[HEADER_WORDS : HEADER_WORDS + size]
        self._done = words[HEADER_WORDS + size : HEADER_WORDS + 2 * size]
        self.rings = words[HEADER_WORDS + 2 * size :].reshape(size, MAX_POSTS, POST_WORDS).view(np.uint8)
        self._rank = rank
        self._lock = lock
        self._load_weights = load_weights
        self._written = 0
        self._next = [1] * size
        self._read: deque[Post] = deque(maxlen=MAX_POSTS * size)

    @staticmethod
    def words(size: int) -> int:
        """The number of zeroed 64-bit words that a channel of `size` workers needs."""
        return HEADER_WORDS + 2 * size + size * MAX_POSTS * POST_WORDS

    def count(self) -> int:
        """Count a step of this worker. Returns the steps of all workers together."""
        self._steps[self._rank] += 1
        return int(self._steps.sum())

    def resume(self, steps: int) -> None:
        """Set this worker's step count, after a checkpoint was loaded."""
        self._steps[self._rank] = steps

    def steps(self) -> list[int]:
        return [int(steps) for steps in self._steps]

    def finish(self) -> None:
        """Does nothing: no worker waits for another's steps."""

    def announce_done(self) -> None:
        """This worker has read the final weights."""
        self._done[self._rank] = 1

    def stop_requested(self) -> bool:
        return bool(self._header[STOP])

    def request_stop(self) -> None:
        self._header[STOP] = 1

    def load_weights(self, model: nn.Module) -> None:
        self._load_weights(model)

    def post(self, kind: str, values: Sequence[float]) -> None:
        name = kind.encode()
        if len(name) > MAX_KIND_BYTES or len(values) > MAX_POST_VALUES:
            raise SpecError(
                f"a post has a kind of at most {MAX_KIND_BYTES} bytes and at most {MAX_POST_VALUES} values "
                f"(kind: {kind!r}, values: {len(values)})"
            )
        padded = [float(value) for value in values] + [0.0] * (MAX_POST_VALUES - len(values))
        body = POST_BODY.pack(len(values), len(name), name, *padded)
        with self._lock:
            self._written += 1
            check = POST_CHECK.pack(self._written, _checksum(self._written, body))
            entry = np.frombuffer(check + body, dtype=np.uint8)
            self.rings[self._rank, (self._written - 1) % MAX_POSTS, : entry.size] = entry

    def read_posts(self, since: int) -> list[Post]:
        """Posts after the `since`-th that this process has read. They are numbered in the order of reading."""
        with self._lock:
            for writer in range(len(self._next)):
                self._read_ring(writer)
            return [post for post in self._read if post.number > since]

    def close(self) -> None:
        """Does nothing: the owner of the memory releases it."""

    def _read_ring(self, writer: int) -> None:
        while True:
            due = self._next[writer]
            data = self.rings[writer, (due - 1) % MAX_POSTS].tobytes()
            number, checksum = POST_CHECK.unpack_from(data)
            body = data[POST_CHECK.size : POST_CHECK.size + POST_BODY.size]
            if number < due or checksum != _checksum(number, body):
                return
            if number > due:  # overwritten before it was read: continue with the oldest one that may be left
                self._next[writer] = number - MAX_POSTS + 1
                continue
            count, length, name, *values = POST_BODY.unpack(body)
            last = self._read[-1].number if self._read else 0
            self._read.append(Post(last + 1, name[:length].decode(), tuple(values[:count])))
            self._next[writer] = due + 1


class WindowChannel(SharedMemoryChannel):
    """A channel on one-sided windows. All workers construct it together.

    Each worker has a window with the layout of `SharedMemoryChannel`. It writes its own rows there, and fetches those
    of the others before it reads them. Other workers put the request to stop.
    """

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
        return bool(self._done[rank])

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


def _checksum(number: int, body: bytes) -> int:
    return zlib.crc32(body, number & 0xFFFFFFFF)
