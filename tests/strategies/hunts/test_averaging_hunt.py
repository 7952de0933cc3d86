"""Averaging loses nothing and leaves all workers alike, whatever is late and whoever runs out of data."""

from __future__ import annotations

from unittest import mock

import pytest

from syncline.strategies.diloco import DiLoCoRun
from syncline.strategies.local_weights import LocalWeightsRun
from tests.hunting import hunted, seeds
from tests.strategies.hunts.averaging_cases import KINDS, check_averaging

SEEDS = seeds(4)


@pytest.mark.hunt
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_conserved_and_all_are_alike_after_a_round(kind: str) -> None:
    assert sum(hunted(check_averaging, SEEDS, kind)) >= 2 * len(SEEDS)  # rounds: the hunt is about something


@pytest.mark.hunt
def test_the_hunt_sees_a_worker_that_forgets_its_own_steps() -> None:
    """A planted mistake: the outer weights replace a worker's own, with what it has done since."""
    with (
        mock.patch.object(DiLoCoRun, "_with_own_steps", lambda run, outer: list(outer)),
        pytest.raises(AssertionError, match=r"seed \d+ breaks it"),
    ):
        hunted(check_averaging, range(8), "overlapped")


@pytest.mark.hunt
def test_the_hunt_sees_a_worker_that_keeps_its_own_weights() -> None:
    """Another: rank 0 does not take over what a round has found."""
    set_weights = LocalWeightsRun.set_weights

    def plant(run: LocalWeightsRun, values: object) -> None:
        if run.communicator.rank or run not in run.world.runs:
            set_weights(run, values)  # type: ignore[arg-type]

    with (
        mock.patch.object(LocalWeightsRun, "set_weights", plant),
        pytest.raises(AssertionError, match=r"seed \d+ breaks it"),
    ):
        hunted(check_averaging, range(8), "local")
