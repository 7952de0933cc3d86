"""Commands that read or describe start without torch, whose import takes longer than their work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from syncline.bench.lint import lint
from syncline.bench.report import analyse
from syncline.bench.runlog import read_race
from syncline.bench.step_contenders import BASELINES, BENCH_MODELS
from syncline.cli.main import main
from tests.bench.report_races import seeds, write_race


def test_help_and_reading_commands_do_not_import_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_CACHE", str(tmp_path / "cache"))
    folder = write_race(tmp_path / "race", seeds("allreduce"))
    race = read_race(folder)
    lint(race)  # asks torch, as a race does at its end, and keeps the answers
    analyse(race)
    run = folder / race.runs[0].folder
    command = [sys.executable, str(Path(__file__).with_name("without_torch.py")), str(folder), str(run)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_help_of_bench_step_names_all_models_and_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "step", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"of {','.join(BASELINES)};" in told
    assert f"of {', '.join(BENCH_MODELS)};" in told
