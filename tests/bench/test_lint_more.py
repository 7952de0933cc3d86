"""The rest of each rule; files that were edited without care; a single run; and the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.bench.lint import review_run
from syncline.bench.lint.accuracy import check_splits
from syncline.bench.lint.base import LintCase
from syncline.bench.race.registry import RunRegistry
from syncline.bench.runlog import read_race
from syncline.cli.main import main
from syncline.errors import SpecError
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.workloads import build
from syncline.world import init
from tests.bench.linting import Line, Races, drop_run, edit_json, edit_log, edit_registry, linted, run_folders
from tests.bench.racing import reseal

pytestmark = pytest.mark.xdist_group("lint")
RUN = "runs/quantize-4/2w-seed1"


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Races:
    return Races(tmp_path_factory.getbasetemp() / "lint")


@pytest.fixture
def plain(races: Races, tmp_path: Path) -> Path:
    return races.copy("plain", tmp_path)


def planned(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "race.json", lambda plan: plan.update(changes))


def configured(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / RUN / "config.json", lambda config: config.update(changes))


def logged(key: str, change: Callable[[Line], Line | None]) -> Callable[[Path], None]:
    def edit(lines: list[Line]) -> list[Line]:
        found = [change(line) if line["key"] == key else line for line in lines]
        return [line for line in found if line is not None]

    return lambda folder: edit_log(folder / RUN, edit)


def valued(key: str, **changes: Any) -> Callable[[Path], None]:
    return logged(key, lambda line: {**line, "value": {**line["value"], **changes}})


def registered(change: Callable[[Line], Line | None]) -> Callable[[Path], None]:
    def edit(lines: list[Line]) -> list[Line]:
        return [line for line in map(change, lines) if line is not None]

    return lambda folder: edit_registry(folder, edit)


def ended_badly(line: Line) -> Line:
    good = line.get("run") == RUN and line["event"] == "ended"
    return {**line, "status": "failed", "reason": "it was slow"} if good else line


def swapped(folder: Path) -> None:
    """Run one later than its turn, and write it where it belongs."""
    edit_registry(folder, lambda lines: [lines[0], *lines[3:5], *lines[1:3], *lines[5:]])


def reported(folder: Path) -> None:
    rows = [{"folder": str(run.relative_to(folder)), "time_to_target": 0.001} for run in run_folders(folder)]
    (folder / "report.json").write_text(json.dumps({"runs": rows}))


def left_out(folder: Path) -> None:
    (folder / "runs.csv").write_text("folder,status,time_to_target\nruns/other/2w-seed1,finished,1.0\n")


def eight_workers(folder: Path) -> None:
    edit_json(folder / RUN / "system.json", lambda system: system["world"].update(size=8))


SEALED: list[tuple[str, str, Callable[[Path], None]]] = [
    ("2", "60 samples of 'validation'", valued("sl_evaluation", count=60)),
    ("2", "no eval_gap line confirms", valued("sl_evaluation", metric=0.01234)),
    ("2", "has no test metric", logged("sl_test_gap", lambda line: None)),
    ("4", "race.json says lab", planned(place={"kind": "lab", "detail": "2@100mbit"})),
    ("4", "with 2 workers, and ran on 8", eight_workers),
    ("5", "has no run_stop", logged("run_stop", lambda line: None)),
    ("5", "and the log has 64", valued("sl_evaluation", samples=64)),
    ("5", "steps and bytes only grow", valued("sl_evaluation", bytes_wire=1e9, bytes_logical=-1)),
    ("6", "0.001 s to the target", logged("sl_time_to_target_seconds", lambda line: {**line, "value": 0.001})),
    ("6", "has no sl_phases", logged("sl_phases", lambda line: None)),
    ("6", "% of", valued("sl_phases", exposed=0.0)),
    ("6", "for data", logged("sl_data_wait_seconds", lambda line: {**line, "value": 1.0})),
    ("6", "says 100.000 s", registered(lambda line: {**line, "seconds": 100.0} if "seconds" in line else line)),
    ("8", "codec is 'quantize(8)'", configured(codec="quantize(8)")),
    ("8", "momentum is 0.5", configured(momentum=0.5)),
    ("9", "differ in sha256", configured(sha256="00")),
    ("9", "names the workload './mine.py'", planned(workload="./mine.py")),
    ("9", "train_samples is 255", logged("train_samples", lambda line: {**line, "value": 255})),
    ("10", "no evaluation follows", planned(evaluations_after=0)),
    ("10", "evaluated every 4 steps", logged("sl_evaluate_every", lambda line: {**line, "value": 4})),
    (
        "10",
        "does not begin with the plan",
        lambda folder: edit_registry(folder, lambda lines: [*lines[1:], lines[0]]),
    ),
    ("11", "used 16 samples", configured(batch=16, global_batch=64)),
    ("11", "steps of 63 samples", logged("global_batch_size", lambda line: {**line, "value": 63})),
    ("12", "2 seeds", planned(seeds=[1, 2])),
    ("12", "skipped without a reason", planned(skipped={"ddp": " "})),
    ("12", "ends with success", registered(ended_badly)),
    ("12", "the order of race.json", swapped),
    ("12", "its log has inf", reported),
    ("12", "leaves out runs/", left_out),
]


@pytest.mark.parametrize(("rule", "words", "plant"), SEALED, ids=[f"{rule}-{words}" for rule, words, _ in SEALED])
def test_each_part_of_a_rule_is_seen(plain: Path, rule: str, words: str, plant: Callable[[Path], None]) -> None:
    plant(plain)
    reseal(plain)
    broken, told = linted(plain)
    assert rule in broken
    assert words in told


def edit(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data.replace(b"1", b"2", 1))

    return change


def overwritten(folder: Path) -> None:
    (folder / "splits/test.u64").write_bytes(b"12345678" * 64)


def stray(folder: Path) -> None:
    shutil.copytree(folder / RUN, folder / "runs/quantize-4/2w-seed7")


UNSEALED: list[tuple[str, Callable[[Path], None]]] = [
    (f"{RUN}/log.jsonl was edited", edit(f"{RUN}/log.jsonl")),
    (f"{RUN}/config.json was edited", edit(f"{RUN}/config.json")),
    (f"{RUN}/log.jsonl is missing", lambda folder: (folder / RUN / "log.jsonl").unlink()),
    ("race.json was changed", edit("race.json")),
    ("system.json was edited", edit("system.json")),
    ("splits/test.u64 was edited", overwritten),
    ("splits/train.u64 is missing", lambda folder: (folder / "splits/train.u64").unlink()),
    ("line 3 does not continue", lambda folder: edit_registry(folder, lambda lines: [*lines[:2], *lines[3:]])),
    ("2w-seed7 is not in the registry", stray),
    ("registry.jsonl is missing", lambda folder: (folder / "registry.jsonl").unlink()),
]


@pytest.mark.parametrize(("words", "change"), UNSEALED, ids=[words for words, _ in UNSEALED])
def test_files_that_do_not_fit_are_named(plain: Path, words: str, change: Callable[[Path], None]) -> None:
    change(plain)
    broken, told = linted(plain)
    assert "0" in broken
    assert words in told


def test_figures_with_kind_and_formula_may_stay(plain: Path) -> None:
    explained = {"dtype": "float32", "formula": "2 × parameters × samples"}

    def point(line: Line) -> Line:
        return {**line, "key": "sl_gflops", "value": 1.5, "metadata": explained}

    logged("sl_training_seconds", point)(plain)
    (plain / "report.json").write_text(json.dumps({"speed": {"gflops": 1.5, **explained}, "text": "3 stops, 5 ops"}))
    reseal(plain)
    assert linted(plain)[0] == set()
    (plain / "report.html").write_text("<style>/* 3 gflops */</style><p>It reaches <b>12</b> TFLOP/s.</p>")
    assert linted(plain)[0] == {"7"}
    (plain / "report.html").unlink()
    (plain / "report.json").write_text(json.dumps({"text": "reaches 12 TFLOP/s"}))
    assert linted(plain)[0] == {"7"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_start", "soon"),
        ("sl_evaluation", None),
        ("sl_evaluation", {"elapsed": "x"}),
        ("sl_phases", []),
        ("eval_stop", -1),
        ("seed", {}),
        ("run_stop", None),
    ],
)
def test_nonsense_is_a_finding_and_no_crash(plain: Path, key: str, value: Any) -> None:
    logged(key, lambda line: {**line, "value": value, "seconds": value, "metadata": value})(plain)
    reseal(plain)
    assert linted(plain)[0]


@pytest.mark.parametrize(("shared", "severity"), [(1, "warning"), (3, "violation")])
def test_a_few_equal_samples_are_told(races: Races, tmp_path: Path, shared: int, severity: str) -> None:
    folder = races.copy("digits", tmp_path)
    digests = {name: np.fromfile(folder / f"splits/{name}.u64", dtype="<u8") for name in ("train", "test")}
    digests["test"][:shared] = digests["train"][:shared]
    digests["test"].tofile(folder / "splits/test.u64")
    case = LintCase(read_race(folder))
    case.__dict__["data"] = None  # data that is really so: it is not compared with what this machine has
    notes = list(check_splits(case))
    assert [(note.severity, f"train and test share {shared} samples" in note.evidence) for note in notes] == [
        (severity, True)
    ]


def test_tuning_chosen_against_the_logs(races: Races, tmp_path: Path) -> None:
    folder = races.copy("tuned", tmp_path)

    def other(line: Line) -> Line:
        return {**line, "learning_rate": 0.06, "factor": 0.3} if line["event"] == "tuned" else line

    registered(other)(folder)
    reseal(folder)
    broken, told = linted(folder)
    assert "3" in broken
    assert "races with rate 0.06" in told


def test_a_tuned_rate_without_tuning_and_an_unequal_budget(races: Races, tmp_path: Path) -> None:
    folder = races.copy("tuned", tmp_path)
    drop_run(folder, "tuning/allreduce/rate-times-1")
    planned(seeds=[1, 2, 3, 9])(folder)
    reseal(folder)
    told = linted(folder)[1]
    assert "allreduce has 1 of 2 tuning runs" in told
    assert "seed 9, which is also raced" in told


def test_sizes_without_a_word_on_scaling(races: Races, tmp_path: Path) -> None:
    folder = races.copy("scaled", tmp_path)
    planned(scaling=None)(folder)
    reseal(folder)
    assert linted(folder)[0] == {"11"}


def test_sizes_without_one_worker(races: Races, tmp_path: Path) -> None:
    folder = races.copy("scaled", tmp_path)
    for run in run_folders(folder, "runs/*/1w-*"):
        drop_run(folder, run.relative_to(folder).as_posix())
    reseal(folder)
    broken, told = linted(folder)
    assert broken == {"1", "12"}
    assert "allreduce, quantize(4) has no run on one worker" in told


def test_a_run_alone(tmp_path: Path) -> None:
    settings = Settings(epochs=3, batch=32, evaluate_every=4, checkpoint_every=0)
    with init() as world:
        train(build("logistic(features=8, samples=256)"), settings, world=world, folder=tmp_path / "run")
    states = {verdict.rule.number: verdict.state for verdict in review_run(tmp_path / "run")}
    assert states == {number: "not checkable" if number in (1, 3, 4, 12) else "holds" for number in range(13)}
    edit_log(tmp_path / "run", lambda lines: [ln for ln in lines if ln.get("metadata", {}).get("step") != 4])
    assert {one.rule.number for one in review_run(tmp_path / "run") if one.state == "broken"} == {10}
    with pytest.raises(SpecError, match=r"neither race\.json nor log\.jsonl"):
        review_run(tmp_path)


def test_the_command(races: Races, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = str(races.honest("plain"))
    assert main(["lint", honest]) == 0
    assert "no rule is broken; 1 warnings" in capsys.readouterr().out
    edit(f"{RUN}/log.jsonl")(plain)
    assert main(["lint", "--json", honest, str(plain)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {one["state"] for one in found[honest]} == {"holds", "nothing to check"}
    record = found[str(plain)][0]
    assert record["state"] == "broken"
    assert f"{RUN}/log.jsonl" in record["findings"][0]["evidence"]
    assert record["findings"][0]["fix"]
    assert main(["lint", "--rules"]) == 0
    assert capsys.readouterr().out.count("holds if") == 12


def test_excluding_needs_a_reason(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exclude = ["lint", "--exclude", RUN, str(plain)]
    assert main(exclude) == 2
    assert main([*exclude, "--why", " "]) == 2
    assert "runs/quantize-4/2w-seed1 is not excluded without a reason" in capsys.readouterr().err
    assert main(["lint", "--exclude", "runs/none/2w-seed1", "--why", "so", str(plain)]) == 2
    assert main([*exclude, "--why", "the disk was full"]) == 0
    broken, told = linted(plain)
    assert broken == set()
    assert "is excluded: the disk was full" in told
    RunRegistry(plain / "registry.jsonl").append("excluded", run="runs/allreduce/2w-seed1", reason="")
    broken, told = linted(plain)
    assert "runs/allreduce/2w-seed1 is excluded without a reason" in told
    assert broken == {"12"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name the folder"),
        (["nowhere"], "is not a folder"),
        (["empty"], "neither race.json nor log.jsonl"),
        (["odd"], "is not a race's plan"),
        (["old"], "has format 0"),
        (["empty", "--why", "so"], "--why is the reason of --exclude"),
        (["empty", "odd", "--exclude", "a"], "--exclude is about one race"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("empty", None), ("odd", '{"format": 1, "seeds": 3}'), ("old", '{"format": 0}')):
        Path(name).mkdir()
        if text is not None:
            Path(name, "race.json").write_text(text)
    assert main(["lint", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_registry_of_nonsense_is_named(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plain / "registry.jsonl").write_text('{"event": "begun", "run": "a"}\n{"event": "ended", "run": "a"}\n')
    assert main(["lint", str(plain)]) in (1, 2)
    told_all = capsys.readouterr()
    assert "registry.jsonl" in told_all.err + told_all.out
