"""Check the raw logs of a race, or of one run, for twelve reporting mistakes.

examples:
  syncline lint runs/race-digits-20261115-101500
  syncline lint runs/* --json
  syncline lint --rules                            the twelve
  syncline lint --exclude runs/allreduce/4w-seed2 --why "the disk was full" runs/race-digits-20261115-101500

The exit code is 0 where no rule is broken (warnings are told), 1 where one is, 2 where there is nothing to lint.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syncline.bench.lint import RULES, Verdict, review, review_run
from syncline.bench.race.reading import PLAN, REGISTRY, Race, read_race
from syncline.bench.race.registry import Registry, locked
from syncline.errors import ProtocolError, SpecError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of a race, or of one run")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--rules", action="store_true", help="tell the twelve rules, and look at nothing")
    parser.add_argument("--exclude", metavar="RUN", help="from now on this run of the race does not count")
    parser.add_argument("--why", metavar="REASON", help="with --exclude: written into the registry, and reported")


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked."""
    if arguments.rules:
        for rule in RULES:
            print(f"{rule.number:2}  {rule.name}\n    holds where {rule.meaning}")
        return 0
    if not arguments.folders:
        raise SpecError("name the folder of a race or a run, such as runs/race-digits-20261115-101500; or --rules")
    if arguments.why is not None and arguments.exclude is None:
        raise SpecError("--why is the reason of --exclude RUN: name the run, or leave --why out")
    if arguments.exclude is not None:
        if len(arguments.folders) != 1:
            raise SpecError(f"--exclude is about one race, and {len(arguments.folders)} folders are named")
        return _exclude(arguments.folders[0], arguments.exclude, arguments.why)
    found = {str(folder): _review(folder) for folder in arguments.folders}
    if arguments.json:
        print(
            json.dumps({folder: [_document(one) for one in verdicts] for folder, verdicts in found.items()}, indent=2)
        )
    else:
        print("\n\n".join(_text(folder, verdicts) for folder, verdicts in found.items()))
    return int(any(verdict.state == "broken" for verdicts in found.values() for verdict in verdicts))


def _review(folder: Path) -> list[Verdict]:
    if not folder.is_dir():
        raise SpecError(f"{folder} is not a folder; name that of a race or a run, such as runs/…")
    return review(_race(folder)) if (folder / PLAN).exists() else review_run(folder)


def _race(folder: Path) -> Race:
    """A race, or a sentence where what lies there cannot be one."""
    try:
        return read_race(folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise ProtocolError(
            f"{folder} cannot be read as a race ({type(error).__name__}: {error}): {PLAN} or {REGISTRY} was edited, or "
            "written by another version"
        ) from None


def _exclude(folder: Path, name: str, reason: str | None) -> int:
    """Add a line to the registry; the run stays where it is."""
    race = _race(folder)
    known = [one.folder for one in race.runs]
    if name not in known:
        raise SpecError(f"{folder} has no run {name!r}; it has {', '.join(known[:4])}{' …' if known[4:] else ''}")
    if not (reason or "").strip():
        raise SpecError(f'why is {name} not to count? Say so: --why "the disk was full"')
    with locked(folder / REGISTRY):
        Registry(folder / REGISTRY).append("excluded", run=name, reason=str(reason).strip())
    print(f"{name} does not count any more: {str(reason).strip()}")
    return 0


def _document(verdict: Verdict) -> dict[str, Any]:
    return {
        "rule": verdict.rule.number,
        "name": verdict.rule.name,
        "meaning": verdict.rule.meaning,
        "state": verdict.state,
        "looked": verdict.looked,
        "findings": [asdict(finding) for finding in verdict.findings],
    }


def _text(folder: str, verdicts: list[Verdict]) -> str:
    lines = [folder]
    for verdict in verdicts:
        lines.append(f"  {verdict.rule.number:2}  {verdict.state:16}  {verdict.rule.meaning}")
        if verdict.looked:
            lines.append(f"{'':24}seen: {verdict.looked}")
        for finding in verdict.findings:
            lines += [f"{'':6}{finding.severity}: {finding.evidence}", f"{'':6}fix: {finding.fix}"]
    broken = [str(verdict.rule.number) for verdict in verdicts if verdict.state == "broken"]
    warnings = sum(finding.severity == "warning" for verdict in verdicts for finding in verdict.findings)
    end = f"broken: rule {', '.join(broken)}" if broken else "no rule is broken"
    return "\n".join([*lines, f"  {end}{f'; {warnings} warnings' if warnings else ''}"])
