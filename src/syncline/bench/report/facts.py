"""One run in numbers, taken from its own log: nothing that anybody else has summed up is believed."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from syncline.bench.race.plan import Plan
from syncline.bench.race.reading import Evaluation, RanRun
from syncline.bench.report.staleness import counts_of

__all__ = ["RunFacts", "run_facts"]


@dataclass
class RunFacts:
    """What a report tells of a run. Times are seconds; None is what the log does not have.

    `time_to_target` is infinite where the run failed or never got there.
    """

    folder: str
    kind: str
    entry: str
    workers: int
    seed: int
    factor: float | None
    status: str
    reason: str | None
    excluded: str | None
    time_to_target: float = math.inf
    epochs_to_target: float = math.inf
    bytes_to_target: float = math.inf
    steps_to_target: int | None = None
    best: float | None = None
    last: float | None = None
    test: float | None = None
    steps: int = 0
    samples: int = 0
    elapsed: float | None = None
    """From the first step to the end, evaluations and all, on the clock of the run."""
    worker_seconds: float = 0.0
    """Workers × seconds, the start of processes included; in a simulation, seconds of its own clock."""
    phases: dict[str, float] = field(default_factory=dict)
    communication: float | None = None
    codec: float | None = None
    staleness: float | None = None
    staleness_mean: float | None = None
    staleness_counts: dict[int, int] = field(default_factory=dict)
    """How often which staleness was met, by all workers where the log has them."""
    consensus: float | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    problem: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it is part of the result; an interrupted run is begun again, an excluded one has its reason."""
        return self.excluded is None and self.status not in ("interrupted", "running")

    @property
    def hit(self) -> Evaluation | None:
        """The evaluation that found the target reached."""
        return next((one for one in self.evaluations if one.step == self.steps_to_target), None)

    @property
    def reached(self) -> bool:
        return math.isfinite(self.time_to_target)

    @property
    def step_seconds(self) -> float | None:
        """Of one training step: compute, waiting, codec and data, without evaluations."""
        spent = [self.phases.get(name, 0.0) for name in ("compute", "exposed", "codec", "data")]
        return sum(spent) / self.steps if self.steps and self.phases else None

    @property
    def throughput(self) -> float | None:
        """Samples a second, all workers together, everything inside the clock."""
        return self.samples / self.elapsed if self.samples and self.elapsed else None


def run_facts(run: RanRun, plan: Plan) -> RunFacts:
    """Take a run apart. A log that makes no sense makes a run that failed, with the reason."""
    facts = RunFacts(
        run.folder, run.kind, run.entry, run.workers, run.seed, run.factor, run.status, run.reason, run.excluded
    )
    try:
        _read(facts, run, plan)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        facts.problem = f"{run.folder}/log.jsonl cannot be understood ({type(error).__name__}: {error})"
        facts.time_to_target = facts.epochs_to_target = facts.bytes_to_target = math.inf
        facts.status = "failed" if facts.status == "finished" else facts.status
        facts.reason = facts.reason or facts.problem
        facts.evaluations, facts.phases = [], {}
    return facts


def _read(facts: RunFacts, run: RanRun, plan: Plan) -> None:
    found = [_checked(one) for one in run.evaluations]
    facts.evaluations = found
    facts.phases = {name: float(seconds) for name, seconds in run.phases.items()}
    facts.elapsed, facts.test = run.elapsed, run.test
    simulated = plan.place.kind == "simulated"
    facts.worker_seconds = run.workers * float((run.elapsed if simulated else run.seconds) or 0.0)
    facts.best = run.best(plan.higher_is_better)
    if found:
        facts.last, facts.steps, facts.samples = found[-1].metric, found[-1].step, found[-1].samples
        facts.staleness, facts.consensus = found[-1].staleness, found[-1].consensus
        facts.staleness_mean = statistics.fmean(one.staleness for one in found)
    facts.staleness_counts = counts_of(run.value("sl_staleness_histogram"))
    facts.communication, facts.codec = (_number(run.value(f"sl_{what}_seconds")) for what in ("comm", "codec"))
    told = run.config.get("predicted")
    facts.predicted = {key: float(value) for key, value in told.items()} if isinstance(told, dict) else {}
    hit = run.hit(plan.target, plan.higher_is_better) if run.status == "finished" and run.kind != "tuning" else None
    if hit is not None:
        facts.time_to_target, facts.epochs_to_target = hit.elapsed, hit.epochs
        facts.bytes_to_target, facts.steps_to_target = hit.bytes_wire, hit.step


def _checked(one: Evaluation) -> Evaluation:
    """As it is, if its numbers are numbers. The metric alone may be NaN or infinite: then training has diverged."""
    if not isinstance(one.phases, dict):
        raise TypeError(f"the evaluation after step {one.step} has phases {one.phases!r}")
    for name in ("elapsed", "samples", "epochs", "bytes_wire", "staleness"):
        number: Any = getattr(one, name)
        if isinstance(number, str) or not 0 <= float(number) < math.inf:
            raise TypeError(f"the evaluation after step {one.step} has {name} {number!r}")
    return one


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
