"""Gossip keeps its promises in any order of events, with stragglers, delays and killed workers."""

from __future__ import annotations

from unittest import mock

import pytest

from syncline.strategies.gossip.pairwise import PairwisePeers
from tests.hunting import hunted, seeds
from tests.strategies.hunts.gossip_cases import check_choco, check_killed, check_mixing, check_pairs

SEEDS = seeds(10)


@pytest.mark.hunt
def test_mixing_is_what_the_equations_say_and_contracts_as_the_gap_promises() -> None:
    left = hunted(check_mixing, SEEDS)
    assert sum(each < 0.9 for each in left) >= len(SEEDS) // 5, "workers came together"


@pytest.mark.hunt
def test_compressed_differences_keep_the_mean_and_everybodys_beliefs() -> None:
    left = hunted(check_choco, SEEDS)
    assert sorted(left)[len(left) // 2] < 0.7


@pytest.mark.hunt
def test_averages_of_two_conserve_the_sum() -> None:
    assert sum(hunted(check_pairs, SEEDS)) >= 4 * len(SEEDS)


@pytest.mark.hunt
def test_a_killed_worker_leaves_the_others_whole() -> None:
    assert sum(hunted(check_killed, SEEDS)) >= len(SEEDS) // 2


def test_the_hunt_finds_an_average_that_is_not_atomic() -> None:
    """Planted: the active one lets go of its weights while it waits, and then takes the mean over as it was."""

    def careless(self: PairwisePeers, peer: int) -> float | None:
        before = self.weights.clone()
        moved = self.request(peer, 1, before).wait().row(before.dtype, before.numel())
        self.weights.copy_(before - moved)
        self.changes += 1
        return 0.0

    with (
        mock.patch.object(PairwisePeers, "average", careless),
        pytest.raises(AssertionError, match=r"seed \d+ breaks it"),
    ):
        hunted(check_pairs, range(60))
