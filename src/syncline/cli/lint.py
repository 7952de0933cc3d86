"""Check the raw logs of a race, or of one run, for twelve reporting mistakes.

examples:
  syncline lint runs/race-digits-20261115-101500
  syncline lint runs/* --json
  syncline lint --rules                            list the twelve rules
  syncline lint --exclude runs/allreduce/4w-seed2 --why "the disk was full" runs/race-digits-20261115-101500

The exit code is 0 if no rule is broken (there may be warnings), 1 if one is, 2 if there is nothing to check.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syncline.bench.lint import RULES, RuleResult, review, review_run
from syncline.bench.race.registry import RunRegistry, lock_registry
from syncline.bench.runlog import PLAN, REGISTRY, read_race
from syncline.errors import SpecError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="the folder of a race, or of one run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rules", action="store_true", help="list the twelve rules, and check nothing")
    parser.add_argument("--exclude", metavar="RUN", help="exclude this run of the race from now on")
    parser.add_argument("--why", metavar="REASON", help="with --exclude: the reason, for the registry and the report")


def run(arguments: argparse.Namespace) -> int:
    """Check the folders, list the rules, or exclude a run; return the exit code."""
    if arguments.rules:
        for rule in RULES[1:]:
            print(f"{rule.number:2}  {rule.name}\n    holds if {rule.meaning}")
        return 0
    if not arguments.folders:
        raise SpecError("name the folder of a race or a run, such as runs/race-digits-20261115-101500; or --rules")
    if arguments.why is not None and arguments.exclude is None:
        raise SpecError("--why is the reason of --exclude RUN: name the run, or leave --why out")
    if arguments.exclude is not None:
        if len(arguments.folders) != 1:
            raise SpecError(f"--exclude is about one race, and {len(arguments.folders)} folders are named")
        return _exclude(arguments.folders[0], arguments.exclude, arguments.why)
    results = {str(folder): _review(folder) for folder in arguments.folders}
    if arguments.json:
        print(json.dumps({folder: list(map(_document, found)) for folder, found in results.items()}, indent=2))
    else:
        print("\n\n".join(_text(folder, found) for folder, found in results.items()))
    return int(any(result.state == "broken" for found in results.values() for result in found))


def _review(folder: Path) -> list[RuleResult]:
    if not folder.is_dir():
        raise SpecError(f"{folder} is not a folder; name the folder of a race or a run, such as runs/…")
    return review(read_race(folder)) if (folder / PLAN).exists() else review_run(folder)


def _exclude(folder: Path, name: str, reason: str | None) -> int:
    """Add a line to the registry. The files of the run stay."""
    known = [run.folder for run in read_race(folder).runs]
    if name not in known:
        raise SpecError(f"{folder} has no run {name!r}; it has {', '.join(known[:4])}{' …' if known[4:] else ''}")
    if not (reason or "").strip():
        raise SpecError(f'{name} is not excluded without a reason: add --why "the disk was full"')
    with lock_registry(folder / REGISTRY):
        RunRegistry(folder / REGISTRY).append("excluded", run=name, reason=str(reason).strip())
    print(f"{name} is excluded: {str(reason).strip()}")
    return 0


def _document(result: RuleResult) -> dict[str, Any]:
    return {
        "rule": result.rule.number,
        "name": result.rule.name,
        "meaning": result.rule.meaning,
        "state": result.state,
        "looked": result.checked,
        "findings": [asdict(finding) for finding in result.findings],
    }


def _text(folder: str, results: list[RuleResult]) -> str:
    lines = [folder]
    for result in results:
        lines.append(f"  {result.rule.number:2}  {result.state:16}  {result.rule.meaning}")
        if result.checked:
            lines.append(f"{'':24}checked: {result.checked}")
        for finding in result.findings:
            lines += [f"{'':6}{finding.severity}: {finding.evidence}", f"{'':6}fix: {finding.fix}"]
    broken = [str(result.rule.number) for result in results if result.state == "broken"]
    warnings = sum(finding.severity == "warning" for result in results for finding in result.findings)
    end = f"broken: rule {', '.join(broken)}" if broken else "no rule is broken"
    return "\n".join([*lines, f"  {end}{f'; {warnings} warnings' if warnings else ''}"])
