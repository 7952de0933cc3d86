"""The report of a race: one HTML page, and the same numbers for other programs.

```text
facts ──► analysis ──► verdict ──► html     report.html
 (run)     (entry)    (sentence)  └──────►  report.json · runs.csv · curves.csv
              └──► plots                    plots/*.svg · *.png
```
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from syncline.bench.lint.base import Finding
from syncline.bench.report.analysis import Analysis, analyse
from syncline.bench.report.facts import RunFacts
from syncline.bench.report.verdict import RaceVerdict, judge
from syncline.bench.runlog import RaceRecord, read_race
from syncline.errors import UnsupportedError
from syncline.training.run_state import PHASES

__all__ = ["Analysis", "RaceVerdict", "analyse", "judge", "write_report", "write_tables"]

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


def write_report(folder: str | Path, findings: Sequence[Finding] | None = None, race: RaceRecord | None = None) -> Path:
    """Write the report of a race into its folder; return the path of the page.

    `findings` are those of the lint; None means that there was no lint. Without matplotlib the page has no plots.
    """
    from syncline.bench.report.html import page
    from syncline.bench.report.plots import draw_plots

    folder = Path(folder)
    race = read_race(folder) if race is None else race
    analysis = analyse(race)
    verdict = judge(analysis)
    write_tables(folder, race, analysis, verdict, findings)
    plots, missing = [], ""
    try:
        plots = draw_plots(analysis)
    except UnsupportedError as error:
        missing = str(error)
    (folder / "plots").mkdir(exist_ok=True)
    for plot in plots:
        for kind, data in (("svg", plot.svg), ("png", plot.png)):
            (folder / "plots" / f"{plot.name}.{kind}").write_bytes(data)
    path = folder / "report.html"
    part = folder / ".report.html"
    part.write_text(page(race, analysis, verdict, findings, plots, missing), encoding="utf-8")
    os.replace(part, path)
    return path


def write_tables(
    folder: Path, race: RaceRecord, analysis: Analysis, verdict: RaceVerdict, findings: Sequence[Finding] | None
) -> None:
    """Write `report.json`, `runs.csv` and `curves.csv`."""
    report = _document(race, analysis, verdict, findings)
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _write(
        folder / "runs.csv", [*RUN_COLUMNS, *(f"{name}_seconds" for name in PHASES), "folder"], map(_row, analysis.runs)
    )
    header = ["entry", "kind", "workers", "seed", *CURVE_COLUMNS, *(f"{name}_seconds" for name in PHASES)]
    _write(folder / "curves.csv", header, (row for run in analysis.runs for row in _points(run)))


def _document(
    race: RaceRecord, analysis: Analysis, verdict: RaceVerdict, findings: Sequence[Finding] | None
) -> dict[str, Any]:
    """The content of `report.json`. An infinite time is the string "inf"; `findings` is None without a lint."""
    whole: dict[str, Any] = {
        "format": FORMAT,
        "verdict": verdict,
        "findings": None if findings is None else list(findings),
        "registry_head": race.registry_head,
        "plan": json.loads(race.plan.as_json()),
        "system": race.system,
        "analysis": analysis,
    }
    plain: dict[str, Any] = _plain(whole)
    for run in plain["analysis"]["runs"]:
        run["evaluations"] = len(run["evaluations"])  # curves.csv has them
    return plain


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
