"""The report of a race: one page that anybody can open, and the same numbers for other programs.

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
from typing import Any

from syncline.bench.race.reading import Race
from syncline.bench.report.analysis import Analysis, analyse
from syncline.bench.report.reading import read
from syncline.bench.report.verdict import Verdict, judge
from syncline.errors import UnsupportedError

__all__ = ["Analysis", "Verdict", "analyse", "judge", "read", "write_report"]


def write_report(folder: str | Path, findings: Sequence[Any] | None = None, race: Race | None = None) -> Path:
    """Write the report of a race into its folder; the path of the page.

    `findings` are the lint's: none of them and nobody looked (None) are told apart on the page. Where matplotlib is
    missing the page has no pictures, and says so.
    """
    from syncline.bench.report.html import page
    from syncline.bench.report.plots import draw
    from syncline.bench.report.tables import write_tables

    folder = Path(folder)
    race = read(folder) if race is None else race
    found = analyse(race)
    verdict = judge(found)
    write_tables(folder, race, found, verdict, findings)
    pictures, missing = [], ""
    try:
        pictures = draw(found)
    except UnsupportedError as error:
        missing = str(error)
    (folder / "plots").mkdir(exist_ok=True)
    for picture in pictures:
        for kind, data in (("svg", picture.svg), ("png", picture.png)):
            (folder / "plots" / f"{picture.name}.{kind}").write_bytes(data)
    path = folder / "report.html"
    aside = folder / ".report.html"
    aside.write_text(page(race, found, verdict, findings, pictures, missing), encoding="utf-8")
    os.replace(aside, path)  # whoever looks sees the old page or the new one
    return path
