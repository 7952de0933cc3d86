"""The report of a race: numbers with known answers, and a page that hides nothing."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.lint import Finding, lint
from syncline.bench.race.plan import RaceEntry, RacePlace
from syncline.bench.report import analyse, judge, write_report, write_tables
from syncline.bench.report.analysis import spread
from syncline.bench.report.facts import count_settings
from syncline.bench.report.html import page
from syncline.bench.report.plots import SERIES_COLOURS, plot_styles
from syncline.bench.runlog import read_race
from syncline.cli.main import main
from syncline.errors import ProtocolError, SpecError
from tests.bench.racing import make_race, reseal
from tests.bench.report_races import Hand, analysed, seeds, write_race

pytestmark = pytest.mark.xdist_group("report")  # they share a fixture that takes long

HOSTILE = "<script>alert(1)</script>"


def written(folder: Path, findings: list[Finding] | None = None) -> str:
    """The page without its pictures, which take long."""
    race = read_race(folder)
    found = analyse(race)
    return page(race, found, judge(found), findings, [])


class TestSpread:
    def test_three_to_five_have_a_t_interval_of_their_logarithms(self) -> None:
        found = spread([1.0, math.e, math.e**2])
        assert found is not None
        assert found.median == pytest.approx(math.e)
        # Mean 1 and deviation 1 of the logarithms: 1 ± 4.3027/√3.
        assert found.low == pytest.approx(math.exp(1 - 4.3027 / math.sqrt(3)))
        assert found.high == pytest.approx(math.exp(1 + 4.3027 / math.sqrt(3)))
        assert found.kind == "student"

    def test_six_have_order_statistics_and_infinity_is_one(self) -> None:
        found = spread([1.0, 2.0, 3.0, 4.0, 5.0, math.inf])
        assert found is not None
        assert (found.median, found.low, found.high, found.kind) == (3.5, 1.0, math.inf, "order")

    def test_one_that_never_came_leaves_only_a_range(self) -> None:
        found = spread([1.0, math.inf, 3.0])
        assert found is not None
        assert (found.median, found.low, found.high, found.kind) == (3.0, 1.0, math.inf, "range")

    def test_two_have_a_range(self) -> None:
        found = spread([1.0, 3.0])
        assert found is not None
        assert found.kind == "range"
        assert found.describe() == "range of 2 seeds"

    def test_none_of_none(self) -> None:
        assert spread([]) is None


class TestAnalysis:
    def test_time_epochs_and_bytes_to_the_target_come_from_the_evaluations(self, tmp_path: Path) -> None:
        entry = analysed(tmp_path, seeds("a", (1.0, 2.0, 4.0))).entry("a")
        assert entry.time is not None
        assert entry.epochs is not None
        assert entry.bytes is not None
        assert (entry.time.least, entry.time.median, entry.time.most) == (3.0, 6.0, 12.0)
        assert (entry.epochs.median, entry.bytes.median, entry.reached) == (3.0, 3000.0, 3)
        assert entry.slowest_to_fastest == pytest.approx(4.0)

    def test_phases_of_a_step_and_what_no_phase_has(self, tmp_path: Path) -> None:
        entry = analysed(tmp_path, seeds("a", shares={"compute": 0.5, "exposed": 0.3, "evaluation": 0.1})).entry("a")
        assert entry.phases["compute"] == pytest.approx(0.1)  # 2 s and 10 steps between evaluations
        assert entry.phases["exposed"] == pytest.approx(0.06)
        assert entry.shares["rest"] == pytest.approx(0.1)
        assert sum(entry.shares.values()) == pytest.approx(1.0)
        assert entry.step is not None
        assert entry.step.median == pytest.approx(0.16)  # evaluations are no part of a step

    def test_ratios_are_taken_seed_by_seed(self, tmp_path: Path) -> None:
        runs = [*seeds("base", (2.0, 4.0, 8.0)), *seeds("b", (1.0, 2.0, 4.0))]
        ratio = analysed(tmp_path, runs).entry("b").ratio
        assert ratio is not None
        assert (ratio.low, ratio.median, ratio.high) == (0.5, 0.5, 0.5)

    def test_plain_ddp_is_the_baseline_where_it_runs(self, tmp_path: Path) -> None:
        entries = (
            RaceEntry(name="mine"),
            RaceEntry(name="half", strategy="ddp(hook='fp16')"),
            RaceEntry(name="theirs", strategy="ddp"),
        )
        assert analysed(tmp_path, [*seeds("mine"), *seeds("theirs")], entries).baseline == "theirs"

    def test_a_failed_run_is_infinite_even_if_it_had_reached_the_target(self, tmp_path: Path) -> None:
        runs = [*seeds("a", (1.0, 1.0)), Hand("a", 3, status="failed", reason="PeerLostError: rank 2\nTraceback")]
        entry = analysed(tmp_path, runs).entry("a")
        assert entry.reached == 2
        assert entry.time is not None
        assert entry.time.most == math.inf
        assert entry.statuses == {"finished": 2, "failed": 1}
        assert entry.failures == ["runs/a/4w-seed3: failed, PeerLostError: rank 2"]

    def test_interrupted_and_excluded_runs_do_not_count(self, tmp_path: Path) -> None:
        runs = [Hand("a", 1), Hand("a", 2, status="interrupted"), Hand("a", 3, excluded="the disk was full")]
        found = analysed(tmp_path, runs)
        assert found.entry("a").runs == 1
        assert len(found.runs) == 3

    def test_a_smaller_metric_may_be_the_better_one(self, tmp_path: Path) -> None:
        runs = seeds("a", metrics=(3.0, 2.0, 1.0))
        entry = analysed(tmp_path, runs, target=2.5, higher_is_better=False).entry("a")
        assert entry.time is not None
        assert entry.best is not None
        assert (entry.time.median, entry.best.median) == (4.0, 1.0)

    def test_a_metric_that_is_not_a_number_reaches_nothing(self, tmp_path: Path) -> None:
        entry = analysed(tmp_path, seeds("a", metrics=(0.3, "nan", "nan"))).entry("a")
        assert entry.reached == 0
        assert entry.best is not None
        assert entry.best.median == 0.3

    def test_worker_seconds_count_the_start_and_tuning_apart(self, tmp_path: Path) -> None:
        runs = [*seeds("a"), Hand("a", 9, kind="tuning", factor=3.0, seconds=7.0)]
        entry = analysed(tmp_path, runs).entry("a")
        assert entry.worker_seconds == 3 * 4 * 30.0
        assert (entry.tuning_runs, entry.tuning_worker_seconds) == (1, 28.0)

    def test_a_simulation_has_worker_seconds_of_its_own_clock(self, tmp_path: Path) -> None:
        entry = analysed(tmp_path, seeds("a"), place=RacePlace(kind="simulated", detail="10mbit")).entry("a")
        assert entry.worker_seconds == 3 * 4 * 10.0

    def test_a_prediction_stands_beside_the_measurement(self, tmp_path: Path) -> None:
        predicted = {"communication": 0.07, "codec": 0.01, "buckets": 1}
        told = analysed(tmp_path, seeds("a", predicted=predicted)).entry("a").prediction
        assert told is not None
        assert told.step_low == told.step_high == pytest.approx(0.1 + 0.01 + 0.07)
        assert told.measured_step == pytest.approx(0.18)
        assert told.measured_communication == pytest.approx(0.12)
        assert told.measured_exposed == pytest.approx(0.08)

    @pytest.mark.parametrize("change", [{"buckets": 3}, {"staleness": 1.0}])
    def test_what_may_overlap_is_predicted_as_a_range(self, tmp_path: Path, change: dict[str, float]) -> None:
        predicted = {"communication": 0.07, "codec": 0.01, "buckets": change.get("buckets", 1.0)}
        runs = seeds("a", predicted=predicted, staleness=change.get("staleness", 0.0))
        told = analysed(tmp_path, runs).entry("a").prediction
        assert told is not None
        assert told.step_low == pytest.approx(0.1 + 0.01)
        assert told.step_high == pytest.approx(0.18)

    def test_scaling_is_told_against_one_worker(self, tmp_path: Path) -> None:
        alone = seeds("a", (6.0, 6.0, 6.0), workers=1, kind="scaling", test=0.89)
        found = analysed(tmp_path, [*seeds("a"), *alone], scaling="weak", scaling_workers=(1,)).entry("a").scaling
        assert [point.workers for point in found] == [1, 4]
        assert found[1].throughput == pytest.approx(500.0)
        assert found[1].efficiency == pytest.approx(3 / 4)
        assert found[1].speedup == pytest.approx(3.0)
        assert found[0].test is not None
        assert found[0].test.median == 0.89

    def test_staleness_and_consensus_where_there_are_any(self, tmp_path: Path) -> None:
        entry = analysed(tmp_path, seeds("a", staleness=2.0, consensus=0.25)).entry("a")
        assert (entry.staleness, entry.staleness_mean, entry.consensus) == (2.0, 2.0, 0.25)

    def test_settings_count_arguments_of_strategy_codec_and_training(self) -> None:
        plain, coded = (
            count_settings(RaceEntry(name="a")),
            count_settings(RaceEntry(name="b", codec="topk(0.01)|quantize(bits=4)")),
        )
        assert (plain.codec, plain.training, plain.chosen) == (0, 3, 0)
        assert coded.strategy == plain.strategy
        assert coded.codec is not None
        assert coded.codec > 2
        assert coded.chosen == 2
        assert count_settings(RaceEntry(name="c", warmup=1.0)).training == 4
        assert count_settings(RaceEntry(name="d", strategy="nobody_knows")).total is None


class TestProblems:
    """A folder with missing, edited or mixed-version logs: named, in the page too."""

    def test_an_edited_log(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a"))
        log = folder / "runs/a/4w-seed2/log.jsonl"
        log.write_text(log.read_text().replace("0.88", "0.99"))
        assert "runs/a/4w-seed2/log.jsonl was edited after the run" in written(folder)

    def test_a_missing_log(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a"))
        (folder / "runs/a/4w-seed2/log.jsonl").unlink()
        assert "runs/a/4w-seed2/log.jsonl is missing" in written(folder)

    def test_other_code(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a"))
        config = folder / "runs/a/4w-seed2/config.json"
        config.write_text(config.read_text().replace("feed", "dead"))
        reseal(folder)
        assert "runs/a/4w-seed2 ran other code" in written(folder)

    @pytest.mark.parametrize(
        ("key", "value"), [("elapsed", '"soon"'), ("elapsed", "-1"), ("samples", "null"), ("phases", "[1]")]
    )
    def test_a_log_that_makes_no_sense_is_a_failed_run(self, tmp_path: Path, key: str, value: str) -> None:
        folder = write_race(tmp_path / "race", seeds("a", status="finished"))
        log = folder / "runs/a/4w-seed2/log.jsonl"
        lines = [line for line in log.read_text().splitlines() if "sl_phases" not in line]
        log.write_text("".join(re.sub(rf'"{key}": ({{[^}}]*}}|[^,}}]*)', f'"{key}": {value}', x) + "\n" for x in lines))
        reseal(folder)
        found = analyse(read_race(folder))
        assert found.entry("a").reached == 2
        assert found.entry("a").statuses == {"finished": 2, "failed": 1}
        assert any("runs/a/4w-seed2/log.jsonl cannot be understood" in problem for problem in found.problems)

    def test_no_registry(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a"))
        (folder / "registry.jsonl").unlink()
        text = written(folder)
        assert "registry.jsonl is missing" in text
        assert "No run has ended yet" in text

    def test_what_is_no_race_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"has no race\.json"):
            write_report(tmp_path)
        folder = write_race(tmp_path / "race", seeds("a"))
        lines = [json.loads(line) for line in (folder / "registry.jsonl").read_text().splitlines()]
        for line in lines:
            line |= {"workers": "four"} if line["event"] == "begun" else {}
        (folder / "registry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ProtocolError, match="workers is 'four'"):
            read_race(folder)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("workers", 0), ("workers", "4"), ("target", None), ("seeds", [1, None]), ("limit", math.nan)],
    )
    def test_a_plan_that_makes_no_sense_is_refused_by_name(self, tmp_path: Path, field: str, value: Any) -> None:
        folder = write_race(tmp_path / "race", seeds("a"))
        plan = json.loads((folder / "race.json").read_text())
        (folder / "race.json").write_text(json.dumps({**plan, field: value}))
        with pytest.raises(ProtocolError, match=rf"race\.json.*{field}"):
            read_race(folder)


class TestPage:
    def test_hostile_words_are_words(self, tmp_path: Path) -> None:
        hostile = RaceEntry(name=HOSTILE)
        runs = [
            *seeds("a", (1.0, 1.0)),
            Hand("a", 3, status="failed", reason=HOSTILE),
            *seeds(HOSTILE, excluded=HOSTILE),
        ]
        folder = write_race(
            tmp_path / "race",
            runs,
            (RaceEntry(name="a"), hostile),
            skipped={HOSTILE: HOSTILE},
            command=HOSTILE,
            place=RacePlace(kind="lab", detail=HOSTILE),
        )
        text = written(folder, [Finding("1", HOSTILE, HOSTILE, HOSTILE)])
        assert HOSTILE not in text
        assert text.count("<script>") == 1
        assert text.count("&lt;script&gt;alert") >= 8

    def test_broken_rules_are_on_its_face(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a"))
        findings = [
            Finding("6", "Time is left out", "phases add up to 71 %", "time it all"),
            Finding("6", "Time is left out", "and again", "time it all"),
            Finding("9", "Inputs", "hm", "mention it", "warning"),
        ]
        text = written(folder, findings)
        assert "This report breaks 1 rule<" in text
        assert text.index("phases add up to 71 %") < text.index('id="verdict"') < text.index("Warnings of the lint")

    def test_a_clean_lint_and_none_at_all_are_told_apart(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a"))
        assert "Lint: no rule is broken." in written(folder, [])
        assert "This race was not checked" in written(folder)

    def test_an_unfinished_race_says_so(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a", (1.0, 1.0)), (RaceEntry(name="a"), RaceEntry(name="b")))
        text = written(folder)
        assert "This race is not finished" in text
        assert "4 of the planned runs have no result yet" in text

    def test_all_that_is_needed_to_repeat_it(self, tmp_path: Path) -> None:
        folder = write_race(tmp_path / "race", seeds("a"), skipped={"hivemind": "not installed"})
        text = written(folder)
        race = read_race(folder)
        for needed in (
            "syncline race digits -n 4",
            "1.2.3 (feed)",
            "torch 2.13",
            "1, 2, 3",
            race.lines[-1]["hash"],
            "runs/a/4w-seed1",
            "hivemind: skipped, not installed",
        ):
            assert needed in text

    def test_every_entry_looks_different(self) -> None:
        found = plot_styles([f"e{number}" for number in range(40)], None)
        assert len(set(found.values())) == 40

    def test_colours_are_seen_on_paper_and_in_the_dark(self) -> None:
        for light, dark in SERIES_COLOURS:
            assert _contrast(light, "#ffffff") >= 4.5
            assert _contrast(dark, "#14181c") >= 4.5


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small honest race, with its report."""
    folder = make_race(tmp_path_factory.mktemp("race") / "simulated", scaling="weak", scaling_workers=(1,))
    write_report(folder, lint(read_race(folder)))
    return folder


class TestFiles:
    def test_everything_is_there(self, simulated: Path) -> None:
        for name in ("report.html", "report.json", "runs.csv", "curves.csv"):
            assert (simulated / name).stat().st_size > 0
        names = {path.stem for path in (simulated / "plots").iterdir()}
        curves = {"curves-time", "curves-epochs", "curves-bytes"}
        assert names == curves | {"time-to-target", "phases", "predictions", "scaling"}
        assert read_race(simulated).problems == []

    def test_the_page_asks_nobody_for_anything(self, simulated: Path) -> None:
        text = (simulated / "report.html").read_text()
        assert re.findall(r"https?:|//[a-z]|@import|\bsrc=", text.replace("// What", "").replace("// for", "")) == []
        assert len(text) < 400_000

    def test_pictures_keep_letters_and_take_the_page_s_colours(self, simulated: Path) -> None:
        text = (simulated / "report.html").read_text()
        assert text.count("<svg ") == 7
        assert "quantize(4)</text>" in text
        drawn = "".join(re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL))
        assert re.findall(r"#[0-9a-f]{6};", drawn) == []
        ids = re.findall(r'\bid="([^"]*)"', text)
        assert len(ids) == len(set(ids))

    def test_the_same_race_gives_the_same_bytes(self, simulated: Path, tmp_path: Path) -> None:
        again = shutil.copytree(simulated, tmp_path / simulated.name)
        for path in ("report.html", "report.json", "runs.csv", "curves.csv"):
            (again / path).unlink()
        write_report(again, lint(read_race(again)))
        for path in ("report.html", "report.json", "curves.csv", "plots/phases.svg", "plots/scaling.png"):
            assert (again / path).read_bytes() == (simulated / path).read_bytes()

    def test_json_has_the_plan_the_verdict_and_the_registry(self, simulated: Path) -> None:
        told = json.loads((simulated / "report.json").read_text())
        race = read_race(simulated)
        assert told["plan"] == json.loads((simulated / "race.json").read_text())
        assert told["registry_head"] == race.lines[-1]["hash"]
        assert told["verdict"]["sentence"] == judge(analyse(race)).sentence
        assert [entry["name"] for entry in told["analysis"]["entries"]] == [entry.name for entry in race.entries]

    def test_rows_for_every_run_and_every_evaluation(self, tmp_path: Path) -> None:
        failed = Hand("=cmd", 1, status="failed", reason="boom", metrics=(0.1,))
        folder = write_race(tmp_path / "race", [*seeds("a"), failed])
        race = read_race(folder)
        found = analyse(race)
        write_tables(folder, race, found, judge(found), [])
        with open(folder / "runs.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        with open(folder / "curves.csv", newline="") as file:
            points = list(csv.DictReader(file))
        assert [row["status"] for row in rows] == ["finished"] * 3 + ["failed"]
        assert [row["time_to_target"] for row in rows] == ["6.0"] * 3 + ["inf"]
        assert rows[-1]["entry"] == "'=cmd"  # no formula for a spreadsheet
        assert len(points) == 3 * 5 + 1
        assert json.loads((folder / "report.json").read_text())["analysis"]["runs"][3]["time_to_target"] == "inf"

    def test_without_matplotlib_there_are_no_pictures(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        text = write_report(write_race(tmp_path / "race", seeds("a")), []).read_text()
        assert "pip install &#39;syncline[plot]&#39;" in text
        assert "<svg" not in text

    def test_the_command_says_who_won_and_where_to_look(
        self, simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = shutil.copytree(simulated, tmp_path / "race")
        (folder / "runs/allreduce/2w-seed1/config.json").unlink()
        assert main(["report", str(folder)]) == 0
        told = capsys.readouterr().out
        assert judge(analyse(read_race(folder))).sentence in told
        assert "This report breaks rule 0" in told
        assert told.endswith(f"written: {folder / 'report.html'}\n")
        assert main(["report", str(tmp_path / "nothing")]) == 2


def _contrast(one: str, other: str) -> float:
    lights = sorted(map(_light, (one, other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _light(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
