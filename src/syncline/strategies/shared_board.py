"""A board in memory that all workers of one host see: step counts, a flag to stop, and posts. No locks between them.

    words    0        stop
             8 …      steps of each worker         a word each, written by that worker alone
             8+p …    whether it has finished, and whether it has read the final weights
    bytes    then     each worker's ring of posts: number, checksum, kind, values

Every place has one writer, but the flag, which only ever rises. A post that is being written, or whose writer was
killed in the middle, does not match its checksum: it is not seen, or seen later.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor, nn

from syncline.errors import SpecError
from syncline.runtime import Lock
from syncline.strategies.board import Post

__all__ = ["SharedBoard"]

HEAD = 8
"""Words before the counts."""
FINISHED, DONE = 1, 2
"""The end of a worker: it takes no more steps; it has also read the final weights."""
MOST_POSTS = 256
"""Posts of a worker that are kept; a reader that comes later misses older ones."""
MOST_VALUES = 24
KIND_BYTES = 32
CHECK = struct.Struct("<qI")
"""The post's number and the checksum of all but itself."""
BODY = struct.Struct(f"<HH{KIND_BYTES}s{MOST_VALUES}d")
"""How many values, how long the kind's name is, both."""
ENTRY_WORDS = -(-(CHECK.size + BODY.size) // 8)


class SharedBoard:
    """One worker's door to it. The tasks of one process may use it at once."""

    def __init__(
        self, memory: Tensor, rank: int, size: int, lock: Lock, weights_into: Callable[[nn.Module], None]
    ) -> None:
        words = memory.numpy()
        self._flag = words[:HEAD]
        self._steps = words[HEAD : HEAD + size]
        self._finished = words[HEAD + size : HEAD + 2 * size]
        self._rings = words[HEAD + 2 * size :].reshape(size, MOST_POSTS, ENTRY_WORDS).view(np.uint8)
        self._rank = rank
        self._lock = lock
        self._fill = weights_into
        self._written = 0
        self._next = [1] * size
        self._seen: deque[Post] = deque(maxlen=MOST_POSTS * size)

    @staticmethod
    def words(size: int) -> int:
        """How many words of 64 bits it takes, zeroed."""
        return HEAD + 2 * size + size * MOST_POSTS * ENTRY_WORDS

    # Steps.

    def count(self) -> int:
        """This worker has taken a step; how many all have taken together."""
        self._steps[self._rank] += 1
        return int(self._steps.sum())

    def resume(self, steps: int) -> None:
        """This worker goes on after so many steps."""
        self._steps[self._rank] = steps

    def steps(self) -> list[int]:
        return [int(steps) for steps in self._steps]

    def finish(self) -> None:
        self._finished[self._rank] = max(FINISHED, self._finished[self._rank])

    def announce_done(self) -> None:
        """This worker has read the final weights."""
        self._finished[self._rank] = DONE

    def finished(self) -> list[bool]:
        """Who has said that it takes no more steps; who was killed has not."""
        return [bool(flag) for flag in self._finished]

    # Stopping.

    def stopping(self) -> bool:
        return bool(self._flag[0])

    def stop(self) -> None:
        self._flag[0] = 1

    # Weights.

    def weights_into(self, model: nn.Module) -> None:
        self._fill(model)

    # Posts.

    def post(self, kind: str, values: Sequence[float]) -> None:
        name = kind.encode()
        if len(name) > KIND_BYTES or len(values) > MOST_VALUES:
            raise SpecError(
                f"a post has a kind of at most {KIND_BYTES} bytes and at most {MOST_VALUES} values "
                f"(kind: {kind!r}, values: {len(values)})"
            )
        padded = [float(value) for value in values] + [0.0] * (MOST_VALUES - len(values))
        body = BODY.pack(len(values), len(name), name, *padded)
        with self._lock:
            self._written += 1
            check = CHECK.pack(self._written, _checksum(self._written, body))
            entry = np.frombuffer(check + body, dtype=np.uint8)
            self._rings[self._rank, (self._written - 1) % MOST_POSTS, : entry.size] = entry

    def read_posts(self, since: int) -> list[Post]:
        """Posts after the `since`-th that this process has seen. They are numbered as they are seen."""
        with self._lock:
            for writer in range(len(self._next)):
                self._collect(writer)
            return [post for post in self._seen if post.number > since]

    def close(self) -> None:
        """Nothing to let go of: the memory goes with who holds it."""

    def _collect(self, writer: int) -> None:
        while True:
            due = self._next[writer]
            data = self._rings[writer, (due - 1) % MOST_POSTS].tobytes()
            number, checksum = CHECK.unpack_from(data)
            body = data[CHECK.size : CHECK.size + BODY.size]
            if number < due or checksum != _checksum(number, body):
                return
            if number > due:  # overwritten before it was read: go on with the oldest that may be left
                self._next[writer] = number - MOST_POSTS + 1
                continue
            count, length, name, *values = BODY.unpack(body)
            last = self._seen[-1].number if self._seen else 0
            self._seen.append(Post(last + 1, name[:length].decode(), tuple(values[:count])))
            self._next[writer] = due + 1


def _checksum(number: int, body: bytes) -> int:
    return zlib.crc32(body, number & 0xFFFFFFFF)
