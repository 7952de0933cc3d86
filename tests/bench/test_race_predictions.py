"""Predictions of a race: made and written before its first run, and shown beside what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from syncline.bench.race.plan import RaceEntry, RacePlace
from syncline.bench.race.predict import predict_race
from syncline.bench.race.predictions import EntryPrediction, RacePredictions
from syncline.bench.report import analyse, judge, write_tables
from syncline.bench.report.html import page
from syncline.bench.runlog import read_race
from syncline.errors import ProtocolError
from syncline.planner.machine import MachineMeasurement
from syncline.workloads import build
from tests.bench.racing import NETWORK, PLAN, WORKLOAD, make_race
from tests.bench.report_races import seeds, write_race
from tests.planner.machines import CALIBRATION

ENTRIES = (
    RaceEntry(name="allreduce"),
    RaceEntry(name="local", strategy="local(period=8)"),
    RaceEntry(name="quantize(4)", codec="quantize(4)", momentum=0.0),
    RaceEntry(name="ssp", strategy="ssp(slack=2)"),
    RaceEntry(name="broken", strategy="diloco(period=0)"),
)


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [replace(each, learning_rate=0.1, rate_from="given") for each in ENTRIES]
    folder = tmp_path_factory.mktemp("race") / "race"
    return make_race(folder, entries=tuple(entries[:4]), seeds=(1,), scaling="weak", scaling_workers=(1,))


def test_a_simulated_race_takes_the_predicted_steps(raced: Path) -> None:
    race = read_race(raced)
    assert race.problems == []
    assert race.predictions is not None
    analysis = analyse(race)
    made = {}
    for entry in analysis.entries:
        assert [each.workers for each in entry.comparisons] == [1, 2]
        for each in entry.comparisons:
            assert each.ratio == pytest.approx(1, abs=0.06), (entry.name, each)
            assert each.predicted.interval_s is not None
        made[entry.name] = entry.comparisons[1].predicted.made_by
    assert made["allreduce"] == made["local"] == "planner"
    assert made["ssp"] == made["quantize(4)"] == "32 simulated steps"


def test_predictions_are_written_before_the_first_run(raced: Path) -> None:
    lines = [json.loads(line) for line in (raced / "registry.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines[:2]] == ["planned", "begun"]
    assert "predictions_sha256" in lines[0]


def predicted_rows(folder: Path) -> list[str]:
    """The rows of the section of predictions, or its text if it has no table; without tags."""
    race = read_race(folder)
    analysis = analyse(race)
    text = page(race, analysis, judge(analysis), None, [], "no plots here")
    section = re.search(r'<section id="predicted">.*?</section>', text, flags=re.DOTALL)
    assert section is not None
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', section[0], flags=re.DOTALL) or [section[0]]
    return [re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", row))).strip() for row in rows]


def test_the_report_has_a_row_for_every_entry(raced: Path) -> None:
    rows = predicted_rows(raced)
    assert len(rows) == 2 * 4
    assert not any("not predicted" in row for row in rows)
    write_tables(raced, read_race(raced), analyse(read_race(raced)), judge(analyse(read_race(raced))), None)
    report = json.loads((raced / "report.json").read_text())
    first = report["analysis"]["entries"][0]["comparisons"][1]
    assert first["predicted"]["step_s"] == pytest.approx(first["measured"], rel=0.06)


def one(entry: str = "a", **facts: object) -> EntryPrediction:
    return EntryPrediction(entry=entry, workers=4, **facts)  # type: ignore[arg-type]


def predictions_of(*entries: EntryPrediction) -> RacePredictions:
    return RacePredictions(entries=entries, inputs={"network": "100 Mbit/s"})


def test_ratio_interval_and_reasons_are_in_the_cells(tmp_path: Path) -> None:
    # Steps take 0.09 s: 90 % of 2 s are compute and exposed, in 20 steps.
    runs = [run for name in ("near", "far", "why") for run in seeds(name, steps=20)]
    made = predictions_of(
        one("near", step_s=0.075, interval_s=(0.07, 0.1)),
        one("far", step_s=0.06, interval_s=(0.05, 0.07)),
        one("why", why="<the network> was not measured"),
    )
    assert sorted(predicted_rows(write_race(tmp_path / "race", runs, predictions=made))) == [
        "far 4 60 50–70 90 1.5 outside planner",
        "near 4 75 70–100 90 1.2 planner",
        "why 4 not predicted: <the network> was not measured – 90 – –",
    ]
    (text,) = predicted_rows(write_race(tmp_path / "none", runs))
    assert "begun by an earlier version" in text


def test_predictions_that_were_changed_are_not_shown(tmp_path: Path) -> None:
    folder = write_race(
        tmp_path / "race", seeds("a"), predictions=predictions_of(one(step_s=1.0, interval_s=(0.9, 1.1)))
    )
    file = folder / "predictions.json"
    text = file.read_text()
    file.write_text(text.replace("1.0", "0.18"))
    race = read_race(folder)
    assert race.predictions is None
    assert "predictions.json was changed after the race began, so it is not shown" in race.problems
    file.unlink()
    assert "predictions.json is missing" in read_race(folder).problems
    added = write_race(tmp_path / "added", seeds("a"))
    (added / "predictions.json").write_text(text)
    race = read_race(added)
    assert race.predictions is None
    assert "was not there when the race began" in race.problems[0]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 2, "entries": [], "inputs": {}}'])
def test_files_that_are_no_predictions_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="predictions"):
        RacePredictions.from_json(text)


def test_what_cannot_be_predicted_says_why() -> None:
    plan = replace(PLAN, entries=ENTRIES, place=RacePlace(), seconds_a_sample=None)
    workload = build(WORKLOAD)
    unknown = predict_race(plan, workload)
    assert {each.step_s for each in unknown.entries} == {None}
    assert all("--machine" in each.why for each in unknown.entries)
    lab = predict_race(replace(plan, place=RacePlace(kind="lab", detail="2@100mbit")), workload)
    why = {each.entry: each.why for each in lab.entries}
    assert (why["allreduce"], why["local"], why["ssp"]) == ("", "", "")
    assert "quantize(4) was not measured" in why["quantize(4)"]
    machine = MachineMeasurement(
        workers=2,
        hosts=2,
        threads=1,
        network=CALIBRATION,
        call_s=1e-4,
        compute_s=0.04,
        allreduce_s=0.02,
        together_s=0.05,
        compute_slowdown=1.2,
    )
    entries = (*ENTRIES[:1], RaceEntry(name="mpi", engine="mpi"), RaceEntry(name="hook", strategy="ddp(hook='fp16')"))
    measured = predict_race(replace(plan, entries=(*entries, ENTRIES[2])), workload, machine=machine)
    step, *others = measured.entries
    assert step.step_s is not None
    assert step.interval_s is not None
    assert [each.step_s for each in others] == [None] * 3
    assert "MPI was not measured" in others[0].why
    assert "another library's" in others[1].why
    assert "quantize(4)" in others[2].why


def test_a_strategy_that_fails_on_the_simulator_says_how() -> None:
    plan = replace(PLAN, entries=ENTRIES[-1:])
    (found,) = predict_race(plan, build(WORKLOAD), network=NETWORK).entries
    assert found.step_s is None
    assert "simulated steps of it fail" in found.why
    (free,) = predict_race(
        replace(plan, entries=ENTRIES[:1], seconds_a_sample=0.0), build(WORKLOAD), network=NETWORK
    ).entries
    assert free.step_s is not None
    assert 0 < free.step_s < 1e-3  # two messages
