"""`syncline race`: what it refuses, and the real thing with entries that crash, hang and diverge."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import pytest

from syncline.bench.runlog import read_race
from syncline.cli import race
from syncline.errors import IncompatibleError, SpecError, SynclineError
from tests.launch.runs import Runs, wait_for

CONVEX = "logistic(features=8, samples=256)"

SCRIPT = """
import time

import torch
from torch import nn

TARGET = 0.5
BATCH = 16
EPOCHS = 3
LEARNING_RATE = 0.1
HANGS, CRASHES = 0.0625, 0.03125


def model():
    return nn.Linear(4, 1)


def data():
    inputs = torch.randn(160, 4)
    pairs = [(part, part.sum(1, keepdim=True)) for part in inputs.split([96, 32, 32])]
    return tuple(pairs)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def optimizer(model, learning_rate):
    made = torch.optim.SGD(model.parameters(), lr=learning_rate)
    if learning_rate == CRASHES:
        made.register_step_pre_hook(lambda *_: 1 / 0)
    if learning_rate == HANGS:
        made.register_step_pre_hook(lambda *_: time.sleep(3600))
    return made
"""

ENTRIES = """
[[entry]]
name = "good"
[[entry]]
name = "crashes"
learning_rate = 0.03125
[[entry]]
name = "diverges"
learning_rate = 1e30
[[entry]]
name = "ddp"
strategy = "ddp"
"""
HANGS = """
[[entry]]
name = "hangs"
learning_rate = 0.0625
"""
MINE = ("mine.py", "-n", "2", "--entries", "mine.toml", "--seeds", "1")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    race.configure(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("", SpecError, "name a workload"),
        ("digit", SpecError, "did you mean 'digits'"),
        ("nothing.py", SpecError, "nothing.py"),
        ("digits -n 0", SpecError, "at least one worker"),
        ("digits -n 5000", IncompatibleError, "too few for 5000 workers"),
        ("digits --target 96", SpecError, "did you mean 0.96"),
        ("aimless.py", SpecError, "set one with --target"),
        ("digits --seeds 0", SpecError, "--seeds 0"),
        ("digits --seeds 1,1", SpecError, "each once"),
        ("digits --seeds many", SpecError, "how many (3), or which"),
        ("digits --epochs 0", SpecError, "--epochs 0: at least 1"),
        ("digits --evaluate-every 99", SpecError, "at most 20"),
        ("digits --limit 0", SpecError, "--limit 0.0"),
        ("digits --tune 1", SpecError, "at least two learning rates"),
        ("digits --entries no.toml", SpecError, "cannot read entries from no.toml"),
        ("digits --lab 100mbit --simulate 1gbit", IncompatibleError, "leave one out"),
        ("digits -n 2 --lab 4@100mbit", IncompatibleError, "4 hosts for 2 workers"),
        ("digits --lab fast", SpecError, "fast"),
        ("digits --simulate fast", SpecError, "network(latency"),
        ("digits --out used", IncompatibleError, "--resume used"),
        ("digits --out used/race.json/inside", SpecError, "race.json/inside cannot be written to (Not a directory)"),
        ("digits --resume used", SpecError, "leave out the workload"),
        ("--resume nowhere", SpecError, "nowhere is not a race's folder"),
        ("--resume used --epochs 3 -n 2", SpecError, "takes no other arguments; leave out -n, --epochs"),
        ("digits --tune-epochs 3", SpecError, "belongs to --tune RATES"),
        ("digits --seconds-a-sample 1", SpecError, "together with --simulate"),
        ("digits --simulate 1gbit --seconds-a-sample -1", SpecError, "a number from 0 on"),
    ],
)
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, kind: type[SynclineError], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "race.json").touch()
    (tmp_path / "aimless.py").write_text(SCRIPT.replace("TARGET = 0.5", ""))
    monkeypatch.setattr("syncline.bench.race.runner.RaceRunner", lambda *_: pytest.fail("it was started"))
    with pytest.raises(kind) as caught:
        race.run(parsed(*line.split()))
    assert words in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_on_the_simulator_it_ends_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text("[[entry]]\nstrategy = 'allreduce'\n[[entry]]\ncodec = 'quantize(4)'\n")
    line = f"{CONVEX} -n 2 --simulate 10mbit --target 0.05 --epochs 3 --seeds 2 --entries two.toml --out here"
    code = race.run(parsed(*line.replace(CONVEX, "W").split()[1:], CONVEX))
    assert code == 0
    told = capsys.readouterr()
    assert told.out.strip() == "here/report.html"
    assert "reached gap 0.05" in told.err or "was ahead: gap 0.05" in told.err, "the verdict"
    assert (tmp_path / "here" / "report.html").exists()
    found = json.loads((tmp_path / "here" / "report.json").read_text())
    assert found["plan"]["workload"] == CONVEX


def test_a_script_that_was_edited_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "one.toml").write_text("[[entry]]\nname = 'good'\n")
    line = "mine.py -n 2 --simulate 1gbit --seeds 1 --entries one.toml --out here"
    assert race.run(parsed(*line.split())) == 0
    assert race.run(parsed("--resume", "here")) == 0
    (tmp_path / "mine.py").write_text(SCRIPT.replace("EPOCHS = 3", "EPOCHS = 4"))
    with pytest.raises(IncompatibleError, match="its script was edited since it began"):
        race.run(parsed("--resume", "here"))


@pytest.mark.xdist_group("gloo")
def test_who_crashes_or_diverges_stays_in_the_table(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "mine.toml").write_text(ENTRIES)
    ended = runs.start("race", *MINE, "--out", "here").finish().finish()  # four runs
    assert ended.code == 0, ended.err
    assert ended.out.strip() == "here/report.html"
    found = read_race(tmp_path / "here")
    assert found.problems == []
    told = {run.entry: (run.status, run.reason or "") for run in found.runs}
    assert told["good"] == told["ddp"] == ("finished", "")
    assert told["crashes"][0] == "failed"
    assert "ZeroDivisionError" in told["crashes"][1]
    assert told["diverges"][0] == "diverged"
    assert "division by zero" in (tmp_path / "here/runs/crashes/2w-seed1/output.txt").read_text()
    page = (tmp_path / "here" / "report.html").read_text()
    for name, (_, reason) in told.items():
        assert name in page
        assert reason.split(":")[0] in page
    good, ddp = (found.of(name)[0] for name in ("good", "ddp"))
    assert good.evaluations[-1].metric == pytest.approx(ddp.evaluations[-1].metric, rel=1e-5)


@pytest.mark.xdist_group("gloo")
def test_who_hangs_is_ended_after_its_limit(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "mine.toml").write_text(HANGS)
    ended = runs.run("race", *MINE, "--limit", "3", "--out", "here")
    assert ended.code == 0, ended.err
    found = read_race(tmp_path / "here")
    assert [(run.entry, run.status, run.reason) for run in found.runs] == [
        ("hangs", "hung", "no end after 3 s (--limit)")
    ]
    page = (tmp_path / "here" / "report.html").read_text()
    assert "no end after 3 s" in page
    runs.assert_nothing_left()


@pytest.mark.xdist_group("gloo")
def test_ctrl_c_and_resume(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "mine.toml").write_text("[[entry]]\nname = 'one'\n[[entry]]\nname = 'two'\nlearning_rate = 0.01\n")
    line = [CONVEX, "-n", "1", "--target", "0.001", "--epochs", "3", "--seeds", "1", "--entries", "mine.toml"]
    begun = runs.start("race", *line, "--out", "here")
    registry = tmp_path / "here" / "registry.jsonl"
    wait_for(lambda: registry.exists() and len(read_race(tmp_path / "here").runs) == 2, "the second run begins")
    os.kill(begun.pid, signal.SIGINT)
    ended = begun.finish()
    assert ended.code == 130, ended.err
    assert "syncline race --resume here" in ended.err
    assert (tmp_path / "here" / "report.html").exists()
    again = runs.run("race", "--resume", "here")
    assert again.code == 0, again.err
    assert "leaves out" not in again.err, "the report of the first half is no cheat"
    found = read_race(tmp_path / "here")
    assert found.problems == []
    assert found.remaining() == []
    assert [run.status for run in found.runs if run.status != "interrupted"] == ["finished", "finished"]
