"""Write the report of a race anew, from its logs.

examples:
  syncline report runs/race-digits-20261115-101500
  syncline report runs/race-*                          every one of them

A race writes its report itself. This does so again: after a run was left out with a reason, after an interruption, or
with a newer version. It makes report.html (one file that works anywhere), report.json, runs.csv, curves.csv and plots/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a race: runs/race-…")


def run(arguments: argparse.Namespace) -> int:
    """Lint, write, and say who won and where to look."""
    from syncline.bench.lint import lint
    from syncline.bench.report import analyse, judge, read, write_report

    for folder in arguments.folders:
        race = read(folder)
        findings = lint(race)
        path = write_report(folder, findings, race)
        print(judge(analyse(race)).text())
        broken = sorted({finding.rule for finding in findings if finding.severity == "violation"}, key=int)
        if broken:
            print(f"This report breaks rule {', '.join(broken)}: syncline lint {folder}")
        print(f"written: {path}")
    return 0
