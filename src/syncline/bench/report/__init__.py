"""The report of a race: one HTML page, and the same numbers for other programs.

```text
facts ──► analysis ──► verdict ──► html    report.html
 (run)     (entry)    (sentence)   tables  report.json · runs.csv · curves.csv
              └──► plots                   plots/*.svg · *.png
```
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from syncline.bench.lint.base import Finding
from syncline.bench.report.analysis import Analysis, analyse
from syncline.bench.report.verdict import RaceVerdict, judge
from syncline.bench.runlog import RaceRecord, read_race
from syncline.errors import UnsupportedError

__all__ = ["Analysis", "RaceVerdict", "analyse", "judge", "write_report"]


def write_report(folder: str | Path, findings: Sequence[Finding] | None = None, race: RaceRecord | None = None) -> Path:
    """Write the report of a race into its folder; return the path of the page.

    `findings` are those of the lint; None means that there was no lint. Without matplotlib the page has no plots.
    """
    from syncline.bench.report.html import page
    from syncline.bench.report.plots import draw_plots
    from syncline.bench.report.tables import write_tables

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
