"""Correct races of every kind that the lint knows, and functions that edit their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syncline.bench.lint import lint
from syncline.bench.race.plan import RaceEntry, RateTuning
from syncline.bench.runlog import read_race
from tests.bench.racing import make_race

Line = dict[str, Any]
DENSE = RaceEntry(name="allreduce", learning_rate=0.2, rate_from="preset")
CODED = RaceEntry(name="quantize(4)", codec="quantize(4)", learning_rate=0.2, rate_from="preset")
BROKEN = RaceEntry(name="too fast", learning_rate=1e38, rate_from="given")
RACES: dict[str, dict[str, Any]] = {
    "plain": {"entries": (DENSE, CODED, BROKEN), "target": 0.17, "epochs": 6, "evaluate_samples": 128},
    "tuned": {"entries": (DENSE, CODED), "epochs": 3, "tuning": RateTuning(factors=(1.0, 0.3), epochs=2, seed=9)},
    "scaled": {"entries": (DENSE, CODED), "epochs": 4, "scaling": "weak", "scaling_workers": (1,)},
    "digits": {
        "entries": (RaceEntry(name="allreduce", learning_rate=0.1),),
        "workload": "digits",
        "metric": "accuracy",
        "higher_is_better": True,
        "target": 0.99,
        "epochs": 2,
        "evaluate_samples": 540,
    },
}


class Races:
    """Runs each race once; a test that changes a race takes a copy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def honest(self, name: str) -> Path:
        """The race itself, for reading only."""
        path = self._folder / name
        return path if path.exists() else make_race(path, **RACES[name])

    def copy(self, name: str, place: Path) -> Path:
        """A copy that the test may change."""
        return Path(shutil.copytree(self.honest(name), place / name))


def linted(folder: Path) -> tuple[set[str], str]:
    """The numbers of the broken rules, and all findings as one text."""
    findings = lint(read_race(folder))
    broken = {finding.rule for finding in findings if finding.severity == "violation"}
    return broken, "\n".join(map(str, findings))


def run_folders(folder: Path, pattern: str = "runs/*/*") -> list[Path]:
    """The folders of runs that have a log."""
    return sorted(path for path in folder.glob(pattern) if (path / "log.jsonl").exists())


def edit_log(run: Path, change: Callable[[list[Line]], list[Line]]) -> None:
    """Write other lines into a run's log."""
    path = run / "log.jsonl"
    lines = change([json.loads(text) for text in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change a document in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=2) + "\n")


def edit_registry(folder: Path, change: Callable[[list[Line]], list[Line]]) -> None:
    """Write other lines into the registry; `reseal` makes a chain of them."""
    path = folder / "registry.jsonl"
    lines = change([json.loads(text) for text in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def drop_run(folder: Path, name: str) -> None:
    """Remove a run and its lines in the registry."""
    shutil.rmtree(folder / name)
    edit_registry(folder, lambda lines: [line for line in lines if line.get("run") != name])
