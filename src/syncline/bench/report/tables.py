"""The report for other programs: `report.json`, and CSV tables of the runs and of their evaluations."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from syncline.bench.lint.base import Finding
from syncline.bench.report.analysis import Analysis
from syncline.bench.report.facts import RunFacts
from syncline.bench.report.verdict import RaceVerdict
from syncline.bench.runlog import RaceRecord
from syncline.training.run_state import PHASES

__all__ = ["FORMAT", "document", "registry_head", "write_tables"]

FORMAT = 1

RUN_COLUMNS = (
    *("entry", "kind", "workers", "seed", "factor", "status", "reason", "excluded"),
    *("time_to_target", "epochs_to_target", "bytes_to_target", "steps_to_target", "best", "last", "test", "steps"),
    *("samples", "elapsed", "worker_seconds", "step_seconds", "throughput", "communication", "codec"),
    *("staleness", "staleness_mean", "consensus"),
)
CURVE_COLUMNS = (
    *("step", "metric", "elapsed", "trained", "samples", "epochs", "bytes_logical", "bytes_wire", "staleness"),
    *("consensus", "split", "count"),
)


def write_tables(
    folder: Path, race: RaceRecord, found: Analysis, verdict: RaceVerdict, findings: Sequence[Finding] | None
) -> None:
    """Write `report.json`, `runs.csv` and `curves.csv`."""
    report = document(race, found, verdict, findings)
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _write(
        folder / "runs.csv", [*RUN_COLUMNS, *(f"{name}_seconds" for name in PHASES), "folder"], map(_row, found.runs)
    )
    header = ["entry", "kind", "workers", "seed", *CURVE_COLUMNS, *(f"{name}_seconds" for name in PHASES)]
    _write(folder / "curves.csv", header, (row for run in found.runs for row in _points(run)))


def document(
    race: RaceRecord, found: Analysis, verdict: RaceVerdict, findings: Sequence[Finding] | None
) -> dict[str, Any]:
    """The content of `report.json`. An infinite time is the string "inf"; `findings` is None without a lint."""
    whole: dict[str, Any] = {
        "format": FORMAT,
        "verdict": verdict,
        "findings": None if findings is None else list(findings),
        "registry_head": registry_head(race),
        "plan": json.loads(race.plan.as_json()),
        "system": race.system,
        "analysis": found,
    }
    plain: dict[str, Any] = _plain(whole)
    for run in plain["analysis"]["runs"]:
        run["evaluations"] = len(run["evaluations"])  # curves.csv has them
    return plain


def registry_head(race: RaceRecord) -> str:
    """The hash of the registry's last line, which depends on all lines."""
    return str(race.lines[-1].get("hash", "")) if race.lines else ""


def _row(run: RunFacts) -> list[Any]:
    return [
        *(getattr(run, name) for name in RUN_COLUMNS),
        *(run.phases.get(name) for name in PHASES),
        run.folder,
    ]


def _points(run: RunFacts) -> Iterable[list[Any]]:
    for one in run.evaluations:
        facts = [getattr(one, name) for name in CURVE_COLUMNS]
        yield [run.entry, run.kind, run.workers, run.seed, *facts, *(one.phases.get(name) for name in PHASES)]


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([_cell(value) for value in row] for row in rows)


def _cell(value: Any) -> Any:
    """Quote text that a spreadsheet would read as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
