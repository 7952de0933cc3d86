"""One worker's weights, which others average with theirs at any time: two at once, and nobody else between.

```text
active i                                   passive j, in a task of its own for each peer
holds its weights ── AVERAGE, x_i ───────► holds its weights: d = (x_i − x_j) / 2,  x_j += d
x_i −= d          ◄───────────── OK, d ─── lets go
lets go
```

What j gains i loses, so the sum stays whatever happens around it. Whoever holds its own weights while it waits would
wait in a circle with others that do the same; so workers are put in an order, the even ones before the odd ones, and
each asks only those after it. On a graph whose edges all join even and odd ranks that makes half of them active and
half passive. A worker that dies in the middle takes its own weights along, before or after; the other's are either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, SynclineError
from syncline.reduction import Stats
from syncline.runtime import Task
from syncline.strategies.gossip.letters import (
    ANSWERS,
    ASKING,
    AVERAGE,
    DONE,
    FINAL,
    OK,
    READ,
    REFUSED,
    Letter,
    room_for,
)
from syncline.transports import Handle, Transport

__all__ = ["Partners", "comes_before", "mean_of"]

logger = logging.getLogger("syncline")


def comes_before(one: int, other: int) -> bool:
    """Whether a worker may ask another for an average.

    >>> [rank for rank in range(4) if comes_before(2, rank)]
    [1, 3]
    """
    return (one % 2, one) < (other % 2, other)


class Partners:
    """`state` is what this worker shows: the weights, `weights`, and behind them what is not averaged, such as buffers.

    Whoever changes it does so inside `held`.
    """

    def __init__(self, channel: Transport, state: Tensor, numel: int, stats: Stats) -> None:
        self.state, self.weights = state, state[:numel]
        self.changes = 0
        """How often others have changed the weights."""
        self.asked = 0
        self.lost: dict[int, str] = {}
        """Peers that are gone, and why that is thought."""
        self._channel = channel
        self._stats = stats
        self._runtime = channel.runtime
        self.held = self._runtime.lock()
        self._reading = self._runtime.lock()
        self._counting = self._runtime.lock()
        self._done: set[int] = set()
        self._finals: dict[int, Tensor] = {}
        self._news = self._runtime.event()
        self._tasks: list[Task] = [
            self._runtime.spawn(self._attend, peer, name=f"partner-{peer}") for peer in self.others()
        ]

    def others(self) -> list[int]:
        """Everybody else that is not known to be gone."""
        return [peer for peer in range(self._channel.size) if peer != self._channel.rank and peer not in self.lost]

    # Asking.

    def average(self, peer: int) -> float | None:
        """Average the weights with a peer's; how far apart they were. None: it is gone, and is not asked again."""
        with self.held:
            try:
                answer = self._ask(peer, AVERAGE, self.weights).wait()
                moved = answer.row(self.weights.dtype, self.weights.numel())
            except PeerLostError as error:
                self._forget(peer, str(error))
                return None
            self.weights.sub_(moved)
            self.changes += 1
            return 2.0 * float(torch.linalg.vector_norm(moved))

    def read_all(self) -> dict[int, Tensor]:
        """What everybody that is there shows now, by rank; rows of one moment only where nobody trains."""
        with self._reading:
            asked: dict[int, _Asked] = {}
            for peer in self.others():
                try:
                    asked[peer] = self._ask(peer, READ, None)
                except PeerLostError as error:
                    self._forget(peer, str(error))
            with self.held:
                found = {self._channel.rank: self.state.clone()}
            for peer, waiting in asked.items():
                try:
                    found[peer] = waiting.wait().row(self.state.dtype, self.state.numel())
                except PeerLostError as error:
                    self._forget(peer, str(error))
        return dict(sorted(found.items()))

    def part(self, progress: Callable[[], object]) -> dict[int, Tensor]:
        """The end: what everybody had when all had stopped, the same rows on all. Nobody is asked afterwards.

        `progress` tells how far the others are: as long as that changes they are waited for.
        """
        self._tell(DONE, None)
        self._await("to end", self._done, progress)
        with self.held:
            last = self.state.clone()
        self._tell(FINAL, last)
        self._await("for the last weights of", self._finals, progress)
        return dict(sorted({**self._finals, self._channel.rank: last}.items()))

    def close(self) -> None:
        """Ask and answer no more."""
        if not all(task.done() for task in self._tasks):  # not all have parted: this worker leaves before its time
            self._channel.abort()
        self._channel.close()

    def _ask(self, peer: int, kind: int, row: Tensor | None) -> _Asked:
        with self._counting:  # a task that reads and one that averages ask at once
            self.asked += 1
            number = self.asked
        answer = room_for(self.weights if kind == AVERAGE else self.state)
        receiving = self._channel.recv(answer, peer, ANSWERS[kind])
        letter = Letter.write(kind, number, row)
        sending = self._channel.send(letter, peer, ASKING)
        if row is not None:
            self._stats.sent(row.nbytes, row.nbytes)
        return _Asked(peer, number, receiving, sending, answer, letter)

    def _tell(self, kind: int, row: Tensor | None) -> None:
        letter = Letter.write(kind, 0, row)
        for peer in [peer for peer in self.lost if self._channel.members[peer] not in self._channel.lost()]:
            with suppress(SynclineError):  # one that was given up and lives after all: it must not wait for us
                self._channel.send(letter, peer, ASKING)
        for peer in self.others():
            try:
                self._channel.send(letter, peer, ASKING).wait()
                if row is not None:
                    with self.held:
                        self._stats.sent(row.nbytes, row.nbytes)
            except PeerLostError as error:
                self._forget(peer, str(error))

    def _await(self, what: str, there: set[int] | dict[int, Tensor], progress: Callable[[], object]) -> None:
        patience, known = self._channel.timeout, progress()
        while True:
            self._news.clear()
            missing = [peer for peer in self.others() if peer not in there]
            if not missing:
                return
            whom = ", ".join(str(self._channel.members[peer]) for peer in missing)
            if self._news.wait(patience, f"ranks {whom} {what}", hang=True):
                continue
            before, known = known, progress()
            if known == before:
                raise PeerLostError(
                    f"rank {self._channel.members[self._channel.rank]} has waited {patience:g} s for ranks {whom} "
                    f"{what}, in which nobody took a step",
                    peer=self._channel.members[missing[0]],
                    pending=f"ranks {whom} {what}",
                    seconds=patience,
                )

    def _forget(self, peer: int, why: str) -> None:
        if peer not in self.lost:
            self.lost[peer] = why
            logger.warning("rank %d goes on without rank %d: %s", self._channel.rank, self._channel.members[peer], why)
        self._news.set()

    # Being asked.

    def _attend(self, peer: int) -> None:
        buffer = room_for(self.state)
        try:
            while peer not in self._finals:
                handle = self._channel.recv(buffer, peer, ASKING)
                handle.wait(math.inf)
                try:
                    self._hear(Letter.read(buffer[: handle.nbytes], peer))
                except ProtocolError as error:
                    logger.warning("rank %d refuses a letter: %s", self._channel.rank, error)
        except SynclineError as error:  # it is gone, or this worker has closed the channel
            if isinstance(error, PeerLostError):
                self._forget(peer, str(error))

    def _hear(self, letter: Letter) -> None:
        peer, dtype = letter.peer, self.state.dtype
        if letter.kind == AVERAGE:
            theirs = letter.row(dtype, self.weights.numel())
            if peer in self.lost:  # it was given up, and what it brings may be long over
                self._answer(letter, REFUSED, None)
                return
            with self.held:
                moved = theirs.sub_(self.weights).mul_(0.5)
                self.weights.add_(moved)
                self.changes += 1
                self._channel.timing.reduced(moved.nbytes)
                self._stats.sent(moved.nbytes, moved.nbytes)
            self._answer(letter, OK, moved)
        elif letter.kind == READ:
            with self.held:
                shown = self.state.clone()
                self._stats.sent(shown.nbytes, shown.nbytes)
            self._answer(letter, OK, shown)
        elif letter.kind == FINAL:
            self._finals[peer] = letter.row(dtype, self.state.numel()).clone()
            self._news.set()
        elif letter.kind == DONE:
            self._done.add(peer)
            self._news.set()

    def _answer(self, letter: Letter, kind: int, row: Tensor | None) -> None:
        whole = Letter.write(kind, letter.number, row)
        self._channel.send(whole, letter.peer, ANSWERS[letter.kind]).wait()


class _Asked:
    """A question under way."""

    def __init__(
        self, peer: int, number: int, receiving: Handle, sending: Handle, answer: Tensor, letter: Tensor
    ) -> None:
        self._peer, self._number = peer, number
        self._receiving, self._sending = receiving, sending
        self._answer, self._letter = answer, letter

    def wait(self) -> Letter:
        self._receiving.wait()
        self._sending.wait()
        found = Letter.read(self._answer[: self._receiving.nbytes], self._peer)
        if found.kind != OK or found.number != self._number:
            raise PeerLostError(
                f"rank {self._peer} does not answer any more (kind {found.kind}, number {found.number} where "
                f"{self._number} was asked)",
                peer=self._peer,
                pending="an average of two",
            )
        return found


def mean_of(rows: Sequence[Tensor]) -> Tensor:
    """Their mean, in an order that is the same everywhere.

    >>> mean_of([torch.ones(2), torch.zeros(2)])
    tensor([0.5000, 0.5000])
    """
    total = torch.zeros(rows[0].numel(), dtype=torch.float64)
    for row in rows:
        total.add_(row)
    return total.div_(len(rows)).to(rows[0].dtype)
