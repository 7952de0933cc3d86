"""Claims of batches: whoever is lost, each batch is trained, and none twice without a loss."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

from syncline.control import ControlChannel, MemoryStore
from syncline.data import Sharded
from syncline.data.claims import EpochClaims, Epochs
from syncline.errors import IncompatibleError, PeerLostError
from syncline.runtime import RealRuntime
from tests.data.cases import Numbers


class Job:
    """Workers on one store. The test decides who is lost."""

    def __init__(self, workers: int) -> None:
        self.lost: dict[int, str] = {}
        store, runtime = MemoryStore(), RealRuntime()
        self.epochs = [
            Epochs(
                ControlChannel(store, runtime, "test", workers, member), runtime, "data", member, lambda: self.lost, 0.0
            )
            for member in range(workers)
        ]

    def begin(self, member: int, batches: int, first: int = 0) -> EpochClaims:
        return self.epochs[member].begin(0, 0, batches, first)


def test_batches_of_lost_workers_are_claimed_again() -> None:
    for seed in range(200):
        draw, job = random.Random(seed), Job(4)
        batches = draw.randint(1, 40)
        claims = {member: job.begin(member, batches) for member in range(4)}
        takes = {member: each.take() for member, each in claims.items()}
        trained: Counter[int] = Counter()
        victims = draw.sample(range(4), draw.randint(0, 3))
        while claims:
            member = draw.choice(list(claims))
            if member in victims and draw.random() < 0.1:
                job.lost[member] = "killed"
                del claims[member]
                continue
            batch = next(takes[member], None)
            if batch is not None:
                claims[member].returned(batch)
                trained[batch] += 1
                claims[member].trained(1.0)
                claims[member].refresh()
            else:
                try:
                    more = claims[member].wait_for_more()
                except PeerLostError:  # others hold batches, and are not lost yet
                    more = True
                takes[member] = claims[member].take()
                if not more:
                    assert sorted(trained) == list(range(batches)), seed
                    del claims[member]
        assert max(trained.values()) <= 1 + len(job.lost), seed


def test_a_loop_that_is_left_frees_its_batches() -> None:
    job = Job(2)
    first, second = job.begin(0, 4), job.begin(1, 4)
    batch = next(first.take())
    first.returned(batch)
    first.leave()
    first.refresh()
    assert sorted(second.take()) == [0, 1, 2, 3]


def test_a_resumed_epoch_begins_at_its_position() -> None:
    assert list(Job(1).begin(0, 5, first=3).take()) == [3, 4]


def read(reader: Sharded) -> list[int]:
    return [int(each) for piece in reader for each in piece.batch]


def reader_of(job: Job, member: int) -> Sharded:
    reader = Sharded(DataLoader(Numbers(12), batch_size=2), rank=0, size=1)
    reader.claims = job.epochs[member]
    return reader


def test_a_checkpoint_has_the_position_of_the_first_batch_that_was_not_reported() -> None:
    job = Job(2)
    readers = [reader_of(job, member) for member in range(2)]
    loops = [iter(reader) for reader in readers]
    assert [len(next(loop).batch) for loop in loops] == [2, 2]
    for member, samples in ((1, 0), (0, 4)):  # worker 0 has the first batch, and reports it last
        claims = [job.epochs[each].current for each in (member, 1 - member)]
        for each in claims:
            assert each is not None
            each.trained(1.0 if each is claims[0] else 0.0)
            each.report()
        assert [reader.state_dict()["samples"] for reader in readers] == [samples] * 2
        resumed = reader_of(Job(1), 0)
        resumed.cursor.load_state_dict(readers[0].state_dict())
        assert read(resumed) == list(range(samples, 12))
        assert resumed.state_dict() == {"epoch": 1, "samples": 0, "streams": []}


@pytest.mark.parametrize("position", [{"samples": 3}, {"samples": 6, "lost_shares": [[2, 4, 2, 1]]}])
def test_a_batch_of_which_a_part_is_not_trained_is_claimed(position: dict[str, Any]) -> None:
    """With another batch size, or after losses, the position may be in the middle of a batch."""
    resumed = reader_of(Job(1), 0)
    resumed.cursor.load_state_dict({"epoch": 0, "streams": [], **position})
    assert read(resumed) == list(range(2, 12))


def test_no_worker_passes_an_epoch_in_which_the_job_ends() -> None:
    job = Job(2)
    first, second = job.begin(0, 2), job.begin(1, 2)
    for claims in (first, second):
        claims.returned(next(claims.take()))
        claims.trained(1.0)
    assert first.stop()
    assert list(second.take()) == []
    assert second.is_stopped
    with pytest.raises(PeerLostError):  # it waits, here for no time, although all that was claimed is trained
        second.wait_for_more()


def test_the_job_does_not_end_in_an_epoch_that_is_over() -> None:
    job = Job(2)
    first, second = job.begin(0, 1), job.begin(1, 1)
    second.returned(next(second.take()))
    second.trained(1.0)
    assert not second.stop()
    assert not first.stop()
    assert not first.wait_for_more()


def test_other_data_and_a_lost_worker_are_refused() -> None:
    job = Job(2)
    claims = job.begin(0, 4)
    with pytest.raises(IncompatibleError, match="has 5 batches here, and 4"):
        job.begin(1, 5)
    job.lost[0] = "frozen"
    with pytest.raises(PeerLostError, match="declared lost"):
        next(claims.take())
