"""One-sided states between real processes, through MPI's windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.mpi import Flavour, one_or_both, play

pytestmark = pytest.mark.xdist_group("mpi")

Lines = list[dict[str, Any]]
Told = Callable[[Flavour, str], Lines]


@pytest.fixture(scope="module")
def told() -> Told:
    """What the ranks told of a case. One job for each MPI plays them all: starting it takes longer than they do."""
    found: dict[str, Lines] = {}

    def of(flavour: Flavour, case: str) -> Lines:
        if flavour.name not in found:
            found[flavour.name] = play(flavour, "tests.strategies.onesided.mpi_cases", "deaf", "torn", "solve", "learn")
        return [line for line in found[flavour.name] if line["case"] == case]

    return of


@one_or_both
def test_a_state_is_accepted_while_its_target_computes(flavour: Flavour, told: Told) -> None:
    first, second = told(flavour, "deaf")
    assert second["seen"] is not None, "it came while no library was called"
    assert second["seen"] < second["ended"]
    assert second["accepted"] == [True]
    assert second["after"] == pytest.approx([0.15, 0.15])
    assert first["placed"] < second["ended"], "nor did the sender wait for the target"


@one_or_both
def test_a_half_written_state_is_never_taken(flavour: Flavour, told: Told) -> None:
    (seen,) = told(flavour, "torn")
    assert seen["whole"] >= 5
    assert seen["torn"] >= 3, "it was met"
    assert seen["mixed"] == 0
    assert seen["again"] == 0


@one_or_both
def test_k_means_on_processes(flavour: Flavour, told: Told) -> None:
    results = told(flavour, "solve")
    assert len(results) == 2
    assert results[0] | {"rank": 0} == results[1] | {"rank": 0}, "all have the same"
    assert results[0]["value"] == pytest.approx(2.0, rel=0.03)
    assert results[0]["steps"] == results[0]["sent"] == 1200
    assert results[0]["accepted"] > 0


@one_or_both
def test_a_network_on_processes(flavour: Flavour, told: Told) -> None:
    results = told(flavour, "learn")
    assert [each["rank"] for each in results] == [0, 1]
    for each in results:
        assert each["test"] > 0.75
        assert (each["steps"], each["reason"]) == (6 * 17, "epochs")
