"""Write the report of a race again, from its logs.

examples:
  syncline report runs/race-digits-20261115-101500
  syncline report runs/race-*                          all of them

A race writes its report itself. Write it again after a run was excluded, after an interruption, or with a newer
version. The report is report.html (one file without external resources), report.json, runs.csv, curves.csv and plots/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="the folder of a race: runs/race-…")


def run(arguments: argparse.Namespace) -> int:
    """Lint each race, write its report, and print the verdict and the path."""
    from syncline.bench.lint import lint
    from syncline.bench.report import analyse, judge, write_report
    from syncline.bench.runlog import read_race

    for folder in arguments.folders:
        race = read_race(folder)
        findings = lint(race)
        path = write_report(folder, findings, race)
        print(judge(analyse(race)).text())
        broken = sorted({finding.rule for finding in findings if finding.severity == "violation"}, key=int)
        if broken:
            print(f"This report breaks rule {', '.join(broken)}: syncline lint {folder}")
        print(f"written: {path}")
    return 0
