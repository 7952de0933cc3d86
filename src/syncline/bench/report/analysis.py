"""A race in numbers: every entry's runs taken together, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from syncline.bench.race.plan import Entry, Plan
from syncline.bench.race.reading import Race
from syncline.bench.report.facts import RunFacts, run_facts
from syncline.bench.report.knobs import Knobs, count_knobs
from syncline.bench.report.spread import Spread, spread
from syncline.bench.report.staleness import summed

__all__ = ["Analysis", "EntryFacts", "Prediction", "ScalingPoint", "analyse", "paired"]


@dataclass(frozen=True)
class Prediction:
    """What `costs` expected of a step, beside what was measured; medians over seeds, in seconds.

    A step is predicted as the compute that was measured, the codec and the communication, one after the other
    (`step_high`). Where they may overlap (several buckets, or stale gradients) it is at least the longer of compute
    and communication (`step_low`).
    """

    communication: float
    codec: float
    step_low: float
    step_high: float
    measured_communication: float | None
    measured_exposed: float
    measured_codec: float | None
    measured_step: float


@dataclass(frozen=True)
class ScalingPoint:
    """An entry on so many workers."""

    workers: int
    runs: int
    reached: int
    time: Spread
    throughput: float | None
    test: Spread | None
    efficiency: float | None
    """Throughput ÷ (workers × throughput of one worker)."""
    speedup: float | None
    """Median time to target of one worker ÷ of these."""


@dataclass
class EntryFacts:
    """One entry, over all its runs that count."""

    name: str
    strategy: str
    codec: str | None
    learning_rate: float | None
    rate_from: str
    outsider: bool
    """Somebody else's."""
    planned: int
    statuses: dict[str, int]
    reached: int
    time: Spread | None
    ratio: Spread | None
    """Time to target ÷ that of the baseline, seed by seed."""
    epochs: Spread | None
    bytes: Spread | None
    best: Spread | None
    test: Spread | None
    step: Spread | None
    phases: dict[str, float]
    """Seconds of a step by phase, evaluations spread over the steps; `rest` is what no phase has."""
    shares: dict[str, float]
    """The same as parts of the whole."""
    worker_seconds: float
    tuning_runs: int
    tuning_worker_seconds: float
    knobs: Knobs
    prediction: Prediction | None
    staleness: float | None
    staleness_mean: float | None
    staleness_counts: dict[int, int]
    """How often which staleness was met, in all its runs together."""
    consensus: float | None
    scaling: list[ScalingPoint] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(self.statuses.values())

    @property
    def unsteady(self) -> float | None:
        """The slowest seed's time ÷ the fastest one's."""
        return self.time.most / self.time.least if self.time is not None and self.time.least > 0 else None


@dataclass
class Analysis:
    """A whole race."""

    metric: str
    target: float
    higher_is_better: bool
    workers: int
    simulated: bool
    baseline: str | None
    entries: list[EntryFacts]
    runs: list[RunFacts]
    planned: int
    left: list[str]
    """Planned runs that have no end yet."""
    problems: list[str]

    @property
    def finished(self) -> bool:
        return not self.left

    def entry(self, name: str) -> EntryFacts:
        return next(entry for entry in self.entries if entry.name == name)

    def of(self, name: str, kind: str = "race") -> list[RunFacts]:
        """An entry's runs that count, by seed."""
        found = [run for run in self.runs if run.entry == name and run.kind == kind and run.counts]
        return sorted(found, key=lambda run: (run.workers, run.seed))


def analyse(race: Race) -> Analysis:
    """Everything that a report tells, computed from the logs."""
    plan = race.plan
    runs = [run_facts(run, plan) for run in race.runs]
    told = [*race.problems, *(problem for run in race.runs for problem in run.problems)]
    told += [run.problem for run in runs if run.problem]
    baseline = _baseline(plan.entries)
    found = Analysis(
        metric=plan.metric,
        target=plan.target,
        higher_is_better=plan.higher_is_better,
        workers=plan.workers,
        simulated=plan.place.kind == "simulated",
        baseline=None if baseline is None else baseline.name,
        entries=[],
        runs=runs,
        planned=len(plan.runs()) + len(plan.tuning_runs()),
        left=[run.folder for run in race.left()],
        problems=list(dict.fromkeys(told)),
    )
    base = {run.seed: run.time_to_target for run in found.of(found.baseline)} if found.baseline else {}
    found.entries = [_entry(entry, found, plan, base) for entry in race.entries]
    return found


def _baseline(entries: Sequence[Entry]) -> Entry | None:
    """What others are compared with: plain ddp, else plain allreduce, else the first."""
    for strategy in ("ddp", "allreduce"):
        for entry in entries:
            if entry.strategy == strategy and not entry.codec:
                return entry
    return entries[0] if entries else None


def _entry(entry: Entry, race: Analysis, plan: Plan, base: dict[int, float]) -> EntryFacts:
    runs = race.of(entry.name)
    tuning = race.of(entry.name, "tuning")
    everything = [*runs, *race.of(entry.name, "scaling")]
    phases = _phases(runs)
    whole = sum(phases.values())
    return EntryFacts(
        name=entry.name,
        strategy=entry.strategy,
        codec=entry.codec,
        learning_rate=entry.learning_rate,
        rate_from=entry.rate_from,
        outsider=entry.baseline,
        planned=len(plan.seeds),
        statuses=dict(Counter(run.status for run in runs)),
        reached=sum(run.reached for run in runs),
        time=spread([run.time_to_target for run in runs]),
        ratio=paired({run.seed: run.time_to_target for run in runs}, base),
        epochs=spread([run.epochs_to_target for run in runs]),
        bytes=spread([run.bytes_to_target for run in runs]),
        best=spread(_known(run.best for run in runs), logarithmic=False),
        test=spread(_known(run.test for run in runs if run.status == "finished"), logarithmic=False),
        step=spread(_known(run.step_seconds for run in runs)),
        phases=phases,
        shares={name: seconds / whole for name, seconds in phases.items()} if whole > 0 else {},
        worker_seconds=sum(run.worker_seconds for run in runs),
        tuning_runs=len(tuning),
        tuning_worker_seconds=sum(run.worker_seconds for run in tuning),
        knobs=count_knobs(entry),
        prediction=_prediction(runs),
        staleness=_median(run.staleness for run in runs),
        staleness_mean=_median(run.staleness_mean for run in runs),
        staleness_counts=summed(run.staleness_counts for run in runs),
        consensus=_median(run.consensus for run in runs),
        scaling=_scaling(everything) if plan.scaling_workers else [],
        failures=[
            f"{run.folder}: {run.status}, {_first_line(run.reason)}" for run in everything if run.status != "finished"
        ],
    )


def paired(times: dict[int, float], base: dict[int, float]) -> Spread | None:
    """Ratios of times seed by seed. A seed on which neither got there says nothing; one that only the other reached
    makes it infinite, one that only this reached makes it 0.

    >>> paired({1: 2.0, 2: 4.0}, {1: 4.0, 2: 8.0}).median
    0.5
    """
    found = []
    for seed in sorted(times.keys() & base.keys()):
        own, other = times[seed], base[seed]
        if math.isfinite(own) or math.isfinite(other):
            found.append(own / other if other > 0 else math.inf)
    return spread(found)


def _phases(runs: Sequence[RunFacts]) -> dict[str, float]:
    """Medians over the seeds of seconds a step until the target, else in all; and what is left of the wall clock."""
    told: list[dict[str, float]] = []
    for run in runs:
        hit = run.hit
        phases, elapsed, steps = (
            (run.phases, run.elapsed, run.steps) if hit is None else (hit.phases, hit.elapsed, hit.step)
        )
        if steps and phases and elapsed and run.status == "finished":
            rest = max(0.0, elapsed - sum(phases.values()))
            told.append({name: seconds / steps for name, seconds in {**phases, "rest": rest}.items()})
    names = list(dict.fromkeys(name for one in told for name in one))
    return {name: max(0.0, statistics.median(one.get(name, 0.0) for one in told)) for name in names}


def _prediction(runs: Sequence[RunFacts]) -> Prediction | None:
    usable = [run for run in runs if run.predicted and run.steps and run.step_seconds is not None]
    if not usable:
        return None

    def middle(of: Callable[[RunFacts], float | None]) -> float:
        return _median(of(run) for run in usable) or 0.0

    communication = middle(lambda run: run.predicted.get("communication"))
    codec = middle(lambda run: run.predicted.get("codec"))
    compute = middle(lambda run: run.phases.get("compute", 0.0) / run.steps)
    overlaps = middle(lambda run: run.predicted.get("buckets")) > 1 or middle(lambda run: run.staleness) > 0
    high = compute + codec + communication
    return Prediction(
        communication=communication,
        codec=codec,
        step_low=max(compute, communication) + codec if overlaps else high,
        step_high=high,
        measured_communication=_median(_a_step(run.communication, run) for run in usable),
        measured_exposed=middle(lambda run: run.phases.get("exposed", 0.0) / run.steps),
        measured_codec=_median(_a_step(run.codec, run) for run in usable),
        measured_step=middle(lambda run: run.step_seconds),
    )


def _scaling(runs: Sequence[RunFacts]) -> list[ScalingPoint]:
    sizes = sorted({run.workers for run in runs})
    speeds = {size: _median(run.throughput for run in runs if run.workers == size) for size in sizes}
    times = {size: spread([run.time_to_target for run in runs if run.workers == size]) for size in sizes}
    alone, slowly = speeds.get(1), times.get(1)
    points = []
    for size in sizes:
        own, time, speed = [run for run in runs if run.workers == size], times[size], speeds[size]
        assert time is not None
        both = slowly is not None and slowly.finite and time.finite and time.median > 0
        points.append(
            ScalingPoint(
                workers=size,
                runs=len(own),
                reached=sum(run.reached for run in own),
                time=time,
                throughput=speed,
                test=spread(_known(run.test for run in own if run.status == "finished"), logarithmic=False),
                efficiency=speed / (size * alone) if speed and alone and size else None,
                speedup=slowly.median / time.median if both and slowly is not None else None,
            )
        )
    return points


def _a_step(seconds: float | None, run: RunFacts) -> float | None:
    return None if seconds is None else seconds / run.steps


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _first_line(reason: str | None) -> str:
    return (reason or "no reason is known").strip().splitlines()[0]
