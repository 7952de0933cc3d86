"""One-sided states between real processes, through MPI's windows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from tests.launching import ROOT
from tests.transports.test_mpi import PATIENCE, Flavour, both, need, one_or_both, own_environ

pytestmark = pytest.mark.xdist_group("mpi")


def play(flavour: Flavour, case: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a case of mpi_cases.py; what its ranks have told."""
    need(flavour)
    told = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SYNCLINE_TRANSPORT": "mpi"}
    process = subprocess.Popen(
        [str(flavour.mpiexec), *flavour.options, "-n", str(ranks), sys.executable, "-m",
         "tests.strategies.onesided.mpi_cases", case],
        env=own_environ() | told | flavour.variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, err[-4000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@both
def test_a_state_is_accepted_while_its_target_computes(flavour: Flavour) -> None:
    first, second = sorted(play(flavour, "deaf"), key=lambda line: int(line["rank"]))
    assert second["seen"] is not None, "it came while no library was called"
    assert second["seen"] < second["ended"]
    assert second["accepted"] == [True]
    assert second["after"] == pytest.approx([0.15, 0.15])
    assert first["placed"] < second["ended"], "nor did the sender wait for the target"


@one_or_both
def test_a_half_written_state_is_never_taken(flavour: Flavour) -> None:
    (told,) = play(flavour, "torn")
    assert told["whole"] >= 5
    assert told["torn"] >= 3, "it was met"
    assert told["mixed"] == 0
    assert told["again"] == 0


@one_or_both
def test_k_means_on_processes(flavour: Flavour) -> None:
    results = play(flavour, "solve")
    assert len(results) == 2
    assert results[0] | {"rank": 0} == results[1] | {"rank": 0}, "all have the same"
    assert results[0]["value"] == pytest.approx(2.0, rel=0.03)
    assert results[0]["steps"] == results[0]["sent"] == 1200
    assert results[0]["accepted"] > 0


@one_or_both
def test_a_network_on_processes(flavour: Flavour) -> None:
    results = play(flavour, "learn")
    assert sorted(each["rank"] for each in results) == [0, 1]
    for each in results:
        assert each["test"] > 0.75
        assert (each["steps"], each["reason"]) == (6 * 17, "epochs")
