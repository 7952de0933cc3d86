"""The race on the simulator: plan, registry, entries, and how runs start, fail and continue."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from syncline.bench.race.entries import all_entries, default_entries, read_entries
from syncline.bench.race.plan import RaceEntry, RacePlan, RateTuning
from syncline.bench.race.progress import RaceProgress
from syncline.bench.race.registry import RunRegistry, lock_registry, read_registry, read_splits
from syncline.bench.race.runner import (
    RaceRunner,
    RunResult,
    SimulatedRunner,
    expected_seconds,
    parse_network,
    start_race,
)
from syncline.bench.runlog import read_race
from syncline.errors import IncompatibleError, ProtocolError, SpecError, WorldError
from syncline.training.run_folder import RunFolder
from syncline.training.worker import TrainPlan
from syncline.workloads import build
from tests.bench.racing import NETWORK, PLAN, WORKLOAD, Silent, make_race

pytestmark = pytest.mark.xdist_group("race")  # they share a fixture that takes long


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished race of three entries and two seeds. To be read alone."""
    return make_race(tmp_path_factory.mktemp("race") / "race", seeds=(1, 2))


@pytest.fixture
def copy(raced: Path, tmp_path: Path) -> Path:
    shutil.copytree(raced, tmp_path / "race")
    return tmp_path / "race"


# The registry.


def three_lines(path: Path) -> list[str]:
    registry = RunRegistry(path)
    for number in range(3):
        registry.append("begun", run=f"runs/a/{number}")
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: [lines[0], lines[2]], "line 2 does not continue the line before it"),
        (lambda lines: [lines[1], lines[0], lines[2]], "line 1 does not continue"),
        (lambda lines: [lines[0], lines[1].replace("runs/a/1", "runs/a/9"), lines[2]], "line 2 was changed"),
        (lambda lines: [lines[0], "{\n", lines[2]], "line 2 is not JSON"),
        (lambda lines: [lines[0], "7\n", lines[2]], "line 2 is not a JSON object"),
    ],
)
def test_the_chain_shows_what_was_done_to_it(
    tmp_path: Path, change: Callable[[list[str]], list[str]], told: str
) -> None:
    path = tmp_path / "registry.jsonl"
    lines = three_lines(path)
    assert read_registry(path)[1] == []
    path.write_text("".join(change(lines)))
    assert told in " ".join(read_registry(path)[1])


def test_a_registry_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "registry.jsonl"
    three_lines(path)
    three_lines(path)
    lines, problems = read_registry(path)
    assert (len(lines), problems) == (6, [])


def test_a_line_that_a_crash_cut_off_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "registry.jsonl"
    whole = "".join(three_lines(path))
    path.write_text(whole + whole.splitlines()[-1][:40])
    RunRegistry(path)
    assert path.read_text() == whole


def test_one_race_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "registry.jsonl"
    path.touch()
    with lock_registry(path), pytest.raises(IncompatibleError, match="another race"), lock_registry(path):
        pass
    with lock_registry(path):
        pass


# The plan.


def test_a_plan_reads_back() -> None:
    tuning = RateTuning(factors=(0.5, 2.0), epochs=2, seed=9)
    plan = replace(PLAN, tuning=tuning, scaling="weak", scaling_workers=(1, 2), skipped={"other": "not here"})
    assert RacePlan.from_json(plan.as_json()) == plan


PLANS = ["", "[]", "7", '{"format": 99}', '{"format": 1}', '{"format": 1, "entries": 3}', '{"format": ' + "[" * 9999]


@pytest.mark.parametrize("text", PLANS, ids=lambda text: text[:20])
def test_what_is_no_plan_is_named(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"somewhere/race\.json"):
        RacePlan.from_json(text, "somewhere/race.json")


def test_every_seed_sees_every_entry_in_another_order() -> None:
    plan = replace(PLAN, seeds=(1, 2, 3, 4))
    turns = [[run.entry.name for run in plan.runs() if run.seed == seed] for seed in plan.seeds]
    assert all(sorted(turn) == sorted(entry.name for entry in plan.entries) for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1
    assert plan.runs() == plan.runs()


def test_weak_and_strong_keep_what_they_say() -> None:
    weak, strong = replace(PLAN, scaling="weak", scaling_workers=(1,)), replace(PLAN, scaling="strong")
    strong = replace(strong, scaling_workers=(1,))
    for kind, plan, batches in (("weak", weak, {1: 32, 2: 32}), ("strong", strong, {1: 64, 2: 32})):
        found = {run.workers: plan.settings(run).batch for run in plan.runs()}
        assert found == batches
        every = {run.workers: plan.settings(run).evaluate_every for run in plan.runs()}
        assert every == ({1: 8, 2: 4} if kind == "weak" else {1: 4, 2: 4}), "as many samples between evaluations"


def test_strong_scaling_is_the_same_training_on_any_number(tmp_path: Path) -> None:
    entry = RaceEntry(name="allreduce", learning_rate=0.5, scaling="sqrt", rate_from="preset")
    plan = replace(PLAN, entries=(entry,), scaling="strong", workers=3, scaling_workers=(1, 2), batch=15)
    found = [plan.settings(run) for run in plan.runs()]
    assert {one.global_batch for one in found} == {45}
    assert {one.rate(workers=7) for one in found} == {0.5 * 3**0.5}


def test_a_long_name_has_a_folder() -> None:
    first, second = RaceEntry(name="a" * 300), RaceEntry(name="a" * 301)
    assert len(first.slug) < 100
    assert first.slug != second.slug


def test_entries_need_folders_of_their_own() -> None:
    with pytest.raises(SpecError, match="another name"):
        replace(PLAN, entries=(RaceEntry(name="a b"), RaceEntry(name="a-b")))


# The field.


def test_the_default_field_has_all_kinds() -> None:
    field = all_entries(build("digits"))
    entries = {entry.name: entry for entry in field.entries}
    assert {"allreduce", "allreduce(delay=1)", "quantize(4)", "powersgd(2)", "ddp"} <= set(entries)
    own = next(entry for name, entry in entries.items() if name.startswith("topk"))
    assert own.momentum == 0.0, "it brings its own"
    assert entries["allreduce"].momentum is None
    assert next(name for name, entry in entries.items() if entry.baseline) == "ddp"
    simulated = all_entries(build("digits"), simulated=True)
    assert not any(entry.baseline for entry in simulated.entries)
    assert "real processes" in simulated.skipped["ddp"]


def test_the_short_field_has_one_of_each_family() -> None:
    """Five on processes, twelve on the simulator; all of them are in the field of all kinds, and none needs MPI."""
    workload = build("digits")
    short = [entry.name for entry in default_entries(workload).entries]
    assert short[0] == "allreduce"
    assert len(short) == 5
    simulated = default_entries(workload, simulated=True).entries
    assert [entry.name for entry in simulated][:5] == short
    assert len(simulated) == 12
    assert not any(entry.engine for entry in all_entries(workload, simulated=True).entries)


def test_the_expected_time_grows_with_runs_and_data() -> None:
    workload = build("digits")
    one = expected_seconds(replace(PLAN, seconds_a_sample=1e-3), workload)
    assert one > 0
    assert expected_seconds(replace(PLAN, seconds_a_sample=1e-3, seeds=(*PLAN.seeds, 99)), workload) > one
    assert expected_seconds(replace(PLAN, seconds_a_sample=2e-3), workload) > one


def entries_of(tmp_path: Path, text: str, simulated: bool = False) -> tuple[RaceEntry, ...]:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_entries(path, build("digits"), simulated).entries


def test_entries_from_a_file(tmp_path: Path) -> None:
    found = entries_of(
        tmp_path,
        """
        [[entry]]
        codec = "topk(0.01)|quantize(4)"
        [[entry]]
        name = "slower"
        strategy = "allreduce(delay=1)"
        learning_rate = 0.01
        [[entry]]
        strategy = "ddp(hook='fp16')"
        """,
    )
    assert [entry.name for entry in found] == ["topk(0.01)|quantize(4)", "slower", "ddp(hook='fp16')"]
    assert [entry.rate_from for entry in found] == ["preset", "given", "preset"]
    assert (found[0].learning_rate, found[1].learning_rate, found[1].scaling) == (0.1, 0.01, "none")
    assert [entry.baseline for entry in found] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("entry = [", "is not TOML"),
        ("", "has no entries"),
        pytest.param(f"entry = {'[' * 5000}", "is not TOML: maximum recursion depth", id="deep"),
        pytest.param(f"[[entry]]\nlearning_rate = {'1' * 5000}", "is not TOML: Exceeds the limit", id="digits"),
        pytest.param(f"[[entry]]\nlearning_rate = {'1' * 4000}", "bits is not a number that fits", id="large"),
        pytest.param(f"[[entry]]\nname = {'[' * 200 + ']' * 200}", "[[[… is not a text", id="nested"),
        ("entry = 3", "has no entries"),
        ("[[entry]]\nstrategy = 'allreduce'\n[more]\n", "unknown table 'more'"),
        ("[[entry]]\nstrategie = 'allreduce'", "did you mean 'strategy'"),
        ("[[entry]]\nstrategy = 'alreduce'", "did you mean 'allreduce'"),
        ("[[entry]]\ncodec = 'topc(0.1)'", "did you mean 'topk'"),
        ("[[entry]]\nstrategy = 7", "strategy = 7 is not a text"),
        ("[[entry]]\nlearning_rate = 'fast'", "is not a number"),
        ("[[entry]]\nlearning_rate = nan", "is not a number that fits"),
        ("[[entry]]\nstrategy = 'ddp'\ncodec = 'quantize(4)'", "takes no codec"),
        ("[[entry]]\ncollective = 'gather'", "there is no codec"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises((SpecError, IncompatibleError)) as error:
        entries_of(tmp_path, text)
    assert told in str(error.value)
    assert "mine.toml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read entries from .*none\.toml"):
        read_entries(tmp_path / "none.toml", build("digits"))


def test_baselines_are_not_simulated(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="real processes"):
        entries_of(tmp_path, "[[entry]]\nstrategy = 'ddp'", simulated=True)


def test_networks() -> None:
    assert parse_network("1gbit").bandwidth == 125e6
    assert parse_network("network(latency=1e-3, bandwidth=1e6)").latency == 1e-3
    for text in ("fast", "open", "net(1)"):
        with pytest.raises(SpecError):
            parse_network(text)


# Running.


def test_a_race_is_the_same_twice(raced: Path, tmp_path: Path) -> None:
    again = read_race(make_race(tmp_path / "again", seeds=(1, 2)))
    first = read_race(raced)
    assert first.problems == []
    assert [run.folder for run in first.runs] == [run.folder for run in again.runs]
    for one, other in zip(first.runs, again.runs, strict=True):
        assert one.evaluations == other.evaluations
        assert one.test == other.test
        assert one.evaluations


def test_seeds_are_paired_and_splits_are_kept(raced: Path) -> None:
    race = read_race(raced)
    for seed in (1, 2):
        dense, coded = (run for name in ("allreduce", "quantize(4)") for run in race.of(name) if run.seed == seed)
        assert dense.value("seed") == coded.value("seed") == seed
        assert dense.config["sha256"] == coded.config["sha256"]
    splits = read_splits(raced)
    assert {name: len(found) for name, found in splits.items()} == {"train": 256, "validation": 64, "test": 64}
    assert not splits["train"] & splits["test"]


def test_the_metric_is_known_after_the_hit(raced: Path) -> None:
    race = read_race(raced)
    run = race.of("allreduce")[0]
    hit = run.hit(race.plan.target, higher_is_better=False)
    assert hit is not None
    later = [one for one in run.evaluations if one.step > hit.step]
    assert len(later) == race.plan.evaluations_after
    assert run.value("sl_time_to_target_seconds") == hit.elapsed


def test_phases_fill_the_clock(raced: Path) -> None:
    for run in read_race(raced).runs:
        assert run.elapsed is not None
        assert sum(run.phases.values()) == pytest.approx(run.elapsed, rel=0.01)
        for one in run.evaluations:
            assert sum(one.phases.values()) == pytest.approx(one.elapsed, rel=0.01)
    dense, coded = (read_race(raced).of(name)[0] for name in ("allreduce", "quantize(4)"))
    assert dense.phases["exposed"] > coded.phases["exposed"] > 0
    assert dense.evaluations[0].bytes_wire > coded.evaluations[0].bytes_wire > 0


def test_predictions_are_near(raced: Path) -> None:
    """On the simulator the model of the network is the network."""
    run = read_race(raced).of("allreduce")[0]
    measured = run.value("sl_comm_seconds") / run.evaluations[-1].step
    assert run.config["predicted"]["communication"] == pytest.approx(measured, rel=0.5)


class ScriptedRunner(SimulatedRunner):
    """Returns a given result, or raises a given error, instead of some runs."""

    def __init__(self, results: dict[str, RunResult | type[BaseException]]) -> None:
        super().__init__(NETWORK)
        self.results = results
        self.ran: list[str] = []

    def run(self, plan: TrainPlan, workers: int, tick: Callable[[], str | None], mpi: bool = False) -> RunResult:
        name = "/".join(Path(plan.folder).parts[-2:])
        self.ran.append(name)
        result = self.results.get(name)
        if isinstance(result, RunResult):
            return result
        if result is not None:
            raise result
        return super().run(plan, workers, tick)


def test_ctrl_c_keeps_what_is_done_and_the_race_goes_on(tmp_path: Path, raced: Path) -> None:
    plan = replace(PLAN, seeds=(1, 2))
    start_race(tmp_path / "race", plan, build(WORKLOAD))
    third = plan.runs()[2].folder.removeprefix("runs/")
    stopped = ScriptedRunner({third: KeyboardInterrupt})
    assert not RaceRunner(tmp_path / "race", stopped, Silent()).run()
    race = read_race(tmp_path / "race")
    assert [run.status for run in race.runs] == ["finished", "finished", "interrupted"]
    assert len(race.remaining()) == 4
    after = ScriptedRunner({})
    assert RaceRunner(tmp_path / "race", after, Silent()).run()
    assert after.ran[0] == f"{third}.2", "the attempt that was stopped keeps its folder"
    assert len(after.ran) == 4
    race = read_race(tmp_path / "race")
    assert race.problems == []
    assert race.remaining() == []
    first = {(run.entry, run.seed): run.evaluations for run in read_race(raced).runs}
    assert {(run.entry, run.seed): run.evaluations for run in race.runs if run.status == "finished"} == first


def test_a_race_whose_process_was_killed_goes_on(tmp_path: Path) -> None:
    plan = replace(PLAN, seeds=(1,), entries=PLAN.entries[:1])
    start_race(tmp_path / "race", plan, build(WORKLOAD))
    dead = RunRegistry(tmp_path / "race" / "registry.jsonl")
    facts = {"kind": "race", "entry": "allreduce", "workers": 2, "seed": 1, "factor": None}
    dead.append("begun", run="runs/allreduce/2w-seed1", **facts)
    (tmp_path / "race/runs/allreduce/2w-seed1").mkdir(parents=True)
    assert RaceRunner(tmp_path / "race", SimulatedRunner(NETWORK), Silent()).run()
    race = read_race(tmp_path / "race")
    assert [(run.folder, run.status) for run in race.runs] == [
        ("runs/allreduce/2w-seed1", "interrupted"),
        ("runs/allreduce/2w-seed1.2", "finished"),
    ]
    assert race.problems == []


def test_who_fails_stays_in_the_table(tmp_path: Path) -> None:
    plan = replace(PLAN, seeds=(1,))
    start_race(tmp_path / "race", plan, build(WORKLOAD))
    results = {
        "allreduce/2w-seed1": RunResult("failed", "RuntimeError: boom"),
        "quantize-4/2w-seed1": RunResult("hung", "late"),
    }
    assert RaceRunner(tmp_path / "race", ScriptedRunner(dict(results)), Silent()).run()
    race = read_race(tmp_path / "race")
    assert {run.entry: (run.status, run.reason) for run in race.runs} == {
        "allreduce": ("failed", "RuntimeError: boom"),
        "quantize(4)": ("hung", "late"),
        "allreduce(delay=1)": ("finished", None),
    }
    assert race.problems == []
    assert race.remaining() == [], "a failed run is a result"


def test_a_rate_that_explodes_has_diverged(tmp_path: Path) -> None:
    entries = (RaceEntry(name="wild", learning_rate=1e30, rate_from="given"),)
    race = read_race(make_race(tmp_path / "race", entries=entries, seeds=(1,)))
    (run,) = race.runs
    assert run.status == "diverged"
    assert "NaN or Inf" in (run.reason or "")


def test_tuning_gives_every_entry_the_same_and_takes_the_best(tmp_path: Path) -> None:
    tuning = RateTuning(factors=(0.1, 1.0), epochs=2, seed=77)
    entries = (PLAN.entries[0], PLAN.entries[2])
    race = read_race(make_race(tmp_path / "race", tuning=tuning, entries=entries, seeds=(1,)))
    assert race.problems == []
    tried = {(run.entry, run.factor) for run in race.of_kind("tuning")}
    assert tried == {(entry.name, factor) for entry in entries for factor in tuning.factors}
    for run in race.of_kind("tuning"):
        assert run.value("sl_learning_rate_of_one") == pytest.approx(0.5 * (run.factor or 0))
        assert run.value("seed") == 77
    assert race.rates == {"allreduce": 0.5, "quantize(4)": 0.5}, "a tenth is too little for two epochs"
    assert all(run.value("sl_learning_rate_of_one") == 0.5 for run in race.of("allreduce"))
    assert {entry.rate_from for entry in race.entries} == {"tuned"}


def test_a_rate_that_diverged_is_not_chosen(tmp_path: Path) -> None:
    """It has evaluations, and one of them may be better than any other."""
    tuning = RateTuning(factors=(0.1, 1.0), epochs=1, seed=77)
    plan = replace(PLAN, tuning=tuning, entries=PLAN.entries[:1], seeds=(1,))
    start_race(tmp_path / "race", plan, build(WORKLOAD))

    class DivergesAtTheEnd(SimulatedRunner):
        def run(self, plan: TrainPlan, workers: int, tick: Callable[[], str | None], mpi: bool = False) -> RunResult:
            result = super().run(plan, workers, tick)
            return RunResult("diverged", "NaN at the end") if plan.folder.endswith("rate-times-1") else result

    assert RaceRunner(tmp_path / "race", DivergesAtTheEnd(NETWORK), Silent()).run()
    assert read_race(tmp_path / "race").rates == {"allreduce": pytest.approx(0.05)}


def test_a_runner_that_cannot_start_is_a_failed_run(tmp_path: Path) -> None:
    plan = replace(PLAN, entries=PLAN.entries[:1], seeds=(1,))
    start_race(tmp_path / "race", plan, build(WORKLOAD))
    results: dict[str, RunResult | type[BaseException]] = {"allreduce/2w-seed1": WorldError}
    assert RaceRunner(tmp_path / "race", ScriptedRunner(results), Silent()).run()
    assert [run.status for run in read_race(tmp_path / "race").runs] == ["failed"]


def test_a_race_without_its_registry_does_not_go_on(copy: Path) -> None:
    lines = (copy / "registry.jsonl").read_text().splitlines(keepends=True)
    (copy / "registry.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ProtocolError, match="does not begin with the plan"):
        RaceRunner(copy, SimulatedRunner(NETWORK), Silent()).run()
    (copy / "registry.jsonl").unlink()
    with pytest.raises(ProtocolError, match="is missing"):
        RaceRunner(copy, SimulatedRunner(NETWORK), Silent()).run()
    assert not (copy / "registry.jsonl").exists()


def test_scaling_points_are_runs_like_any_other(tmp_path: Path) -> None:
    race = read_race(
        make_race(tmp_path / "race", scaling="weak", scaling_workers=(1, 2), entries=PLAN.entries[:1], seeds=(1,))
    )
    assert {(run.kind, run.workers) for run in race.runs} == {("scaling", 1), ("race", 2)}
    alone = race.of("allreduce", "scaling")[0]
    assert alone.test is not None
    assert alone.evaluations[-1].bytes_wire == 0, "nobody to send to"


# Bad input.


def test_two_races_do_not_begin_in_one_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock(), pytest.raises(IncompatibleError, match="is in use by another job"):
        start_race(tmp_path, PLAN, build(WORKLOAD))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_race_is_not_begun_again(copy: Path) -> None:
    with pytest.raises(IncompatibleError, match="--resume"):
        start_race(copy, PLAN, build(WORKLOAD))


def test_a_folder_without_a_race(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no race\.json"):
        read_race(tmp_path)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_was_done_to_a_folder_is_named(copy: Path) -> None:
    run = "runs/allreduce/2w-seed1"
    edit(copy / run / "log.jsonl", '"key": "seed"', '"key": "sead"')
    (copy / "runs/quantize-4/2w-seed1/log.jsonl").unlink()
    shutil.copytree(copy / run, copy / "runs/allreduce/2w-seed9")
    edit(copy / "race.json", '"epochs": 12', '"epochs": 13')
    problems = "\n".join(read_race(copy).problems)
    for told in (
        f"{run}/log.jsonl was edited after the run",
        "runs/quantize-4/2w-seed1/log.jsonl is missing",
        "runs/allreduce/2w-seed9 is not in the registry",
        "race.json was changed after the race began",
    ):
        assert told in problems


def test_runs_of_other_code_are_named(copy: Path) -> None:
    config = copy / "runs/allreduce/2w-seed1/config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "code_digest": "0123456789abcdef"}))
    assert any("ran other code" in problem for problem in read_race(copy).problems)


def test_logs_that_cannot_be_read_are_no_end_of_the_report(copy: Path) -> None:
    (copy / "runs/allreduce/2w-seed1/log.jsonl").write_text("{}\nnonsense\n{}\n")
    (copy / "runs/allreduce/2w-seed2/config.json").write_text("[")
    (copy / "registry.jsonl").unlink()
    race = read_race(copy)
    assert any("registry.jsonl is missing" in problem for problem in race.problems)
    assert race.runs == []


# The view.


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_tells_the_race(tmp_path: Path, terminal: bool) -> None:
    plan = replace(PLAN, seeds=(1,))
    start_race(tmp_path / "race", plan, build(WORKLOAD))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100, color_system=None)
    with RaceProgress(read_race(tmp_path / "race"), console) as view:
        results: dict[str, RunResult | type[BaseException]] = {"quantize-4/2w-seed1": RunResult("failed", "boom")}
        assert RaceRunner(tmp_path / "race", ScriptedRunner(results), view).run()
    shown = screen.getvalue()
    assert "allreduce(delay=1)" in shown
    assert "failed" in shown
    assert ("seed 1" in shown) is True
    if not terminal:
        assert len(shown.splitlines()) == 3
        assert "target reached after" in shown
        assert "target not reached, best gap" in shown
        assert "left" in shown


def test_a_long_run_leaves_lines_where_no_table_rewrites_itself(tmp_path: Path) -> None:
    start_race(tmp_path / "race", PLAN, build(WORKLOAD))
    screen, seconds = io.StringIO(), [0.0]
    console = Console(file=screen, width=100, color_system=None)
    run = PLAN.runs()[0]
    with RaceProgress(read_race(tmp_path / "race"), console, clock=lambda: seconds[0]) as view:
        view.started(run, tmp_path / "race" / run.folder, 0, 9)
        for seconds[0] in (10.0, 31.0, 50.0, 62.0):
            view.tick()
    assert [line.split(", ")[-1] for line in screen.getvalue().splitlines()] == [
        "31.0 s; time left not known yet",
        "1:02; time left not known yet",
    ]


def test_a_simulation_without_end_counts_as_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.runtime.simulator.PROGRESS_EVERY_S", 1e-3)
    start_race(tmp_path / "race", replace(PLAN, limit=1e-6, seeds=(1,)), build(WORKLOAD))
    assert RaceRunner(tmp_path / "race", SimulatedRunner(NETWORK), Silent()).run()
    found = read_race(tmp_path / "race").runs
    assert {run.status for run in found} == {"hung"}
    assert found[0].reason is not None
    assert "(--limit)" in found[0].reason
