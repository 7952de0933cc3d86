"""What a rule of the lint is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from syncline.bench.lint.data import describe_data, is_built_in
from syncline.bench.race.plan import Entry, Plan
from syncline.bench.race.plan import Run as PlannedRun
from syncline.bench.race.reading import Race, RanRun

__all__ = ["Case", "Finding", "Note", "Rule", "Severity", "State", "Verdict", "some"]

Severity = Literal["violation", "warning"]
State = Literal["holds", "broken", "nothing to check", "not checkable"]


@dataclass(frozen=True)
class Note:
    """What a rule has found, before it is said which rule."""

    evidence: str
    fix: str
    severity: Severity = "violation"


@dataclass(frozen=True)
class Finding:
    """A rule that does not hold: where that is seen, and what to do.

    >>> print(Finding("6", "Leave out I/O", "run a: phases add up to 71 % of its time", "time the whole run"))
    rule 6, violation. Leave out I/O
      seen: run a: phases add up to 71 % of its time
      fix:  time the whole run
    """

    rule: str
    title: str
    evidence: str
    fix: str
    severity: Severity = "violation"

    def __str__(self) -> str:
        return f"rule {self.rule}, {self.severity}. {self.title}\n  seen: {self.evidence}\n  fix:  {self.fix}"


@dataclass
class Case:
    """A race before the lint, and what several rules want to know of it."""

    race: Race

    @property
    def plan(self) -> Plan:
        return self.race.plan

    @cached_property
    def counted(self) -> list[RanRun]:
        """Runs that were seen through to their end. One whose log says otherwise is rule 12's."""
        return [run for run in self.race.runs if run.status == "finished" and not _aborted(run)]

    @cached_property
    def data(self) -> dict[str, Any] | None:
        """The workload as this machine has it. A script is never run to check what somebody says about it."""
        spec = self.plan.workload
        return describe_data(spec) if is_built_in(spec.partition("(")[0].strip()) else None

    def entry(self, run: RanRun) -> Entry | None:
        """As it ran: tuned, but for the runs that tuned it."""
        known = self.plan.entries if run.kind == "tuning" else self.race.entries
        return next((entry for entry in known if entry.name == run.entry), None)

    def planned(self, run: RanRun) -> PlannedRun | None:
        """What the plan says of a run; None where it says nothing."""
        entry = self.entry(run)
        if entry is None or run.kind not in ("race", "scaling", "tuning"):
            return None
        return PlannedRun(run.folder, run.kind, entry, run.workers, run.seed, run.factor)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rule:
    """One of the twelve: what it means, and how it is checked."""

    number: int
    name: str
    """The way to fool, in the imperative."""
    meaning: str
    """What holds where nobody is fooled."""
    check: Callable[[Case], Iterator[Note]]
    looked: Callable[[Case], str]
    """What the check looks at; "" where the race has nothing of the kind."""
    check_run: Callable[[RanRun], Iterator[Note]] | None = None
    """The part that a single run is enough for."""


@dataclass(frozen=True)
class Verdict:
    """What came of one rule."""

    rule: Rule
    state: State
    looked: str
    findings: list[Finding] = field(default_factory=list)


def _aborted(run: RanRun) -> bool:
    stops = [event.get("metadata") for event in run.events if event.get("key") == "run_stop"]
    return bool(stops) and isinstance(stops[-1], dict) and stops[-1].get("status") == "aborted"


def some(names: Sequence[str], most: int = 4) -> str:
    """A few of them, and how many more there are.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
