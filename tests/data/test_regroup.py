"""The number of ranks changes in the middle of an epoch: simulations of all ranks in one process."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from syncline.data import Cursor, MicroBatches, MicroStep, Piece, Sharded
from syncline.errors import IncompatibleError, SpecError
from tests.data.cases import Buckets, Mixed, Noisy, Numbers, Sized, flat, joined

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on one core

MOST_RANKS = 5

Make = Callable[[int, int, Cursor], Sharded | MicroBatches]
"""Makes the reader of a rank."""


def samples_of(item: Piece | MicroStep) -> list[int]:
    return joined([flat(each.batch) for each in ([item] if isinstance(item, Piece) else item)])


class Worker:
    """One rank, and its loop over an epoch."""

    def __init__(self, make: Make, rank: int, size: int, state: dict[str, Any]) -> None:
        cursor = Cursor()
        cursor.load_state_dict(state)
        self.reader = make(rank, size, cursor)
        self.continues = False
        self.last = False
        self.begin()

    def begin(self) -> None:
        self.place = self.reader.begin()
        self.items: Iterator[Any] = iter(self.reader.read(self.place))

    def read(self) -> list[int] | None:
        """The samples of the next batch; None if this rank has run out of data."""
        if self.continues:
            self.items, self.continues = iter(self.reader.read(self.place)), False
        item = next(self.items, None)
        self.last = item is None or item.last
        return None if item is None else samples_of(item)

    def regroup(self, rank: int, size: int, lost: tuple[int, ...], steps: int) -> None:
        self.continues |= self.reader.regroup(rank, size, lost, steps)


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

    def step(self, changes: list[tuple[set[int], int]], batches: int = 1) -> bool:
        """Some batches, and a reduction during which the team changes: (lost places in the team, newcomers).

        Returns False at the end of the epoch.
        """
        dealt = list(self.workers)
        samples: list[list[int]] = [[] for _ in dealt]
        steps = 0
        while steps < batches and not (steps and dealt[0].last):
            for worker, mine in zip(dealt, samples, strict=True):
                mine += worker.read() or []
            steps += 1
        if not any(samples):
            return False
        newcomers = 0
        for places, more in changes:
            gone = [worker for place, worker in enumerate(self.workers) if place in places]
            self.workers = [worker for worker in self.workers if worker not in gone]
            newcomers += more
            lost = tuple(rank for rank, worker in enumerate(dealt) if worker in gone)
            for rank, worker in enumerate(self.workers):
                worker.regroup(rank, len(self.workers) + newcomers, lost, steps)
        if changes:
            self._let_in(newcomers)
        for worker, mine in zip(dealt, samples, strict=True):
            if worker in self.workers:
                self.trained += mine
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
    changes: list[tuple[set[int], int]] = []
    while len(changes) < 3 and rng.random() < 0.35:
        lost = set(rng.sample(range(size), rng.randint(0, size - 1)))
        newcomers = rng.randint(0, 2)
        size -= len(lost)
        if size + newcomers + sum(more for _, more in changes) > MOST_RANKS:
            newcomers = 0
        changes.append((lost, newcomers))
    return changes


def check_epochs(make: Make, seed: int, left_out: int = 0, most_batches: int = 3) -> None:
    """Three epochs with changes at random, and some restarts from checkpoints. Each sample is trained once.

    At the end of an epoch, fewer than `left_out` samples for each rank of the last team may be left out. Gradients are
    accumulated over at most `most_batches`.
    """
    rng = random.Random(seed)
    team = Team(make, rng.randint(1, MOST_RANKS))
    for epoch in range(3):
        while team.step(draw_changes(rng, len(team.workers)), rng.randint(1, most_batches)):
            if rng.random() < 0.15:
                state = team.state
                for worker in team.workers:
                    worker.reader.leave(worker.place)
                team.start(rng.randint(1, MOST_RANKS), state)
        size = len(team.workers)
        trained = Counter(team.end_epoch())
        expected = Counter(joined([samples_of(item) for item in make(0, 1, Cursor(epoch))]))
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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8), st.integers(1, 3), st.integers(0, 30), st.booleans(), st.integers())
def test_micro_batches_keep_the_global_batch(extra: int, micro: int, more: int, shuffle: bool, seed: int) -> None:
    data: DataLoader[Any] = DataLoader(Numbers(MOST_RANKS + more), shuffle=shuffle)

    def make(rank: int, size: int, cursor: Cursor) -> MicroBatches:
        batch = MOST_RANKS + extra
        return MicroBatches(data, global_batch=batch, micro_batch=micro, rank=rank, size=size, cursor=cursor)

    check_epochs(make, seed, most_batches=1)


@settings(max_examples=60, deadline=None)
@given(st.integers(MOST_RANKS, 15), st.booleans(), st.integers())
def test_samplers_are_drawn_again(length: int, whole_batches: bool, seed: int) -> None:
    """A batch sampler, or a sampler that does not say how many samples it has."""
    data: DataLoader[Any] = (
        DataLoader(Numbers(200), batch_sampler=Buckets(length))
        if whole_batches
        else DataLoader(Numbers(length), batch_size=2, sampler=Mixed(length))
    )

    def make(rank: int, size: int, cursor: Cursor) -> Sharded:
        return Sharded(data, rank=rank, size=size, cursor=cursor)

    check_epochs(make, seed)


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_read_anew_what_they_prefetched(persistent: bool) -> None:
    def make(rank: int, size: int, cursor: Cursor) -> Sharded:
        data: DataLoader[Any] = DataLoader(
            Numbers(30), batch_size=2, shuffle=True, num_workers=1, prefetch_factor=3, persistent_workers=persistent
        )
        return Sharded(data, rank=rank, size=size, cursor=cursor)

    team = Team(make, 3)
    changes: list[list[tuple[set[int], int]]] = [[], [({1}, 0)], [], [(set(), 1)]]
    assert all(team.step(change) for change in changes)
    while team.step([]):
        pass
    assert sorted(team.end_epoch()) == list(range(30))


def sharded(length: int, batch: int, rank: int, size: int, **options: Any) -> Sharded:
    return Sharded(DataLoader(Numbers(length), batch_size=batch), rank=rank, size=size, **options)


def batches_of(reader: Sharded, changes: dict[int, tuple[int, int, tuple[int, ...]]]) -> list[Any]:
    """The batches of an epoch; after the n-th, in the body of the loop, the reader regroups."""
    found = []
    for number, piece in enumerate(reader):
        found.append(piece.batch if isinstance(piece.batch, int) else flat(piece.batch))
        if number in changes:
            reader.regroup(*changes[number])
    return found


def test_lost_shares_come_first_and_then_the_rest() -> None:
    reader = sharded(14, 2, rank=2, size=3)
    assert batches_of(reader, {0: (1, 2, (1,))}) == [[2, 5], [4, 7], [9, 11], [13]]
    assert batches_of(sharded(14, 2, rank=0, size=3), {0: (0, 2, (1,))}) == [[0, 3], [1, 6], [8, 10], [12]]
    assert reader.cursor.state_dict() == {"epoch": 1, "samples": 0, "streams": []}
    assert batches_of(reader, {}) == [[1, 3], [5, 7], [9, 11], [13]], "the next epoch has the usual order"


def test_a_loss_in_the_last_batch_makes_another_one() -> None:
    reader = sharded(8, 2, rank=0, size=2)
    seen = []
    for piece in reader:
        seen.append((flat(piece.batch), piece.last, reader.cursor.over))
        if piece.last and reader.teams == 0:
            assert not reader.regroup(0, 1, (1,)), "this rank has not run out of data"
            assert (reader.cursor.over, reader.cursor.next_epoch) == (False, 0)
    assert seen == [([0, 2], False, False), ([4, 6], True, True), ([5, 7], True, True)]


def test_a_rank_that_ran_out_of_data_continues() -> None:
    reader = sharded(5, 2, rank=1, size=2)
    place = reader.begin()
    assert [flat(piece.batch) for piece in reader.read(place)] == [[1, 3]]
    assert reader.cursor.epoch == 1
    assert reader.regroup(0, 1, (0,))
    assert (reader.cursor.epoch, reader.cursor.samples) == (0, 4)
    assert [flat(piece.batch) for piece in reader.read(place)] == [[4]]
    reader.leave(place)
    assert reader.cursor.state_dict() == {"epoch": 1, "samples": 0, "streams": []}


def test_a_second_loss_in_a_step_adds_to_the_first() -> None:
    """Ranks are counted in the team that shared the batch."""
    reader = sharded(12, 1, rank=0, size=4)
    batches = iter(reader)
    next(batches)
    reader.regroup(0, 3, (1,))
    reader.regroup(0, 2, (3,))
    assert reader.cursor.state_dict()["lost_shares"] == [[0, 4, 4, 1, 3]]
    assert [flat(piece.batch) for piece in batches] == [[1], [4], [6], [8], [10]]


def test_accumulated_batches_are_dealt_again() -> None:
    steps = MicroBatches(Numbers(24), global_batch=6, rank=0, size=3, shuffle=False)
    found = []
    for number, step in enumerate(steps):
        found.append(samples_of(step))
        if number == 1:
            steps.regroup(0, 2, (1,), steps=2)
        if number == 2:
            steps.regroup(0, 4, (), steps=2)
            steps.regroup(0, 3, (1,), steps=2)
    assert found[:3] == [[0, 3], [6, 9], [1, 7, 12]], "rank 1 of 3 had 1 4 and 7 10"
    assert found[3:] == [[4, 14], [17, 20], [23]], "only one batch was dealt to two ranks, and rank 1 had 4 10 13"


def test_between_epochs_and_before_the_first_batch_nothing_is_dealt_again() -> None:
    reader = sharded(8, 2, rank=0, size=2)
    reader.regroup(0, 1, (1,))
    assert batches_of(reader, {}) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    reader.regroup(1, 2, ())
    assert reader.cursor.state_dict() == {"epoch": 1, "samples": 0, "streams": []}
    place = reader.begin()
    reader.regroup(0, 2, (0,))
    assert [flat(piece.batch) for piece in reader.read(place)] == [[0, 2], [4, 6]]


def test_the_number_of_steps_and_uneven_follow_the_team() -> None:
    reader = sharded(22, 2, rank=0, size=4)
    assert (reader.steps, reader.uneven) == (3, False)
    for number, _ in enumerate(reader):
        if number == 0:
            reader.regroup(0, 3, ())
            assert (reader.steps, reader.uneven) == (4, True), "14 samples are left for global batches of 6"
        elif number == 1:
            reader.regroup(0, 1, (1, 2))
            assert (reader.steps, reader.uneven) == (11, False)


def test_an_epoch_left_early_is_over_for_a_newcomer() -> None:
    reader = sharded(8, 2, rank=0, size=2)
    for _ in reader:
        assert reader.next_state == reader.cursor.state_dict()
        break
    assert reader.cursor.state_dict()["samples"] == 4
    assert reader.next_state == {"epoch": 1, "samples": 0, "streams": []}


@pytest.mark.parametrize("processes", [0, 1])
def test_a_stream_goes_on_with_the_new_team(processes: int, caplog: pytest.LogCaptureFixture) -> None:
    data: DataLoader[Any] = DataLoader(Sized(14), batch_size=2, num_workers=processes)
    reader = Sharded(data, rank=2, size=3)
    with caplog.at_level(logging.WARNING, "syncline"):
        assert batches_of(reader, {0: (1, 2, (0,)), 1: (0, 1, (0,)), 2: (0, 1, (0,))}) == [
            [2, 5],
            [7, 9],
            [10, 11],
            [12, 13],
        ]
    (record,) = caplog.records
    assert "1 of 2 workers were lost, and this data cannot go back" in record.message, "rank 0 says it, once"


def test_ready_batches_go_on_with_the_new_team(caplog: pytest.LogCaptureFixture) -> None:
    for data in (list(range(9)), iter(range(9))):
        reader = Sharded(data, rank=1, size=3)
        assert batches_of(reader, {0: (1, 2, ()), 1: (0, 1, ())}) == [1, 4, 5, 6, 7, 8]
    assert not caplog.records, "nothing was lost"


def test_data_of_ones_own_stays_as_it_is() -> None:
    reader = sharded(6, 2, rank=1, size=2, split=False)
    assert batches_of(reader, {0: (0, 1, (0,))}) == [[0, 1], [2, 3], [4, 5]]


def test_an_evaluation_keeps_its_share_to_its_end() -> None:
    reader = sharded(8, 2, rank=1, size=2, pad=False)
    assert batches_of(reader, {0: (0, 1, (0,))}) == [[1, 3], [5, 7]]
    assert batches_of(reader, {}) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_loader_processes_draw_after_a_change_is_the_same_when_resumed() -> None:
    data: DataLoader[Any] = DataLoader(Noisy(12), batch_size=2, shuffle=True, num_workers=1)
    reader = Sharded(data, rank=0, size=2)
    batches = iter(reader)
    next(batches)
    reader.regroup(0, 1, (1,))
    cursor = Cursor()
    cursor.load_state_dict(reader.cursor.state_dict())
    rest, resumed = (
        [[each.tolist() for each in piece.batch] for piece in each]
        for each in (batches, Sharded(data, rank=0, size=1, cursor=cursor))
    )
    assert rest == resumed


def test_refusals() -> None:
    reader = sharded(8, 2, rank=0, size=2)
    with pytest.raises(SpecError, match="rank=2 is not one of 2"):
        reader.regroup(2, 2)
    batches = iter(reader)
    next(batches)
    with pytest.raises(SpecError, match=r"lost=\(2,\): the current batch was distributed over 2 ranks"):
        reader.regroup(0, 1, (2,))
    with pytest.raises(IncompatibleError, match="8 samples cannot be split over 9 workers"):
        reader.regroup(0, 9)
    with pytest.raises(IncompatibleError, match="a global batch of 4 cannot be split over 5 workers"):
        MicroBatches(Numbers(8), global_batch=4, rank=0, size=2).regroup(0, 5)


@pytest.mark.parametrize("lost", [{}, [1], [[0, 4, 2]], [[0, 4, 2, 2]], [[0, 4, 2, True]]])
def test_invalid_lost_shares_are_refused(lost: Any) -> None:
    with pytest.raises(IncompatibleError, match="cannot be read"):
        Cursor().load_state_dict({"epoch": 0, "samples": 4, "lost_shares": lost})
