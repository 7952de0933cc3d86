"""Strategies on servers keep their promises under stragglers, delays, duplicates, losses and killed workers."""

from __future__ import annotations

import os

import pytest

from syncline.testing.hunting import hunt_cases
from tests.server.hunts.store_cases import Outcome
from tests.strategies.hunts.strategy_cases import STRATEGIES, check_strategy

ALL = bool(os.environ.get("SYNCLINE_HUNT"))
SEEDS = range(1000) if ALL else range(10)


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_read_is_explained_and_nothing_acknowledged_is_lost(strategy: str) -> None:
    outcomes: list[Outcome] = []
    hunt_cases(
        lambda seed: outcomes.append(check_strategy(strategy, seed)),
        SEEDS,
        f"tests.strategies.hunts.strategy_cases.check_strategy({strategy!r}, {{seed}})",
    )
    # The hunt is about something: workers were killed in the middle of it, and there was much to read.
    assert sum(bool(outcome.killed) and outcome.opened for outcome in outcomes) >= len(SEEDS) // 10
    assert sum(outcome.reads for outcome in outcomes) >= 4 * len(SEEDS)
