"""The common zero of clocks that were set at different times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import syncline as sl
from syncline.training.records import common_clock_zero
from syncline.world import World


def test_clocks_hours_apart_get_one_zero() -> None:
    """The clock of rank r is r hours ahead; the error is at most half a round trip, and is returned."""

    def ask(world: World) -> tuple[float, float]:
        ahead = 3600.0 * world.rank
        runtime = SimpleNamespace(now=lambda: world.runtime.now() + ahead)
        skewed = SimpleNamespace(rank=world.rank, size=world.size, everyone=world.everyone, runtime=runtime)
        zero, error = common_clock_zero(cast(World, skewed))
        return zero - ahead, error

    network = sl.Network(latency=1e-3, bandwidth=1e9)
    (first, exact), *others = sl.simulate(ask, ranks=4, network=network).results
    assert exact == 0
    for zero, error in others:
        assert 0.5e-3 < error < 2e-3, "half of there and back"
        assert abs(zero - first) <= error


def test_a_world_of_one() -> None:
    (found,) = sl.simulate(common_clock_zero, ranks=1).results
    assert found == (0.0, 0.0)
