"""The store keeps its promises under stragglers, delays, duplicates, losses and killed workers, whatever the order."""

from __future__ import annotations

import os

import pytest

from syncline.testing.hunting import hunt_cases
from tests.server.hunts.store_cases import Outcome, check_store

ALL = bool(os.environ.get("SYNCLINE_HUNT"))
SEEDS = range(1000) if ALL else range(12)


@pytest.mark.hunt
@pytest.mark.parametrize("consistency", ["sequential", "quorum", "ssp", "eventual"])
def test_every_read_is_explained_and_nothing_acknowledged_is_lost(consistency: str) -> None:
    outcomes: list[Outcome] = []
    hunt_cases(
        lambda seed: outcomes.append(check_store(consistency, seed)),
        SEEDS,
        f"tests.server.hunts.store_cases.check_store({consistency!r}, {{seed}})",
    )
    # The hunt is about something: workers were killed in the middle of it, and there was much to read.
    assert sum(bool(outcome.killed) and outcome.opened for outcome in outcomes) >= len(SEEDS) // 10
    assert sum(outcome.reads for outcome in outcomes) >= 4 * len(SEEDS)
