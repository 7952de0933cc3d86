"""What the live view reads: logs that grow, break and vanish, races that are under way."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import syncline as sl
from syncline.bench.live import newest_run, open_feed
from syncline.bench.live.run import HEAT_KINDS, MAX_HEAT_COLUMNS, MAX_SERIES_ROWS, HeatMap, Series
from syncline.bench.race.registry import RunRegistry
from syncline.bench.runlog import MAX_LINE_BYTES, LogTail, read_race
from syncline.errors import ProtocolError, SpecError
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.transports import Network
from syncline.workloads import build
from tests.bench.live_logs import GrowingRun
from tests.bench.racing import PLAN, make_race


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_race(tmp_path_factory.mktemp("live") / "race", seeds=(1,))


@pytest.fixture
def race(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "race"))


@pytest.fixture
def run(tmp_path: Path) -> GrowingRun:
    made = GrowingRun(tmp_path / "run")
    made.start()
    return made


# A file that grows


def test_only_new_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = LogTail(path)
    assert tail.read() == []
    assert not tail.gone
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with open(path, "a") as file:
        file.write('2}\n[3]\nno\n\n{"a": 4}\n')
    assert tail.read() == [{"a": 2}, {"a": 4}]
    assert tail.bad_lines == 2


def test_a_file_that_is_another_one_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = LogTail(path)
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail.read()
    path.write_text('{"b": 1}\n')
    assert tail.read() == [{"b": 1}]
    assert tail.restarted
    path.unlink()
    assert tail.read() == []
    assert tail.gone
    (tmp_path / "other").write_text('{"c": 1}\n' * 5)
    (tmp_path / "other").rename(path)
    assert tail.read() == [{"c": 1}] * 5
    assert tail.restarted
    assert not tail.gone


def test_a_cut_back_half_line_is_not_a_new_file(tmp_path: Path) -> None:
    """A resumed run takes away what a crash left of its last line."""
    path = tmp_path / "log.jsonl"
    tail = LogTail(path)
    path.write_text('{"a": 1}\n{"a": 2, "long')
    assert tail.read() == [{"a": 1}]
    with open(path, "r+") as file:
        file.truncate(9)
    with open(path, "a") as file:
        file.write('{"a": 3}\n')
    assert tail.read() == [{"a": 3}]
    assert not tail.restarted


def test_long_files_are_read_in_chunks_and_endless_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n' + "x" * 5 * MAX_LINE_BYTES + '\n{"a": 2}\n')
    tail = LogTail(path, chunk_bytes=2 * MAX_LINE_BYTES)
    found, more = [], True
    while more:
        found += tail.read()
        more = tail.more
    assert found == [{"a": 1}, {"a": 2}]
    assert tail.bad_lines == 1


# What stays in memory


@pytest.mark.parametrize("rows", [1, MAX_SERIES_ROWS - 1, MAX_SERIES_ROWS, 3 * MAX_SERIES_ROWS + 1, 100_000])
def test_a_series_stays_small_and_keeps_both_ends(rows: int) -> None:
    series = Series("step", "value")
    for step in range(rows):
        series.add([step, 2 * step])
    steps = series.columns()["step"]
    assert len(steps) <= MAX_SERIES_ROWS
    assert rows < MAX_SERIES_ROWS or len(steps) >= MAX_SERIES_ROWS // 2
    assert (steps[0], steps[-1]) == (0, rows - 1)
    assert series.columns()["value"] == [2 * step for step in steps if step is not None]
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1]) if a is not None and b is not None}
    assert len(gaps) <= 1
    assert len(series.columns(max_rows=50)["step"]) <= 51


def test_a_heat_map_merges_columns_and_keeps_the_seconds() -> None:
    heat = HeatMap()
    for number in range(5000):
        compute = [1.0, 3.0 if number % 2 else 5.0]
        told = {"compute": compute, "exposed": [3, 0], "codec": [0, 0], "data": [0, 0], "seconds": [4, 4]}
        assert heat.add({"step": 10 * (number + 1), "steps": 10, **told})
    found = heat.document("compute")
    columns = len(found["edges"]) - 1
    assert MAX_HEAT_COLUMNS / 2 <= columns <= MAX_HEAT_COLUMNS
    assert (found["edges"][0], found["edges"][-1]) == (0, 50_000)
    assert found["rows"][0] == [1.0] * columns
    assert set(found["rows"][1][:-1]) == {4.0}
    assert heat.straggler() == {"rank": 1, "times": 4.0}


def test_a_heat_map_of_many_ranks_shows_the_slowest_of_neighbours() -> None:
    heat = HeatMap()
    none = [0.0] * 1000
    compute = [1.0] * 1000
    compute[777] = 9.0
    for step in range(1, 300):
        told = {"compute": compute, "exposed": none, "codec": none, "data": none, "seconds": none}
        assert heat.add({"step": step, "steps": 1, **told})
    found = heat.document("compute")
    assert found["together"] == 4
    assert len(found["rows"]) == 250
    assert [row for row, values in enumerate(found["rows"]) if values[0] == 9.0] == [777 // 4]
    assert len(found["rows"]) * len(found["rows"][0]) <= 50_000


def ranks_line(values: list[float], **changes: Any) -> dict[str, Any]:
    return {"step": 1, "steps": 1, **dict.fromkeys(HEAT_KINDS, values), **changes}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"step": 1, "steps": 1},
        ranks_line([1.0], steps=0),
        ranks_line([1.0], step="x"),
        ranks_line([1.0], seconds=[1.0, 2.0]),
        ranks_line([1.0], seconds="no list"),
        ranks_line([]),
    ],
)
def test_a_line_about_ranks_that_is_not_one(told: dict[str, Any]) -> None:
    heat = HeatMap()
    assert not heat.add(told)
    assert heat.document("compute")["rows"] == []


# A training


def test_a_training_is_followed(run: GrowingRun) -> None:
    feed = open_feed(run.folder)
    state = feed.state()
    assert (state["kind"], state["status"], state["workload"], state["target"]) == (
        "training",
        "running",
        "digits",
        0.9,
    )
    assert (state["done"], state["total"]) == (0, 1000)
    before = state["runs"][0]["version"]
    run.evaluation(100, 0.5)
    run.speeds(100)
    run.ranks(100, [0.1, 0.4])
    state = feed.state()
    row = state["runs"][0]
    assert row["version"] > before
    assert (row["step"], row["best"], row["hit"]) == (100, 0.5, None)
    assert state["left"] is not None
    assert feed.curves([0])["runs"]["0"]["metric"] == [0.5]
    detail = feed.detail(0, "exposed")
    assert detail is not None
    assert detail["speeds"]["exposed"] == [0.25]
    assert detail["speeds"]["bytes"] == [2e6]
    assert detail["heat"]["rows"] == [[0.3], [0.0]]
    assert detail["straggler"] == {"rank": 1, "times": 4.0}
    (limit,) = detail["limits"]
    assert "a straggler limits it: all wait for rank 1, 4 times as slow: 300 ms of 400 ms a step (75%)" in limit
    run.evaluation(200, 0.95)
    run.evaluation(300, 0.8)
    run.stop(stopped_by="target", step=300)
    state = feed.state()
    assert (state["status"], state["runs"][0]["hit"], state["runs"][0]["best"]) == ("finished", 20.0, 0.95)
    assert feed.curves([0])["runs"]["0"]["bytes"] == [100_000, 200_000, 300_000]


def test_numbers_that_are_none_stay_out_of_json(run: GrowingRun) -> None:
    run.evaluation(10, "nan")
    run.evaluation(20, float("inf"))
    run.evaluation(30, 0.3)
    run.speeds(30, loss="nan")
    run.ranks(30, [float("nan"), 1.0])
    feed = open_feed(run.folder)
    text = json.dumps([feed.state(), feed.curves([0]), feed.detail(0, "compute")], allow_nan=False)
    assert '"metric": [null, null, 0.3]' in text
    assert feed.state()["runs"][0]["best"] == 0.3


@pytest.mark.parametrize(
    ("metadata", "status", "reason"),
    [
        ({"status": "success", "stopped_by": "epochs"}, "finished", None),
        ({"status": "aborted", "stopped_by": "signal"}, "stopped", "stopped by the user"),
        ({"status": "aborted", "error": "DivergedError: NaN on rank 1"}, "failed", "DivergedError: NaN on rank 1"),
    ],
)
def test_how_a_training_ended(run: GrowingRun, metadata: dict[str, Any], status: str, reason: str | None) -> None:
    run.stop(**metadata)
    state = open_feed(run.folder).state()
    assert (state["status"], state["reason"]) == (status, reason)


def test_a_resumed_training_goes_back_to_its_checkpoint(run: GrowingRun) -> None:
    for step, metric in ((100, 0.5), (200, 0.6), (300, 0.95)):
        run.evaluation(step, metric)
        run.speeds(step)
        run.ranks(step, [1.0, 1.0])
    run.stop("aborted", stopped_by="signal")
    feed = open_feed(run.folder)
    assert feed.state()["runs"][0]["hit"] == 30.0
    run.seconds = 5.0  # another process has another clock
    run.line("sl_resumed", 200)
    run.line("run_start")
    state = feed.state()
    assert (state["status"], state["runs"][0]["best"], state["runs"][0]["hit"]) == ("running", 0.6, None)
    run.evaluation(300, 0.7)
    run.speeds(300)
    feed.state()
    assert feed.curves([0])["runs"]["0"]["step"] == [100, 200, 300]
    detail = feed.detail(0, "compute")
    assert detail is not None
    assert detail["speeds"]["step"] == [100, 200, 300]
    assert detail["speeds"]["elapsed"] == sorted(detail["speeds"]["elapsed"])
    assert detail["heat"]["edges"][-1] == 200


def test_a_log_that_is_gone_or_damaged_is_told(run: GrowingRun) -> None:
    run.evaluation(100, 0.5)
    run.raw("not JSON\n")
    run.line("sl_evaluation", "no table", step=100)
    feed = open_feed(run.folder)
    assert feed.state()["problems"] == ["run/log.jsonl: 2 lines cannot be read and are left out"]
    run.log.unlink()
    state = feed.state()
    assert state["problems"][0].startswith("run/log.jsonl was removed")
    assert state["runs"][0]["best"] == 0.5


def test_a_log_that_was_written_anew_shows_the_new_run_alone(run: GrowingRun) -> None:
    run.evaluation(100, 0.99)
    feed = open_feed(run.folder)
    before = feed.state()["runs"][0]["version"]
    run.log.unlink()
    run.start()
    run.evaluation(50, 0.1)
    row = feed.state()["runs"][0]
    assert row["version"] > before
    assert (row["step"], row["best"], row["hit"]) == (50, 0.1, None)
    assert feed.curves([0])["runs"]["0"]["metric"] == [0.1]


def test_a_slow_rank_of_a_real_training_is_named(tmp_path: Path) -> None:
    workload = build("logistic(features=8, samples=256)")
    how = Settings(epochs=2, batch=8, learning_rate=0.5, collective="ring")

    def train_it(world: sl.World) -> Any:
        return train(workload, how, folder=tmp_path / "run", stop=lambda: False, seconds_a_sample=0.02)

    sl.simulate(train_it, ranks=3, network=Network(latency=1e-4, bandwidth=1.25e6, slow={1: 4}))
    feed = open_feed(tmp_path / "run")
    state = feed.state()
    assert (state["status"], state["metric"], state["higher"], state["workers"]) == ("finished", "gap", False, 3)
    assert state["runs"][0]["steps"] == state["runs"][0]["step"]
    detail = feed.detail(0, "compute")
    assert detail is not None
    assert detail["straggler"]["rank"] == 1
    assert detail["straggler"]["times"] == pytest.approx(4, rel=0.05)
    assert len(detail["heat"]["rows"]) == 3
    assert all(share is not None and share > 0 for share in detail["speeds"]["exposed"])


# A race


def test_a_finished_race(race: Path) -> None:
    feed = open_feed(race)
    state = feed.state()
    assert (state["kind"], state["status"], state["done"], state["total"]) == ("race", "finished", 3, 3)
    assert state["entries"] == [entry.name for entry in PLAN.entries]
    assert (state["left"], state["quiet"], state["problems"]) == (None, None, [])
    assert {(row["entry"], row["seed"]) for row in state["runs"]} == {(entry.name, 1) for entry in PLAN.entries}
    curves = feed.curves([row["id"] for row in state["runs"]])["runs"]
    found = read_race(race).runs
    for row in state["runs"]:
        assert row["status"] == "finished"
        assert curves[str(row["id"])]["metric"][-1] == row["last"]
        run = next(run for run in found if (run.entry, run.seed) == (row["entry"], row["seed"]))
        hit = run.hit(PLAN.target, PLAN.higher_is_better)
        assert row["hit"] == (None if hit is None else pytest.approx(hit.elapsed, rel=1e-5))
        assert row["test"] == pytest.approx(run.test, rel=1e-5)
    assert any(row["hit"] is not None for row in state["runs"])


def test_a_long_race_is_read_in_several_answers(race: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(race / "runs" / "quantize-4")  # one without a log is no reason to read for ever
    monkeypatch.setattr("syncline.bench.live.feed.MAX_READING_S", -1.0)
    feed = open_feed(race)
    left: list[int] = []
    while not left or left[-1]:
        state = feed.state()
        left.append(sum(row["unread"] for row in state["runs"]))
        assert state["reading"] == bool(left[-1])
    assert left == [2, 1, 0]
    assert sum(row["best"] is not None for row in state["runs"]) == 2


def test_a_race_is_followed_as_it_runs(race: Path) -> None:
    lines = [json.loads(text) for text in (race / "registry.jsonl").read_text().splitlines()]
    names = [line["run"] for line in lines if line["event"] == "begun"]
    for name in names:
        shutil.rmtree(race / name)
    (race / "registry.jsonl").unlink()
    feed = open_feed(race)
    assert feed.state()["status"] == "waiting"
    registry = RunRegistry(race / "registry.jsonl")
    first, second = (line for line in lines if line["event"] == "begun" and line["run"] in names[:2])
    facts = ("run", "kind", "entry", "workers", "seed", "factor")
    registry.append("begun", **{key: first[key] for key in facts})
    state = feed.state()
    assert (state["status"], state["done"], state["left"]) == ("running", 0, None)
    run = GrowingRun(race / first["run"], metric="gap", higher_is_better=False, target=0.02)
    run.start(target=0.02)
    run.evaluation(100, 0.01)
    [row] = [row for row in feed.state()["runs"] if row["id"] is not None]
    assert (row["status"], row["best"], row["hit"], row["step"]) == ("running", 0.01, 10.0, 100)
    registry.append("ended", run=first["run"], status="finished", reason=None, seconds=60.0, files={})
    registry.append("begun", **{key: second[key] for key in facts})
    state = feed.state()
    assert state["done"] == 1
    assert 60 < state["left"] <= 120
    registry.append("ended", run=second["run"], status="interrupted", reason="the race was stopped", seconds=1.0)
    state = feed.state()
    assert (state["status"], state["done"]) == ("stopped", 1)
    assert "--resume" in state["reason"]
    registry.append("begun", **{**{key: second[key] for key in facts}, "run": second["run"] + ".2"})
    registry.append("ended", run=second["run"] + ".2", status="diverged", reason="NaN on rank 1", seconds=2.0)
    state = feed.state()
    assert (state["status"], state["done"]) == ("running", 2)
    assert [row["reason"] for row in state["runs"] if row["status"] == "diverged"] == ["NaN on rank 1"]


def test_a_race_that_lost_files_or_has_strange_lines(race: Path) -> None:
    feed = open_feed(race)
    name = json.loads((race / "registry.jsonl").read_text().splitlines()[1])["run"]
    feed.state()
    shutil.rmtree(race / name)
    RunRegistry(race / "registry.jsonl").append(
        "begun", run="../../etc", kind="race", entry="allreduce", workers=2, seed=1, factor=None
    )
    told = " ".join(feed.state()["problems"])
    assert "registry.jsonl: 1 line cannot be read" in told
    assert f"{name}: {Path(name).name}/log.jsonl was removed" in told
    (race / "registry.jsonl").unlink()
    assert any(problem.startswith("registry.jsonl was removed") for problem in feed.state()["problems"])


def test_numbers_of_runs_that_are_not_there(race: Path) -> None:
    feed = open_feed(race)
    feed.state()
    assert feed.curves([99, -1]) == {"runs": {}}
    assert feed.detail(99, "compute") is None
    assert feed.detail(0, "no such kind") is None


# What is no run


def test_folders_that_are_no_run(tmp_path: Path, run: GrowingRun) -> None:
    with pytest.raises(SpecError, match=r"does not exist; .* syncline watch .*run"):
        open_feed(tmp_path / "nothing")
    with pytest.raises(SpecError, match=r"is a file; name its folder"):
        open_feed(run.log)
    with pytest.raises(SpecError, match=r"neither race\.json nor log\.jsonl; .* syncline watch .*run"):
        open_feed(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"syncline train digits -n 2"):
        open_feed(tmp_path / "empty")
    (tmp_path / "empty" / "race.json").write_text("{}")
    with pytest.raises(ProtocolError, match=r"race\.json has format None"):
        open_feed(tmp_path / "empty")
    (tmp_path / "empty" / "race.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ProtocolError, match=r"cannot be read"):
        open_feed(tmp_path / "empty")


def test_the_newest_run_is_the_one_written_to_last(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"there is no run in"):
        newest_run(tmp_path)
    old, new = (GrowingRun(tmp_path / name) for name in ("old", "new"))
    for run in (old, new):
        run.start()
    assert newest_run(tmp_path) == new.folder
    old.start()
    assert newest_run(tmp_path) == old.folder
