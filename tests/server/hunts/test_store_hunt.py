"""The store keeps its promises under stragglers, delays, duplicates, losses and killed workers, whatever the order."""

from __future__ import annotations

import pytest

from tests.hunting import hunted, seeds
from tests.server.hunts.store_cases import check_eventful, check_replaced_store, check_replicated_store, check_store


@pytest.mark.hunt
@pytest.mark.parametrize("consistency", ["sequential", "quorum", "ssp", "eventual"])
def test_every_read_is_explained_and_nothing_acknowledged_is_lost(consistency: str) -> None:
    check_eventful(hunted(check_store, seeds(5), consistency))


@pytest.mark.hunt
@pytest.mark.parametrize("consistency", ["sequential", "quorum", "ssp", "eventual"])
def test_a_killed_server_loses_nothing_that_its_replicas_have(consistency: str) -> None:
    outcomes = hunted(check_replicated_store, seeds(6), consistency)
    assert all(outcome.killed for outcome in outcomes if outcome.opened)
    check_eventful(outcomes)


@pytest.mark.hunt
@pytest.mark.parametrize("consistency", ["sequential", "quorum", "ssp", "eventual"])
def test_nothing_is_lost_if_servers_are_replaced_and_killed_again(consistency: str) -> None:
    check_eventful(hunted(check_replaced_store, seeds(4), consistency))


def test_a_read_waits_for_no_step_that_nobody_pushes_any_more() -> None:
    """This seed has led to a read that never ended: its worker was late at one server, and the others were lost."""
    assert check_store("quorum", 1259).killed
