"""The number of ranks changes in the middle of an epoch: simulations of all ranks in one process."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from syncline.data import Cursor, MicroBatches, Sharded
from tests.data.cases import Numbers, flat, joined

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on one core

MOST_RANKS = 5

Make = Callable[[int, int, Cursor], Sharded | MicroBatches]
"""Makes the reader of a rank."""


class Worker:
    """One rank, and its loop over an epoch."""

    def __init__(self, make: Make, rank: int, size: int, state: dict[str, Any]) -> None:
        cursor = Cursor()
        cursor.load_state_dict(state)
        self.reader = make(rank, size, cursor)
        self.continues = False
        self.begin()

    def begin(self) -> None:
        self.place = self.reader.begin()
        self.items: Iterator[Any] = iter(self.reader.read(self.place))

    def read(self) -> list[int] | None:
        """The samples of the next batch; None if this rank has run out of data."""
        if self.continues:
            self.items, self.continues = iter(self.reader.read(self.place)), False
        item = next(self.items, None)
        if item is None:
            return None
        batches = [item.batch] if isinstance(self.reader, Sharded) else [micro.batch for micro in item]
        return joined([flat(batch) for batch in batches])

    def regroup(self, rank: int, size: int, lost: tuple[int, ...]) -> None:
        self.continues |= self.reader.regroup(rank, size, lost)


class Team:
    """All ranks, in step."""

    def __init__(self, make: Make, size: int) -> None:
        self.make = make
        self.trained: list[int] = []
        """The samples of this epoch whose steps were completed."""
        self.start(size, Cursor().state_dict())

    def start(self, size: int, state: dict[str, Any]) -> None:
        """All ranks start from a checkpoint."""
        self.workers = [Worker(self.make, rank, size, state) for rank in range(size)]

    @property
    def state(self) -> dict[str, Any]:
        """The position in a checkpoint. Rank 0 has data as long as any rank has."""
        state: dict[str, Any] = json.loads(json.dumps(self.workers[0].reader.cursor.state_dict()))
        return state

    def step(self, changes: list[tuple[set[int], int]]) -> bool:
        """One step, during which the team changes: (lost places in the team, newcomers). False at the epoch's end."""
        dealt = list(self.workers)
        batches = [worker.read() for worker in dealt]
        if not any(batches):
            return False
        newcomers = 0
        for places, more in changes:
            gone = [worker for place, worker in enumerate(self.workers) if place in places]
            self.workers = [worker for worker in self.workers if worker not in gone]
            newcomers += more
            lost = tuple(rank for rank, worker in enumerate(dealt) if worker in gone)
            for rank, worker in enumerate(self.workers):
                worker.regroup(rank, len(self.workers) + newcomers, lost)
        if changes:
            self._let_in(newcomers)
        for worker, batch in zip(dealt, batches, strict=True):
            if worker in self.workers:
                self.trained += batch or []
        return True

    def _let_in(self, newcomers: int) -> None:
        state = self.workers[0].reader.next_state
        assert all(worker.reader.next_state == state for worker in self.workers)
        size = len(self.workers) + newcomers
        for rank in range(len(self.workers), size):
            newcomer = Worker(self.make, 0, 1, state)
            newcomer.reader.leave(newcomer.place)
            newcomer.reader.cursor.load_state_dict(state)
            newcomer.reader.regroup(rank, size, ())
            newcomer.begin()
            self.workers.append(newcomer)
        assert len({worker.reader.uneven for worker in self.workers}) == 1
        counts = [worker.reader.counts(worker.place) for worker in self.workers]
        assert len({each and (each.most, each.fewest) for each in counts}) == 1

    def end_epoch(self) -> list[int]:
        """Start the next epoch. Returns what was trained in this one."""
        for worker in self.workers:
            worker.reader.leave(worker.place)
            worker.begin()
        trained, self.trained = self.trained, []
        return trained


def draw_changes(rng: random.Random, size: int) -> list[tuple[set[int], int]]:
    """What happens in a step: usually nothing; else up to three changes of the team, one after another."""
    changes = []
    while len(changes) < 3 and rng.random() < 0.35:
        lost = set(rng.sample(range(size), rng.randint(0, size - 1)))
        newcomers = rng.randint(0, 2)
        size -= len(lost)
        if size + newcomers + sum(more for _, more in changes) > MOST_RANKS:
            newcomers = 0
        changes.append((lost, newcomers))
    return changes


def check_epochs(make: Make, seed: int, left_out: int = 0) -> None:
    """Three epochs with changes at random, and some restarts from checkpoints. Each sample is trained once.

    At the end of an epoch, fewer than `left_out` samples for each rank of the last team may be left out.
    """
    rng = random.Random(seed)
    team = Team(make, rng.randint(1, MOST_RANKS))
    for epoch in range(3):
        while team.step(draw_changes(rng, len(team.workers))):
            if rng.random() < 0.15:
                state = team.state
                for worker in team.workers:
                    worker.reader.leave(worker.place)
                team.start(rng.randint(1, MOST_RANKS), state)
        size = len(team.workers)
        trained = Counter(team.end_epoch())
        alone = make(0, 1, Cursor(epoch))
        expected = Counter(
            joined([flat(each.batch) for item in alone for each in ([item] if isinstance(alone, Sharded) else item)])
        )
        assert not trained - expected
        assert (expected - trained).total() < max(1, left_out * size)
        assert all(worker.reader.cursor.next_epoch == epoch + 1 for worker in team.workers)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(0, 30), st.booleans(), st.booleans(), st.integers())
def test_every_sample_is_trained_once(batch: int, more: int, shuffle: bool, drop_last: bool, seed: int) -> None:
    data: DataLoader[Any] = DataLoader(Numbers(MOST_RANKS * batch + more), batch, shuffle=shuffle, drop_last=drop_last)

    def make(rank: int, size: int, cursor: Cursor) -> Sharded:
        return Sharded(data, rank=rank, size=size, seed=3, cursor=cursor)

    check_epochs(make, seed, left_out=batch * drop_last)
