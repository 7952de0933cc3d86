"""Strategies on servers keep their promises under stragglers, delays, duplicates, losses and killed workers."""

from __future__ import annotations

import pytest

from tests.hunting import hunted, seeds
from tests.server.hunts.store_cases import check_eventful
from tests.strategies.hunts.strategy_cases import STRATEGIES, check_replicated_strategy, check_strategy


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_read_is_explained_and_nothing_acknowledged_is_lost(strategy: str) -> None:
    check_eventful(hunted(check_strategy, seeds(4), strategy))


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if "masters" not in each])
def test_a_killed_server_loses_nothing_that_its_replica_has(strategy: str) -> None:
    check_eventful(hunted(check_replicated_strategy, seeds(3), strategy))
