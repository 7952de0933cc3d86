"""Elastic averaging loses nothing under stragglers, delays, duplicates, losses and killed workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from syncline.strategies.easgd.parameter_server import ServerElasticRun
from tests.hunting import hunted, seeds
from tests.strategies.hunts.easgd_cases import check_served, check_together

SEEDS = seeds(6)


@pytest.mark.hunt
@pytest.mark.parametrize("kind", ["served", "served tree"])
def test_what_workers_give_the_servers_get(kind: str) -> None:
    outcomes = hunted(check_served, SEEDS, kind)
    # The hunt is about something: workers were killed in the middle of it, and centres moved.
    assert sum(bool(outcome.killed) and outcome.opened for outcome in outcomes) >= len(SEEDS) // 10
    assert sum(outcome.moved > 0.1 for outcome in outcomes) >= len(SEEDS) // 3


@pytest.mark.hunt
@pytest.mark.parametrize("kind", ["one", "tree"])
def test_what_workers_give_each_other_they_get(kind: str) -> None:
    assert sum(outcome.moved > 0.1 for outcome in hunted(check_together, SEEDS, kind)) >= len(SEEDS) // 3


@contextmanager
def taken_off_late() -> Iterator[None]:
    """The planted mistake: a worker reads the centre once more before it takes its part off, and takes another."""
    trade = ServerElasticRun.average_with_centre

    def twice(run: ServerElasticRun) -> list[torch.Tensor]:
        trade(run)
        centre = run.client.get((0, run.keys.trained))
        return run.keys.views((torch.cat([own.reshape(-1) for own in run.own]) - centre) * run.alpha)

    with mock.patch.object(ServerElasticRun, "average_with_centre", twice):
        yield


def test_the_hunt_finds_a_planted_mistake() -> None:
    with taken_off_late(), pytest.raises(AssertionError, match=r"seed \d+ breaks it: worth .* nowhere"):
        hunted(check_served, range(10), "served")
