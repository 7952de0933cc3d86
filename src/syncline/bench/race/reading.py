"""A race read back from its folder: the plan, the registry, and every run's own log.

```text
runs/race-digits-20261115-101500/
  race.json          the plan, fixed before the first run
  registry.jsonl     every run begun and ended, in a chain of hashes
  system.json        what machine
  splits/            a digest of every sample, by split
  runs/<entry>/4w-seed1/      log.jsonl · config.json · system.json · output.txt
  tuning/<entry>/rate-times-3/
  report.html · report.json · runs.csv · curves.csv · plots/
```

Reading never raises for what is wrong with a run: it is told in `problems`, and whoever reports says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from syncline.bench.race.plan import Entry, Plan
from syncline.bench.race.plan import Run as PlannedRun
from syncline.bench.race.registry import FILES, read_registry, sha256
from syncline.errors import ProtocolError, SpecError
from syncline.events import read_log

__all__ = ["Evaluation", "Race", "RanRun", "mixed", "read_race", "read_run"]

PLAN, REGISTRY, SYSTEM = "race.json", "registry.jsonl", "system.json"


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found, and all that it took until then."""

    step: int
    metric: float
    elapsed: float
    """Seconds since `run_start`, evaluations and all."""
    trained: float
    samples: int
    epochs: float
    bytes_logical: float
    bytes_wire: float
    staleness: float
    phases: dict[str, float]
    split: str
    count: int
    consensus: float | None = None


@dataclass
class RanRun:
    """One run as its registry lines and its own files tell it."""

    folder: str
    kind: str
    entry: str
    workers: int
    seed: int
    status: str
    """`finished`, `failed`, `diverged`, `hung`, `interrupted`; `running` where no end was written."""
    reason: str | None
    seconds: float | None
    """Wall clock around the whole run, the start of its processes included."""
    factor: float | None = None
    excluded: str | None = None
    """Why it does not count, where somebody said so."""
    config: dict[str, Any] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """In the order of the log."""
        found = []
        for event in self.events:
            if event.get("key") == "sl_evaluation" and isinstance(event.get("value"), dict):
                value = dict(event["value"])
                try:
                    value["metric"] = float(value["metric"])  # NaN is written as a word
                    found.append(Evaluation(step=int(event["metadata"]["step"]), **value))
                except (KeyError, TypeError, ValueError):
                    self.problems.append(f"{self.folder}/log.jsonl has an evaluation that cannot be read: {value}")
        return found

    def value(self, key: str) -> Any:
        """The last value that the log has under a key, or None."""
        return next((event.get("value") for event in reversed(self.events) if event.get("key") == key), None)

    @property
    def test(self) -> float | None:
        """The metric on the test split, at the end."""
        found = self.value(f"sl_test_{self.config.get('metric')}")
        return None if found is None else float(found)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of rank 0 by phase, over the whole run."""
        found = dict(self.value("sl_phases") or (self.evaluations[-1].phases if self.evaluations else {}))
        found.pop("elapsed", None)
        return found

    @property
    def elapsed(self) -> float | None:
        """Seconds from `run_start` to `run_stop`, as rank 0's clock has them."""
        found = self.value("sl_phases")
        if isinstance(found, dict) and "elapsed" in found:
            return float(found["elapsed"])
        return self.evaluations[-1].elapsed if self.evaluations else None

    def hit(self, target: float, higher_is_better: bool) -> Evaluation | None:
        """The first evaluation that is as good as the target."""
        for one in self.evaluations:
            good = one.metric >= target if higher_is_better else one.metric <= target
            if good and not math.isnan(one.metric):
                return one
        return None

    def best(self, higher_is_better: bool) -> float | None:
        """The best metric of its evaluations."""
        found = [one.metric for one in self.evaluations if not math.isnan(one.metric)]
        return (max(found) if higher_is_better else min(found)) if found else None


@dataclass
class Race:
    """A whole race. `problems` names what is missing, edited or of mixed versions, whatever run it is about."""

    path: Path
    plan: Plan
    lines: list[dict[str, Any]]
    runs: list[RanRun]
    system: dict[str, Any]
    problems: list[str]

    def of(self, entry: str, kind: str = "race", workers: int | None = None) -> list[RanRun]:
        """An entry's runs that count, seed by seed."""
        return [
            run
            for run in self.runs
            if run.entry == entry
            and run.kind == kind
            and run.excluded is None
            and run.status not in ("interrupted", "running")
            and (workers is None or run.workers == workers)
        ]

    def of_kind(self, kind: str) -> list[RanRun]:
        """All runs of a kind that have an end of their own."""
        return [run for run in self.runs if run.kind == kind and _counts(run)]

    def choose_rate(self, entry: Entry) -> dict[str, Any]:
        """The factor of the learning rate with the best last validation metric, and what was tried."""
        higher = self.plan.higher_is_better
        ended = [run for run in self.of(entry.name, "tuning") if run.status == "finished" and run.evaluations]
        tried = {run.factor: run.evaluations[-1].metric for run in ended}
        known = {factor: metric for factor, metric in tried.items() if factor is not None and not math.isnan(metric)}
        # Where none has ended well, the rate stays as it was.
        best = (max if higher else min)(known, key=lambda factor: known[factor]) if known else 1.0
        rate = (entry.learning_rate or 0.0) * best
        return {"learning_rate": rate, "factor": best, "tried": {f"{key:g}": value for key, value in known.items()}}

    @property
    def rates(self) -> dict[str, float]:
        """What tuning has found."""
        return {str(line["entry"]): float(line["learning_rate"]) for line in self.lines if line.get("event") == "tuned"}

    @property
    def entries(self) -> tuple[Entry, ...]:
        """With the rates that they ran with."""
        return self.plan.tuned(self.rates)

    def left(self) -> list[PlannedRun]:
        """Runs that are planned and have no end yet."""
        ended = {(run.kind, run.entry, run.workers, run.seed) for run in self.runs if _counts(run)}
        planned = self.plan.runs(self.rates)
        return [run for run in planned if (run.kind, run.entry.name, run.workers, run.seed) not in ended]


def _counts(run: RanRun) -> bool:
    return run.status not in ("interrupted", "running")


def read_race(path: str | Path) -> Race:
    """Everything that a race's folder holds; a sentence where it is none."""
    path = Path(path)
    if not (path / PLAN).exists():
        raise SpecError(f"{path} is not a race's folder: it has no {PLAN}; a race makes one: syncline race digits -n 4")
    plan = Plan.from_json((path / PLAN).read_text(), str(path / PLAN))
    problems: list[str] = []
    lines: list[dict[str, Any]] = []
    if (path / REGISTRY).exists():
        lines, problems = read_registry(path / REGISTRY)
    else:
        problems = [f"{REGISTRY} is missing: what was run is not known"]
    planned = next((line for line in lines if line.get("event") == "planned"), None)
    if planned is not None and planned.get("plan_sha256") != sha256(path / PLAN):
        problems.append(f"{PLAN} was changed after the race began")
    runs = _runs(path, lines)
    for run in runs:
        problems += run.problems
    problems += _strangers(path, runs)
    system = _document(path / SYSTEM, problems)
    problems += mixed(plan, runs)
    return Race(path, plan, lines, runs, system, problems)


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], list[str]]:
    """A run's configuration, system, log and what is wrong with them."""
    problems: list[str] = []
    events: list[dict[str, Any]] = []
    try:
        events = read_log(folder)
    except FileNotFoundError:
        problems.append(f"{folder.name}/log.jsonl is missing")
    except OSError as error:
        problems.append(f"{folder.name}/log.jsonl cannot be read: {error.strerror or error}")
    except ProtocolError as error:
        problems.append(str(error))
    return _document(folder / "config.json", problems), _document(folder / "system.json", problems), events, problems


def _runs(path: Path, lines: Sequence[dict[str, Any]]) -> list[RanRun]:
    found: dict[str, RanRun] = {}
    for line in lines:
        name, event = str(line.get("run")), line.get("event")
        if event == "begun" and ".." not in Path(name).parts and not Path(name).is_absolute():
            facts: dict[str, Any] = {key: line.get(key) for key in ("kind", "entry", "workers", "seed", "factor")}
            found[name] = RanRun(folder=name, status="running", reason=None, seconds=None, **facts)
        elif event == "ended" and name in found:
            run = found[name]
            run.status, run.reason = line.get("status", "failed"), line.get("reason")
            run.seconds = line.get("seconds")
            run.problems += _edited(path, name, line.get("files", {}))
        elif event == "excluded" and name in found:
            found[name].excluded = str(line.get("reason") or "")
    for run in found.values():
        run.config, run.system, run.events, problems = read_run(path / run.folder)
        if run.status in ("finished",):  # others may have died before they wrote anything
            run.problems += [problem for problem in problems if problem not in run.problems]
    return list(found.values())


def _edited(path: Path, name: str, sums: dict[str, str]) -> list[str]:
    problems = []
    for file in FILES:
        there = path / name / file
        if file in sums and not there.exists():
            problems.append(f"{name}/{file} is missing")
        elif file in sums and sha256(there) != sums[file]:
            problems.append(f"{name}/{file} was edited after the run")
    return problems


def _strangers(path: Path, runs: Sequence[RanRun]) -> list[str]:
    known = {run.folder for run in runs}
    logs = sorted([*path.glob("runs/*/*/log.jsonl"), *path.glob("tuning/*/*/log.jsonl")])
    names = [log.parent.relative_to(path).as_posix() for log in logs]
    return [f"{name} is not in the registry" for name in names if name not in known]


def mixed(plan: Plan, runs: Sequence[RanRun]) -> list[str]:
    """Runs of other code than the plan was made with."""
    problems = []
    for run in runs:
        digest = run.config.get("code_digest")
        if digest is not None and plan.code_digest and digest != plan.code_digest:
            problems.append(
                f"{run.folder} ran other code ({run.config.get('code_version')}, {digest}) than the race was planned "
                f"with ({plan.code_version}, {plan.code_digest})"
            )
    return problems


def _document(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        problems.append(f"{path.parent.name}/{path.name} is missing")
        return {}
    except OSError as error:
        problems.append(f"{path.parent.name}/{path.name} cannot be read: {error.strerror or error}")
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(f"{path} is not JSON: {error}")
        return {}
    return found if isinstance(found, dict) else {}
