"""Which worker reads which batch of an epoch, if workers do not wait for each other, and are lost or join.

A worker claims the next batches of the epoch's order, and reports those that it has trained. If a lost worker has not
reported a batch, another worker claims it. The state of an epoch is one text in the job's store, which changes by
compare-and-set::

    next_unclaimed 7   claimed {0: [4], 2: [5, 6]}   free [3]        worker 1 had claimed 3, and is lost
         └ from here on     └ not reported yet            └ claimed first

So each batch is trained at least once, and once more for each loss of a worker that had claimed it. An epoch ends for
all workers when all its batches are reported. If the job ends before, a worker stops the epoch (`EpochClaims.stop`):
then no worker claims a batch any more, and none passes its end.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from syncline.errors import IncompatibleError, PeerLostError
from syncline.runtime import Runtime

__all__ = ["ClaimStore", "EpochClaims", "EpochState", "Epochs"]

MAX_BATCHES_PER_CLAIM = 64
"""The most batches that a worker claims at once."""
POLL_S = (1e-3, 0.05)
"""Seconds between two reads of the store while a worker waits for the others: at first, and at most."""


class ClaimStore(Protocol):
    """A part of the job's store, such as a control channel."""

    def value(self, key: str) -> str | None: ...

    def set_value(self, key: str, value: str) -> None: ...

    def compare_value(self, key: str, expected: str, desired: str) -> str: ...


@dataclass
class EpochState:
    """The claims of an epoch.

    >>> state = EpochState(batches=4)
    >>> state.claim(0, 2), state.claim(1, 1)
    ([0, 1], [2])
    >>> state.finish(1, [2])
    >>> state.free_batches_of({0: "killed"})
    >>> state.claim(1, 4), state.complete
    ([0, 1, 3], False)
    """

    batches: int
    next_unclaimed: int = 0
    """The first batch that no worker has claimed so far."""
    claimed: dict[int, list[int]] = field(default_factory=dict)
    """By worker: the batches that it has claimed and not reported."""
    free: list[int] = field(default_factory=list)
    """Batches of workers that are lost or have left the epoch: they are claimed first."""
    barriers: int = 0
    """How often the worker that began the epoch had waited for all others before."""
    stopped: bool = False
    """Whether the job ends in this epoch."""

    def claim(self, member: int, count: int) -> list[int]:
        """Claim up to `count` batches."""
        chosen, self.free = self.free[:count], self.free[count:]
        end = min(self.batches, self.next_unclaimed + count - len(chosen))
        chosen += range(self.next_unclaimed, end)
        self.next_unclaimed = end
        if chosen:
            self.claimed[member] = self.claimed.get(member, []) + chosen
        return chosen

    def finish(self, member: int, batches: list[int]) -> None:
        """Report trained batches. Batches that other workers have claimed meanwhile stay claimed by them."""
        unreported = [batch for batch in self.claimed.pop(member, []) if batch not in batches]
        if unreported:
            self.claimed[member] = unreported

    def free_batches_of(self, lost: Mapping[int, str]) -> None:
        """Free the batches of lost workers."""
        for member in [each for each in self.claimed if each in lost]:
            self.free = sorted({*self.free, *self.claimed.pop(member)})

    @property
    def complete(self) -> bool:
        """Whether all batches were reported, before the job was to end."""
        return not self.stopped and self.next_unclaimed >= self.batches and not self.claimed and not self.free

    def stop(self) -> None:
        """The job ends in this epoch, unless all batches were reported."""
        self.stopped = self.stopped or not self.complete

    @property
    def first_open(self) -> int:
        """The first batch that was not reported."""
        return min(
            [self.next_unclaimed, *self.free, *(batch for batches in self.claimed.values() for batch in batches)]
        )

    def to_json(self) -> str:
        return json.dumps([self.batches, self.next_unclaimed, self.claimed, self.free, self.barriers, self.stopped])

    @staticmethod
    def from_json(text: str) -> EpochState:
        batches, following, claimed, free, *rest = json.loads(text)
        return EpochState(batches, following, {int(member): each for member, each in claimed.items()}, free, *rest)


class Epochs:
    """The claims of one worker in the epochs of one reader. `name` is the reader's."""

    def __init__(
        self,
        store: ClaimStore,
        runtime: Runtime,
        name: str,
        member: int,
        lost: Callable[[], Mapping[int, str]],
        timeout_s: float,
        *,
        before_epoch: Callable[[], None] = lambda: None,
        steps: Callable[[], int] = lambda: 0,
        flush: Callable[[], None] = lambda: None,
        idle: Callable[[], AbstractContextManager[None]] = nullcontext,
        barriers: Callable[[], int] = lambda: 0,
        stopped: Callable[[], bool] = lambda: False,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """`steps` counts this worker's steps, and `barriers` how often it has waited for all others.

        `before_epoch` publishes what newcomers need. At the end of an epoch `flush` makes sure that no step
        is lost with this worker, and `idle` is entered while it waits for others. `stopped` says whether it must end
        its wait. `waiting` is called repeatedly during the wait, and may raise.
        """
        self.before_epoch, self.steps, self.flush = before_epoch, steps, flush
        self.store, self.runtime, self.name, self.member = store, runtime, name, member
        self.lost, self.timeout_s = lost, timeout_s
        self.idle, self.barriers, self.stopped, self.waiting = idle, barriers, stopped, waiting
        self.current: EpochClaims | None = None

    def key(self, epoch: int, visit: int) -> str:
        return f"data/{self.name}/{visit}/{epoch}"

    def find(self, epoch: int, visit: int) -> EpochState | None:
        """The state of an epoch; None if no worker has begun it."""
        text = self.store.value(self.key(epoch, visit))
        return None if text is None else EpochState.from_json(text)

    def begin(self, epoch: int, visit: int, batches: int, first: int) -> EpochClaims:
        """Begin an epoch at batch `first`, or join the workers that have begun it."""
        self.refresh()  # an epoch that was left early
        self.before_epoch()
        key = self.key(epoch, visit)
        own = EpochState(batches, min(first, batches), barriers=self.barriers()).to_json()
        text = self.store.compare_value(key, "", own)
        found = EpochState.from_json(text)
        if found.batches != batches:
            raise IncompatibleError(
                f"epoch {epoch} of {self.name!r} has {batches} batches here, and {found.batches} at the other workers: "
                "all workers read the same data with the same batch size"
            )
        if text == own:
            self.store.set_value("data/place", json.dumps([self.name, epoch]))
        self.current = EpochClaims(self, key, text)
        return self.current

    def refresh(self) -> None:
        """Report and claim in the background."""
        if self.current is not None:
            self.current.refresh()


class EpochClaims:
    """One worker's claims in one epoch. Several tasks may use it."""

    def __init__(self, epochs: Epochs, key: str, text: str) -> None:
        self._epochs = epochs
        self._key = key
        self._state_json = text
        self._lock = epochs.runtime.lock()
        self._unread: deque[int] = deque()
        """Claimed, and not requested from the data."""
        self._unreported: list[int] = []
        """Trained, and not reported."""
        self._loading: list[int] = []
        """Requested from the data, and not returned to the caller."""
        self._untrained: list[tuple[int, int]] = []
        """Returned to the caller and not trained: the batch, and the step that trains it."""
        self._claim_size = 1
        """The number of batches to claim at once. It grows while this worker has to wait for the store."""
        self._ran_out = self._has_left = self._closed = False
        self.is_stopped = EpochState.from_json(text).stopped
        """Whether the job ends in this epoch, as far as this worker knows."""

    @property
    def first_open(self) -> int:
        """The first batch of the epoch that was not reported, as far as this worker knows."""
        return EpochState.from_json(self._state_json).first_open

    def take(self) -> Iterator[int]:
        """The batches that this worker reads, until there is none to claim at the moment."""
        while True:
            with self._lock:
                if not self._unread:
                    self._claim_size = (
                        min(2 * self._claim_size, MAX_BATCHES_PER_CLAIM) if self._ran_out else self._claim_size
                    )
                    self._ran_out = True
                    self._update(self._claim_size)
                if not self._unread:
                    return
                batch = self._unread.popleft()
                self._loading.append(batch)
            yield batch

    def returned(self, batch: int) -> None:
        """A batch is about to be trained in the next step."""
        with self._lock:
            self._loading.remove(batch)
            self._untrained.append((batch, self._epochs.steps() + 1))

    def trained(self, steps: float) -> None:
        """The first `steps` steps of this worker are no longer lost if this worker is."""
        with self._lock:
            self._unreported += [batch for batch, step in self._untrained if step <= steps]
            self._untrained = [(batch, step) for batch, step in self._untrained if step > steps]

    def refresh(self) -> None:
        """In a background task: report what was trained, and claim before this worker runs out."""
        with self._lock:
            if self._closed:
                return
            if self._has_left:
                self._closed = True
                self._update(0, [*self._unread, *self._loading, *(batch for batch, _ in self._untrained)])
                self._unread.clear()
            elif self._unreported or 2 * len(self._unread) <= self._claim_size:
                self._update(self._claim_size - len(self._unread))

    def wait_for_more(self) -> bool:
        """This worker can claim no batch at the moment: wait until the others have reported theirs, or are lost.

        Returns True if there are batches to claim now, and False if the epoch has ended.
        """
        epochs = self._epochs
        epochs.flush()
        self.trained(math.inf)
        if (found := self._try_claim()) is not None:
            return found
        with epochs.idle():
            since, before, (pause, longest) = epochs.runtime.now(), self._state_json, POLL_S
            while (found := self._try_claim()) is None:
                epochs.waiting()
                epochs.runtime.sleep(pause)
                pause = min(2 * pause, longest)
                if self._state_json != before:
                    since, before = epochs.runtime.now(), self._state_json
                waited = epochs.runtime.now() - since
                if waited > epochs.timeout_s:
                    claimed = EpochState.from_json(self._state_json).claimed
                    raise PeerLostError(
                        f"worker {epochs.member} has waited {waited:.0f} s for batches of workers {sorted(claimed)} "
                        f"at the end of an epoch ({epochs.name}): are they still running?",
                        peer=min(claimed, default=None),
                        pending="the end of the epoch",
                        seconds=waited,
                    )
        return found

    def _try_claim(self) -> bool | None:
        """True if this worker has claimed a batch, False if the epoch has ended, None if it has to wait."""
        with self._lock:
            self._update(1)
            if self._unread:
                return True
            if EpochState.from_json(self._state_json).complete or self._epochs.stopped():
                self._closed = True
                return False
        return None

    @property
    def is_open(self) -> bool:
        """Whether this worker still reads the epoch."""
        return not (self._closed or self._has_left)

    def report(self) -> None:
        """Report what was trained, and read what the others have reported."""
        with self._lock:
            if self.is_open:
                self._update(0)

    def stop(self) -> bool:
        """The job ends. Returns False if this epoch has ended before: then it ends in a later one."""
        with self._lock:
            if self.is_open:
                self._update(0, stop=True)
            return self.is_stopped

    def leave(self) -> None:
        """The loop was left. The next `refresh` frees the batches that this worker has not trained."""
        self._has_left = True

    def _update(self, count: int, unread: list[int] | None = None, stop: bool = False) -> None:
        """Report trained batches, free those of lost workers, and claim up to `count`; `stop` ends the job."""
        epochs = self._epochs
        while True:
            lost = epochs.lost()
            if epochs.member in lost:
                raise PeerLostError(
                    f"worker {epochs.member} was declared lost ({lost[epochs.member]}): the others train its batches",
                    peer=epochs.member,
                    pending="the next batches",
                )
            state = EpochState.from_json(self._state_json)
            state.free_batches_of(lost)
            state.finish(epochs.member, [*self._unreported, *(unread or ())])
            state.free = sorted({*state.free, *(unread or ())})
            if stop:
                state.stop()
            remaining = state.batches - state.next_unclaimed + len(state.free)
            # Fewer at the end, so that the workers end at the same time.
            fair = max(1, remaining // (2 * max(1, len({*state.claimed, epochs.member}))))
            claimed = state.claim(epochs.member, min(count, fair)) if count > 0 and not state.stopped else []
            text = state.to_json()
            found = text if text == self._state_json else epochs.store.compare_value(self._key, self._state_json, text)
            if text == self._state_json:  # nothing to change: read what others have changed
                found = epochs.store.value(self._key) or text
            self._state_json = found
            if found == text:
                self.is_stopped = state.stopped
                self._unreported = []
                self._unread.extend(claimed)
                return
