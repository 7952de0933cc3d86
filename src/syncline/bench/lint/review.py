"""Runs the rules over a race, or over one run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from syncline.bench.lint.base import Case, Finding, Note, Rule, State, Verdict
from syncline.bench.lint.catalog import RECORD, RULES
from syncline.bench.lint.evidence import events
from syncline.bench.race.reading import Race, RanRun, read_run
from syncline.errors import SpecError

__all__ = ["lint", "review", "review_run"]

SHOWN = 5
"""Findings with the same fix that are told one by one."""
NONSENSE = (ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)


def lint(race: Race) -> list[Finding]:
    """All that is wrong with a race, in the order of the rules; nothing, if it is honest."""
    return [finding for verdict in review(race) for finding in verdict.findings]


def review(race: Race) -> list[Verdict]:
    """What came of each rule, and what it looked at."""
    case = Case(race)
    verdicts = []
    for rule in (RECORD, *RULES):
        findings = list(_findings(rule, _told(rule.check(case))))
        try:
            looked = rule.looked(case)
        except NONSENSE:
            looked = "logs that cannot be understood"
        broken = any(finding.severity == "violation" for finding in findings)
        state: State = "broken" if broken else "holds" if looked or findings else "nothing to check"
        verdicts.append(Verdict(rule, state, looked, findings))
    return verdicts


def review_run(folder: Path) -> list[Verdict]:
    """The rules that one run of `syncline train` is enough for."""
    if not (folder / "log.jsonl").exists():
        raise SpecError(
            f"{folder} has neither race.json nor log.jsonl: name the folder of a race or of a run, such as runs/…"
        )
    run = _alone(folder)
    record = [Note(problem, "put the files back as the run wrote them, or run again") for problem in run.problems]
    verdicts = [Verdict(RECORD, "broken" if record else "holds", "three files", list(_findings(RECORD, record)))]
    for rule in RULES:
        if rule.check_run is None:
            verdicts.append(Verdict(rule, "not checkable", "one run alone: it takes a race"))
            continue
        findings = list(_findings(rule, _told(rule.check_run(run))))
        broken = any(finding.severity == "violation" for finding in findings)
        looked = f"{len(run.events)} lines of its log, {len(run.evaluations)} evaluations"
        verdicts.append(Verdict(rule, "broken" if broken else "holds", looked, findings))
    return verdicts


def _alone(folder: Path) -> RanRun:
    config, system, lines, problems = read_run(folder)
    run = RanRun(
        folder=folder.name,
        kind="race",
        entry=str(config.get("strategy")),
        workers=int(config.get("workers") or 1),
        seed=int(config.get("seed") or 0),
        status="running",
        reason=None,
        seconds=None,
        config=config,
        system=system,
        events=lines,
        problems=problems,
    )
    stop = next(reversed(events(run, "run_stop")), None)
    if stop is not None:
        run.status = "finished" if stop.get("metadata", {}).get("status") == "success" else "failed"
    return run


def _told(notes: Iterator[Note]) -> Iterator[Note]:
    """What a rule says, and that it could not go on where a log makes no sense."""
    try:
        yield from notes
    except NONSENSE as error:
        yield Note(
            f"a log or configuration cannot be understood ({type(error).__name__}: {error})",
            "look for a file that was edited, or written by another version; run it again",
        )


def _findings(rule: Rule, notes: Iterable[Note]) -> Iterator[Finding]:
    """With the rule's number and name; the sixth of a kind and those behind it as a number."""
    told: dict[tuple[str, str], int] = {}
    for note in dict.fromkeys(notes):
        kind = (note.fix, note.severity)
        told[kind] = told.get(kind, 0) + 1
        if told[kind] <= SHOWN:
            yield Finding(str(rule.number), rule.name, note.evidence, note.fix, note.severity)
    for (fix, severity), times in told.items():
        if times > SHOWN:
            more = Note(f"and {times - SHOWN} more like these", fix, severity)  # type: ignore[arg-type]
            yield Finding(str(rule.number), rule.name, more.evidence, more.fix, more.severity)
