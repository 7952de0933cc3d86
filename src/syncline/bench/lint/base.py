"""The contract of a lint rule, and the helpers that several rules use.

A rule is a `LintRule`: a function from a race to `Note`s. Each theme has a module with its rules:

```text
record.py    0 files changed    3 tuning     12 baselines and runs
accuracy.py  1 accuracy per size               2 test accuracy
course.py    5 whole runs       6 clock      10 target and end
setup.py     4 hardware         7 operations  8 one configuration   9 inputs   11 batch
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from syncline.bench.answer_cache import cache_answers
from syncline.bench.race.plan import PlannedRun, RaceEntry, RacePlan
from syncline.bench.race.registry import SPLITS, digest_sample
from syncline.bench.runlog import RaceRecord, RunRecord, finite
from syncline.errors import SynclineError

__all__ = [
    "ExpectedSteps",
    "Finding",
    "LintCase",
    "LintRule",
    "Note",
    "RuleResult",
    "RuleState",
    "clock_tolerance",
    "close",
    "is_built_in",
    "some",
    "step_of",
]

Severity = Literal["violation", "warning"]
RuleState = Literal["holds", "broken", "nothing to check", "not checkable"]

SAMPLES_COMPARED = 256
"""Samples of each split that are compared with the digests of the race."""


@dataclass(frozen=True)
class Note:
    """A finding of a rule, without the number and name of the rule."""

    evidence: str
    fix: str = ""
    """How to fix it, if not as the rule says."""
    severity: Severity = "violation"


@dataclass(frozen=True)
class Finding:
    """A broken rule: the evidence, and how to fix it.

    >>> print(Finding("6", "Time is left out", "run a: the phases add up to 71 % of its time", "time the whole run"))
    rule 6, violation. Time is left out
      seen: run a: the phases add up to 71 % of its time
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
class LintCase:
    """A race, with the derived values that several rules use."""

    race: RaceRecord

    @property
    def plan(self) -> RacePlan:
        return self.race.plan

    @cached_property
    def finished(self) -> list[RunRecord]:
        """Runs that finished. A run whose log says that it was aborted is left to rule 12."""
        return [run for run in self.race.runs if run.status == "finished" and run.stop.get("status") != "aborted"]

    @cached_property
    def configured(self) -> list[RunRecord]:
        """Runs that have a configuration."""
        return [run for run in self.race.runs if run.config]

    @cached_property
    def data(self) -> dict[str, Any] | None:
        """The workload on this machine. A user's script is never executed by the lint."""
        spec = self.plan.workload
        return describe_data(spec) if is_built_in(spec.partition("(")[0].strip()) else None

    def planned(self, run: RunRecord) -> PlannedRun | None:
        """The run as the plan describes it; None if the plan has no such entry."""
        entries = self.plan.entries if run.kind == "tuning" else self.race.entries
        entry: RaceEntry | None = next((entry for entry in entries if entry.name == run.entry), None)
        if entry is None or run.kind not in ("race", "scaling", "tuning"):
            return None
        return PlannedRun(run.folder, run.kind, entry, run.workers, run.seed, run.factor)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LintRule:
    """One rule: its meaning and its checks."""

    number: int
    name: str
    """The mistake."""
    meaning: str
    """What is true if the rule holds."""
    fix: str
    """How to fix what a note without a fix of its own reports."""
    check: Callable[[LintCase], Iterator[Note]]
    describe: Callable[[LintCase], str]
    """What the check reads; "" if the race has nothing of the kind."""
    check_run: Callable[[RunRecord], Iterator[Note]] | None = None
    """The part of the check that needs only one run."""


@dataclass(frozen=True)
class RuleResult:
    """The result of one rule."""

    rule: LintRule
    state: RuleState
    checked: str
    """What the check has read."""
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class ExpectedSteps:
    """The steps that a run must take, computed from its configuration and not from its log.

    >>> expected = ExpectedSteps(train=100, batch=32, epochs=2, steps=None, every=3)
    >>> expected.epoch_steps, expected.total, expected.samples(5)
    (4, 8, 132)
    >>> expected.evaluations(8)
    [3, 6, 8]
    """

    train: int
    batch: int
    """Samples of a step, all workers together."""
    epochs: int
    steps: int | None
    every: int | None

    @staticmethod
    def of(run: RunRecord) -> ExpectedSteps | None:
        """None if the configuration is incomplete."""
        config = run.config
        try:
            batch = config.get("global_batch") or int(config["batch"]) * int(config["workers"])
            expected = ExpectedSteps(
                train=int(config["samples"]["train"]),
                batch=int(batch),
                epochs=int(config["epochs"]),
                steps=config.get("steps"),
                every=config.get("evaluate_every"),
            )
        except (KeyError, TypeError, ValueError):
            return None
        return expected if min(expected.train, expected.batch, expected.epochs, expected.every or 1) > 0 else None

    @property
    def epoch_steps(self) -> int:
        return -(-self.train // self.batch)

    @property
    def total(self) -> int:
        steps = self.epoch_steps * self.epochs
        return steps if self.steps is None else min(steps, self.steps)

    def samples(self, step: int) -> int:
        """Samples of the first `step` steps; the last step of an epoch takes the rest of the data."""
        whole, rest = divmod(step, self.epoch_steps)
        return whole * self.train + min(rest * self.batch, self.train)

    def evaluations(self, last: int) -> list[int]:
        """The steps after which a run that ended at step `last` must evaluate."""
        every = self.every or self.epoch_steps
        return [*range(every, last, every), last]


def step_of(event: dict[str, Any]) -> int | None:
    """The step of an event."""
    metadata = event.get("metadata")
    step = metadata.get("step") if isinstance(metadata, dict) else None
    return step if isinstance(step, int) else None


def close(one: Any, other: Any, tolerance: float = 1e-9) -> bool:
    """Equality; for numbers with a relative tolerance."""
    left, right = finite(one), finite(other)
    if left is None or right is None:
        return bool(one == other)
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=1e-12)


def clock_tolerance(run: RunRecord, seconds: float) -> float:
    """Seconds by which two readings of a run's clock may differ. A simulator's clock is exact."""
    return 1e-6 + 1e-6 * seconds if run.simulated else 0.05 + 0.01 * seconds


def some(names: Sequence[str], most: int = 4) -> str:
    """The first names, and the number of the others.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


@cache_answers
def is_built_in(name: str) -> bool:
    """True if Syncline has a workload of this name."""
    from syncline.workloads import names

    return name in names()


@cache_answers
def describe_data(spec: str) -> dict[str, Any] | None:
    """Describe a built-in workload and its data on this machine; None if the data is missing.

    `config` is as in `config.json`, `learning_rate` the workload's default, `digests` are those of the first samples of
    each split.
    """
    import torch

    from syncline.workloads import build
    from syncline.workloads.base import batches

    try:
        workload = build(spec)
        splits = workload.splits()
    except (SynclineError, OSError):
        return None
    first = torch.as_tensor(splits.train[0][0])
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in workload.model(0).parameters()})
    shape = {"shape": list(first.shape), "dtype": str(first.dtype).removeprefix("torch."), "parameters": dtypes}
    digests = {}
    for name in SPLITS:
        inputs, targets = next(batches(getattr(splits, name), SAMPLES_COMPARED))
        digests[name] = [digest_sample(inputs[row], targets[row]) for row in range(len(inputs))]
    config = {**workload.describe(), "input": shape}
    return {"config": config, "learning_rate": workload.defaults.learning_rate, "digests": digests}
