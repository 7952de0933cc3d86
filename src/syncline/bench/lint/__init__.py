"""The lint of a race: recomputes what the raw logs prove, and checks them for twelve reporting mistakes.

T. Hoefler, "Twelve ways to fool the masses when reporting performance of deep learning workloads", 2018; after
D. Bailey's twelve ways of 1991.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from syncline.bench.lint import accuracy, course, record, setup
from syncline.bench.lint.base import Finding, LintCase, LintRule, Note, RuleResult, RuleState, Severity
from syncline.bench.runlog import RaceRecord, read_run
from syncline.errors import SpecError

__all__ = ["RULES", "Finding", "LintRule", "RuleResult", "lint", "review", "review_run"]

RULES = tuple(sorted((*record.RULES, *accuracy.RULES, *course.RULES, *setup.RULES), key=lambda rule: rule.number))
"""Rule 0, without which the others have nothing to check, and the twelve."""
MAX_SIMILAR_FINDINGS = 5
"""Of findings with the same fix, the first ones are listed; the others are counted."""
BAD_LOG_ERRORS = (ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Exceptions of a rule that are caused by nonsense in a log."""


def lint(race: RaceRecord) -> list[Finding]:
    """All findings, in the order of the rules."""
    return [finding for result in review(race) for finding in result.findings]


def review(race: RaceRecord) -> list[RuleResult]:
    """The result of each rule."""
    case = LintCase(race)
    results = []
    for rule in RULES:
        notes = rule.check(case)
        try:
            checked = rule.describe(case)
        except BAD_LOG_ERRORS:
            checked = "logs that cannot be understood"
        results.append(_result(rule, notes, checked))
    return results


def review_run(folder: Path) -> list[RuleResult]:
    """The results of the rules that need only one run of `syncline train`."""
    if not (folder / "log.jsonl").exists():
        raise SpecError(
            f"{folder} has neither race.json nor log.jsonl: name the folder of a race or of a run, such as runs/…"
        )
    run = read_run(folder)
    checked = f"{len(run.events)} lines of its log, {len(run.evaluations)} evaluations"
    results = []
    for rule in RULES:
        if rule.number == 0:
            notes = iter(
                [Note(problem, "restore the files that the run wrote, or run again") for problem in run.problems]
            )
            results.append(_result(rule, notes, "three files"))
        elif rule.check_run is None:
            results.append(RuleResult(rule, "not checkable", "a single run: the rule needs a race"))
        else:
            results.append(_result(rule, rule.check_run(run), checked))
    return results


def _result(rule: LintRule, notes: Iterator[Note], checked: str) -> RuleResult:
    findings = list(_findings(rule, _guarded(notes)))
    broken = any(finding.severity == "violation" for finding in findings)
    state: RuleState = "broken" if broken else "holds" if checked or findings else "nothing to check"
    return RuleResult(rule, state, checked, findings)


def _guarded(notes: Iterator[Note]) -> Iterator[Note]:
    """The notes of a rule; an exception caused by a bad log becomes a note."""
    try:
        yield from notes
    except BAD_LOG_ERRORS as error:
        yield Note(
            f"a log or configuration cannot be understood ({type(error).__name__}: {error})",
            "look for a file that was edited, or written by another version; run it again",
        )


def _findings(rule: LintRule, notes: Iterable[Note]) -> Iterator[Finding]:
    """Notes with the rule's number and name; of many similar ones, the first and the number of the rest."""
    similar: Counter[tuple[str, Severity]] = Counter()
    for note in dict.fromkeys(notes):
        fix = note.fix or rule.fix
        similar[fix, note.severity] += 1
        if similar[fix, note.severity] <= MAX_SIMILAR_FINDINGS:
            yield Finding(str(rule.number), rule.name, note.evidence, fix, note.severity)
    for (fix, severity), count in similar.items():
        if count > MAX_SIMILAR_FINDINGS:
            more = f"and {count - MAX_SIMILAR_FINDINGS} similar findings"
            yield Finding(str(rule.number), rule.name, more, fix, severity)
