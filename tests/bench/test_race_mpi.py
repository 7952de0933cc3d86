"""Entries of a race that run on MPI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncline.bench.race import entries as entries_module
from syncline.bench.race.entries import RaceEntries, all_entries, read_entries
from syncline.bench.race.plan import RacePlan
from syncline.bench.runlog import read_race
from syncline.errors import IncompatibleError, SpecError, SynclineError, UnsupportedError, WorldError
from syncline.launch.lab import Lab
from syncline.launch.mpi import why_no_mpi
from syncline.strategies import AllReduce, Preset
from syncline.workloads import build
from tests.bench.racing import PLAN, WORKLOAD
from tests.launch.runs import Runs

NEEDY = Preset(spec="allreduce(delay=1)", engine="mpi")


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries_module, "why_no_mpi", lambda lab: None)


@pytest.fixture
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries_module, "why_no_mpi", lambda lab: f"mpiexec is gone (lab: {lab})")


def read(tmp_path: Path, text: str, simulated: bool = False) -> RaceEntries:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_entries(path, build("digits"), simulated)


@pytest.mark.usefixtures("mpi")
def test_a_file_names_the_engine(tmp_path: Path) -> None:
    text = "[[entry]]\nstrategy = 'allreduce'\n[[entry]]\nstrategy = 'allreduce'\nengine = 'mpi'"
    found = read(tmp_path, text).entries
    assert [(entry.name, entry.engine) for entry in found] == [("allreduce", None), ("allreduce on mpi", "mpi")]
    assert read(tmp_path, text, simulated=True).entries[1].engine is None, "simulated ranks have their own"


@pytest.mark.usefixtures("mpi")
def test_a_strategy_that_needs_mpi_has_it_however_it_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllReduce, "presets", (NEEDY,))
    (entry,) = read(tmp_path, "[[entry]]\nstrategy = 'allreduce(delay=2)'").entries
    assert (entry.name, entry.engine) == ("allreduce(delay=2)", "mpi")


@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("engine = 'nccl'", SpecError, "engine = 'nccl' is not available in a race"),
        ("engine = 3", SpecError, "engine = 3 is not a text"),
        ("strategy = 'ddp'\nengine = 'mpi'", IncompatibleError, "ddp runs only on torch.distributed"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, kind: type[SynclineError], told: str) -> None:
    with pytest.raises(kind, match=told):
        read(tmp_path, f"[[entry]]\n{text}")


@pytest.mark.usefixtures("no_mpi")
def test_without_mpi_a_file_is_refused_and_the_default_entries_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="allreduce on mpi runs on MPI, and mpiexec is gone"):
        read(tmp_path, "[[entry]]\nengine = 'mpi'")
    monkeypatch.setattr(entries_module, "default_presets", lambda: [Preset(spec="allreduce"), NEEDY])
    found = all_entries(build("digits"), one_host=False)
    assert found.skipped[NEEDY.spec] == "it runs on MPI, and mpiexec is gone (lab: True)"
    names = [entry.name for entry in found.entries]
    assert "allreduce" in names
    assert NEEDY.spec not in names
    simulated = {entry.name: entry for entry in all_entries(build("digits"), simulated=True).entries}
    assert simulated[NEEDY.spec].engine is None


@pytest.mark.usefixtures("mpi")
def test_the_default_entries_has_those_on_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries_module, "default_presets", lambda: [NEEDY])
    found = {entry.name: entry.engine for entry in all_entries(build("digits")).entries}
    assert found[NEEDY.spec] == "mpi"
    assert found["ddp"] is None


def test_a_plan_of_before_reads_back() -> None:
    plan = json.loads(PLAN.as_json())
    for entry in plan["entries"]:
        del entry["engine"]
    assert RacePlan.from_json(json.dumps(plan)) == PLAN


ENTRIES = """
[[entry]]
strategy = "allreduce"
engine = "mpi"
[[entry]]
name = "diverges"
engine = "mpi"
learning_rate = 1e30
"""


@pytest.fixture
def runs(runs: Runs) -> Runs:
    try:
        Lab(1, "open", check=False).close()
    except WorldError as error:
        pytest.skip(str(error))
    return runs


@pytest.mark.skipif(why_no_mpi(lab=True) is not None, reason=f"no MPICH here: {why_no_mpi(lab=True)}")
@pytest.mark.xdist_group("lab")
def test_its_ranks_are_started_by_mpiexec_in_the_lab(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "mine.toml").write_text(ENTRIES)
    options = "-n 2 --lab 1gbit --seeds 1 --target 0.02 --epochs 2 --batch 32 --entries mine.toml --out here"
    raced = runs.run("race", WORKLOAD, *options.split())
    assert raced.code == 0, raced.describe()
    race = read_race(tmp_path / "here")
    found = {run.entry: run for run in race.runs}
    statuses = {name: run.status for name, run in found.items()}
    assert statuses == {"allreduce on mpi": "finished", "diverges": "diverged"}
    assert "NaN or Inf" in str(found["diverges"].reason)
    assert found["allreduce on mpi"].test is not None
    worlds = [run.system["world"] for run in race.runs]
    assert [(world["engine"], world["hosts"], world["lab"]) for world in worlds] == [
        ("mpi", ["lab0", "lab1"], "2@1gbit")
    ] * 2
    runs.assert_nothing_left()
