"""Claims of batches: whoever is lost, each batch is trained, and none twice without a loss."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from syncline.control import ControlChannel, MemoryStore
from syncline.data.claims import EpochClaims, Epochs
from syncline.errors import IncompatibleError, PeerLostError
from syncline.runtime import RealRuntime


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
                    more = claims[member].more()
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


def test_other_data_and_a_lost_worker_are_refused() -> None:
    job = Job(2)
    claims = job.begin(0, 4)
    with pytest.raises(IncompatibleError, match="has 5 batches here, and 4"):
        job.begin(1, 5)
    job.lost[0] = "frozen"
    with pytest.raises(PeerLostError, match="declared lost"):
        next(claims.take())
