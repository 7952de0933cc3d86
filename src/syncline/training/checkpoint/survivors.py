"""Saving if workers are lost: the others agree on which workers save, and on whether the checkpoint was saved.

```text
worker 0   "saving" ──┐  "members" 0, 2      own part ──┐ shared part, manifest, rename   "saved" ──► returns
worker 1   ✝          │      ▼                          │                                     ▼
worker 2   "saving" ──┴── reads who saves ── own part ──┴────────────────────────────── reads it ──► returns
```

An asynchronous strategy has a board that outlives any worker. The lowest worker that is not lost makes the decisions
and posts them there. If a worker is lost while it saves, the others begin again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.errors import PeerLostError, UnsupportedError
from syncline.strategies.control import ControlChannel
from syncline.world import Group, World

__all__ = ["Survivors"]

SAVING, MEMBERS, SAVED = "saving", "members", "saved"
"""Kinds of posts: rank and attempt; attempt and who takes part; attempt and the edition, or one of the two below."""
AGAIN, NEVER = 0, -1
"""In place of an edition: a worker was lost, and the others begin again; or it is unknown which, and all raise."""
WORD_BITS = 48
"""Ranks in one number of a post: a float holds 53 bits exactly."""
MAX_WORDS = 23
"""Largest number of such numbers in a post."""
MIN_POLL_S, MAX_POLL_S = 1e-3, 0.2
"""Seconds between two reads of the board: at first, and at most."""
LOSS_TIMEOUT_S = 10.0
"""Seconds within which the launcher or the transport must report the loss that broke a save."""


class Survivors:
    """One worker's view of which workers save. A process has one for each board, because it counts the attempts."""

    def __init__(self, world: World, board: ControlChannel) -> None:
        self.world, self._board = world, board
        self._attempt = 0
        self._since = 0
        self._saving: dict[int, set[int]] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._saved: dict[int, int] = {}
        self._teams: dict[tuple[int, ...], Group] = {}

    def assemble(self) -> Group:
        """Wait until every worker that is not lost is ready to save. Returns the team of these workers."""
        self._attempt += 1
        attempt, rank = self._attempt, self.world.rank
        self._board.post(SAVING, [rank, attempt])

        def known() -> bool:
            living = self._living()
            if (
                attempt not in self._members
                and living[0] == rank
                and self._saving.get(attempt, set()).issuperset(living)
            ):
                self._tell(MEMBERS, [attempt, *_as_words(living, self.world.size)])
            return attempt in self._members

        self._wait("the other workers to save", known)
        members = self._members[attempt]
        if rank not in members:
            raise PeerLostError(
                f"rank {rank} waits to save, and the other workers have declared it lost: ranks {list(members)} save "
                "without it",
                peer=rank,
                pending="a checkpoint",
            )
        return self._team(members)

    def settle(self, edition: int | None, error: PeerLostError | None) -> int | None:
        """The result of an attempt, the same on every worker: the edition that was saved, or None to begin again.

        `edition` is None if this worker has seen a loss, `error`, which is raised if the lost worker is unknown.
        """
        attempt, rank = self._attempt, self.world.rank
        members = self._members[attempt]

        def known() -> bool:
            living = [member for member in members if member not in self.world.lost or member == rank]
            if attempt not in self._saved and living[0] == rank:
                # The lowest worker that is left has written the shared part, or knows whether it was written.
                self._tell(SAVED, [attempt, self._fate(members) if edition is None else edition])
            return attempt in self._saved

        self._wait("the other workers to say whether it is saved", known)
        fate = self._saved[attempt]
        if fate == NEVER:
            raise error or PeerLostError(
                "the checkpoint was not saved: a worker has seen a loss", pending="a checkpoint"
            )
        return None if fate == AGAIN else fate

    def close(self) -> None:
        """Called when the world is left, which closes the teams too."""
        self._teams.clear()

    def _living(self) -> list[int]:
        gone = self.world.lost
        return [rank for rank in range(self.world.size) if rank not in gone or rank == self.world.rank]

    def _team(self, members: tuple[int, ...]) -> Group:
        if len(members) == self.world.size:
            return self.world.everyone
        if members not in self._teams:
            self._teams[members] = self.world.group(members)
        return self._teams[members]

    def _fate(self, members: tuple[int, ...]) -> int:
        """After a loss: wait until the launcher or the transport reports the lost worker."""
        runtime = self.world.runtime
        until = runtime.now() + min(LOSS_TIMEOUT_S, self.world.transport.timeout)
        while not any(member in self.world.lost for member in members):
            if runtime.now() >= until:
                return NEVER
            runtime.sleep(MAX_POLL_S)
        return AGAIN

    def _tell(self, kind: str, values: list[float]) -> None:
        """Post a decision, and read the board. If there are two decisions, all workers take the first."""
        self._board.post(kind, values)
        self._read()

    def _read(self) -> None:
        for post in self._board.read_posts(self._since):
            self._since = max(self._since, post.number)
            if post.kind == SAVING:
                self._saving.setdefault(int(post.values[1]), set()).add(int(post.values[0]))
            elif post.kind == MEMBERS:
                self._members.setdefault(int(post.values[0]), _from_words(post.values[1:], self.world.size))
            elif post.kind == SAVED:
                self._saved.setdefault(int(post.values[0]), int(post.values[1]))

    def _wait(self, what: str, known: Callable[[], bool]) -> None:
        """Read the board until `known` is true. Any post shows that the others are alive, and restarts the timeout."""
        runtime, patience = self.world.runtime, self.world.transport.timeout
        gap, since, before = MIN_POLL_S, runtime.now(), self._since
        self._read()
        while not known():
            runtime.sleep(gap)
            gap = min(1.5 * gap, MAX_POLL_S)
            self._read()
            if self._since != before:
                since, before = runtime.now(), self._since
            if runtime.now() - since > patience:
                here, lost = sorted(self._saving.get(self._attempt, ())), sorted(self.world.lost)
                raise PeerLostError(
                    f"rank {self.world.rank} has waited {patience:g} s for {what} (here: {here}, lost: {lost})",
                    pending=what,
                    seconds=runtime.now() - since,
                )


def _as_words(ranks: list[int], size: int) -> list[float]:
    """The ranks that take part, as numbers of a post; empty if all do.

    >>> _as_words([0, 2], 3), _as_words([0, 1, 2], 3)
    ([5.0], [])
    """
    if len(ranks) == size:
        return []
    words = [0] * -(-size // WORD_BITS)
    if len(words) > MAX_WORDS:
        raise UnsupportedError(
            f"{size - len(ranks)} of {size} workers are lost, and the others can save only in a world of at most "
            f"{MAX_WORDS * WORD_BITS} workers: resume from the latest checkpoint"
        )
    for rank in ranks:
        words[rank // WORD_BITS] |= 1 << rank % WORD_BITS
    return [float(word) for word in words]


def _from_words(words: Any, size: int) -> tuple[int, ...]:
    """
    >>> _from_words([5.0], 3), _from_words([], 2)
    ((0, 2), (0, 1))
    """
    found = [int(word) for word in words]
    if not found:
        return tuple(range(size))
    return tuple(rank for rank in range(size) if found[rank // WORD_BITS] >> rank % WORD_BITS & 1)
