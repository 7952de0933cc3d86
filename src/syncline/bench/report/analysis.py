"""A race in numbers: the runs of each entry together, seed by seed.

Each number is a median with an interval:

```text
seeds                             interval                                                        `kind`
six or more                       two order statistics, 95 % for the median, for any noise        "order"
three to five, all finite         Student's t on the logarithms, 95 % for the median if the       "student"
                                  logarithms are normal
fewer, or an infinite one         the smallest and the largest, without a confidence              "range"
```

A run that failed or did not reach the target has an infinite time. It counts, and moves the median.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from syncline.bench.measuring import summarize
from syncline.bench.race.plan import RaceEntry, RacePlan
from syncline.bench.race.predictions import EntryPrediction, RacePredictions
from syncline.bench.report.facts import RunFacts, SettingsCount, add_histograms, count_settings, run_facts
from syncline.bench.runlog import RaceRecord
from syncline.planner.limits import Limit
from syncline.planner.measured_limits import measured_limits

__all__ = [
    "Analysis",
    "EntryFacts",
    "ScalingPoint",
    "Spread",
    "StepComparison",
    "StepPrediction",
    "analyse",
    "paired",
    "spread",
]

IntervalKind = Literal["order", "student", "range"]

STUDENT_T = {3: 4.3027, 4: 3.1824, 5: 2.7764}
"""The 97.5 % quantile of Student's t, by the number of samples."""


@dataclass(frozen=True)
class Spread:
    """A median and its interval. `least` and `most` are the extreme samples."""

    median: float
    low: float
    high: float
    kind: IntervalKind
    samples: int
    least: float
    most: float

    @property
    def finite(self) -> bool:
        """True if the median is finite."""
        return math.isfinite(self.median)

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        edges = {name: factor * getattr(self, name) for name in ("median", "low", "high", "least", "most")}
        return replace(self, **edges)

    def describe(self) -> str:
        """The kind of the interval, for the report."""
        seeds = f"{self.samples} seed{'s' if self.samples != 1 else ''}"
        if self.kind == "order":
            return f"95 % interval of the median, {seeds}"
        return f"95 % t interval of the logarithm, {seeds}" if self.kind == "student" else f"range of {seeds}"


def spread(samples: Sequence[float], logarithmic: bool = True) -> Spread | None:
    """The median and interval of some samples; None if there are none. Without `logarithmic` few samples have a range.

    >>> found = spread([2.0, 4.0, 8.0])
    >>> found.median, found.kind, round(found.low, 2), round(found.high, 2)
    (4.0, 'student', 0.71, 22.38)
    >>> spread([2.0, float("inf"), 3.0]).kind
    'range'
    >>> spread([5.0, 1.0, 4.0, 2.0, 3.0, float("inf")]).high
    inf
    """
    if not samples:
        return None
    summary = summarize(samples)
    least, most = min(samples), max(samples)
    median = summary.median
    low, high, kind = least, most, _kind(samples, logarithmic)
    if kind == "order" and summary.low is not None and summary.high is not None:
        low, high = summary.low, summary.high
    elif kind == "student":
        logs = [math.log(sample) for sample in samples]
        centre = statistics.fmean(logs)
        reach = STUDENT_T[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
        # The interval is centred at the geometric mean; the median of few samples may lie outside.
        low, high = min(median, math.exp(centre - reach)), max(median, math.exp(centre + reach))
    return Spread(median, low, high, kind, len(samples), least, most)


def _kind(samples: Sequence[float], logarithmic: bool) -> IntervalKind:
    if len(samples) > max(STUDENT_T):
        return "order"
    positive = all(math.isfinite(sample) and sample > 0 for sample in samples)
    return "student" if logarithmic and len(samples) in STUDENT_T and positive else "range"


@dataclass(frozen=True)
class StepPrediction:
    """The step time that `costs` predicts, and the measured one; medians over seeds, in seconds.

    The prediction is the sum of measured compute, codec and communication (`step_high`). If they can overlap (several
    buckets, or stale gradients), it is at least the longer of compute and communication (`step_low`).
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
class StepComparison:
    """The step of an entry that was predicted before the race, beside the measured one; in seconds."""

    workers: int
    predicted: EntryPrediction
    measured: float | None
    """Median over the seeds; None if no run has ended."""

    @property
    def ratio(self) -> float | None:
        """Measured ÷ predicted."""
        if self.measured is None or not self.predicted.step_s:
            return None
        return self.measured / self.predicted.step_s

    @property
    def inside(self) -> bool | None:
        """Whether the measured step lies in the interval of the prediction."""
        if self.measured is None or self.predicted.interval_s is None:
            return None
        low, high = self.predicted.interval_s
        return low <= self.measured <= high


@dataclass(frozen=True)
class ScalingPoint:
    """An entry on one number of workers."""

    workers: int
    runs: int
    reached: int
    time: Spread
    throughput: float | None
    test: Spread | None
    efficiency: float | None
    """Throughput ÷ (workers × throughput of one worker)."""
    speedup: float | None
    """Median time to target of one worker ÷ that of these workers."""


@dataclass
class EntryFacts:
    """An entry, over all its runs that count."""

    name: str
    strategy: str
    codec: str | None
    learning_rate: float | None
    rate_from: str
    outsider: bool
    """True for the implementation of another library."""
    planned: int
    statuses: dict[str, int]
    reached: int
    time: Spread | None
    ratio: Spread | None
    """Time to target ÷ time of the baseline, paired by seed."""
    epochs: Spread | None
    bytes: Spread | None
    best: Spread | None
    test: Spread | None
    step: Spread | None
    phases: dict[str, float]
    """Seconds per step by phase, with evaluations divided by the steps; `rest` belongs to no phase."""
    shares: dict[str, float]
    """The phases as shares of their sum."""
    worker_seconds: float
    tuning_runs: int
    tuning_worker_seconds: float
    knobs: SettingsCount
    prediction: StepPrediction | None
    staleness: float | None
    staleness_mean: float | None
    staleness_counts: dict[int, int]
    """Number of reads by staleness, of all its runs."""
    consensus: float | None
    comparisons: list[StepComparison] = field(default_factory=list)
    """Predicted and measured steps, one for each number of workers. Empty if the race has no predictions."""
    limits: list[Limit] = field(default_factory=list)
    """What limits its step, of the run with the median step; the largest first."""
    scaling: list[ScalingPoint] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(self.statuses.values())

    @property
    def slowest_to_fastest(self) -> float | None:
        """The time of the slowest seed ÷ the time of the fastest."""
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
    """Planned runs that have no result yet."""
    problems: list[str]

    @property
    def finished(self) -> bool:
        return not self.left

    def entry(self, name: str) -> EntryFacts:
        return next(entry for entry in self.entries if entry.name == name)

    def of(self, name: str, kind: str = "race") -> list[RunFacts]:
        """The runs of an entry that count, by workers and seed."""
        runs = [run for run in self.runs if run.entry == name and run.kind == kind and run.counts]
        return sorted(runs, key=lambda run: (run.workers, run.seed))


def analyse(race: RaceRecord) -> Analysis:
    """Everything in the report, computed from the logs."""
    plan = race.plan
    runs = [run_facts(run, plan) for run in race.runs]
    problems = [*race.problems, *(problem for run in race.runs for problem in run.problems)]
    problems += [run.problem for run in runs if run.problem]
    baseline = _baseline(plan.entries)
    analysis = Analysis(
        metric=plan.metric,
        target=plan.target,
        higher_is_better=plan.higher_is_better,
        workers=plan.workers,
        simulated=plan.place.kind == "simulated",
        baseline=None if baseline is None else baseline.name,
        entries=[],
        runs=runs,
        planned=len(plan.runs()) + len(plan.tuning_runs()),
        left=[run.folder for run in race.remaining()],
        problems=list(dict.fromkeys(problems)),
    )
    base = {} if baseline is None else {run.seed: run.time_to_target for run in analysis.of(baseline.name)}
    analysis.entries = [_entry(entry, analysis, plan, base) for entry in race.entries]
    for entry in analysis.entries:
        entry.comparisons = _comparisons(entry.name, analysis, race.predictions)
        entry.limits = _limits(analysis.of(entry.name), race.predictions)
    return analysis


def _limits(runs: Sequence[RunFacts], predictions: RacePredictions | None) -> list[Limit]:
    """The limits of the run with the median step."""
    steps = sorted((run.step for run in runs if run.step is not None), key=lambda step: step.seconds)
    if not steps:
        return []
    share = None if predictions is None else predictions.batch_fixed_share
    return list(measured_limits(replace(steps[(len(steps) - 1) // 2], batch_fixed_share=share)))


def _comparisons(name: str, race: Analysis, predictions: RacePredictions | None) -> list[StepComparison]:
    if predictions is None:
        return []
    runs = [*race.of(name), *race.of(name, "scaling")]
    found = []
    for each in predictions.entries:
        if each.entry == name:
            measured = _median(run.step_seconds for run in runs if run.workers == each.workers)
            found.append(StepComparison(each.workers, each, measured))
    return found


def _baseline(entries: Sequence[RaceEntry]) -> RaceEntry | None:
    """The baseline of the ratios: plain ddp, else plain allreduce, else the first entry."""
    for strategy in ("ddp", "allreduce"):
        for entry in entries:
            if entry.strategy == strategy and not entry.codec:
                return entry
    return entries[0] if entries else None


def _entry(entry: RaceEntry, race: Analysis, plan: RacePlan, base: dict[int, float]) -> EntryFacts:
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
        knobs=count_settings(entry),
        prediction=_prediction(runs),
        staleness=_median(run.staleness for run in runs),
        staleness_mean=_median(run.staleness_mean for run in runs),
        staleness_counts=add_histograms(run.staleness_counts for run in runs),
        consensus=_median(run.consensus for run in runs),
        scaling=_scaling(everything) if plan.scaling_workers else [],
        failures=[
            f"{run.folder}: {run.status}, {_first_line(run.reason)}" for run in everything if run.status != "finished"
        ],
    )


def paired(times: dict[int, float], base: dict[int, float]) -> Spread | None:
    """Ratios of times, paired by seed. A seed with which neither reached the target is left out. If only `base` reached
    it, the ratio is infinite; if only `times` did, it is 0.

    >>> paired({1: 2.0, 2: 4.0}, {1: 4.0, 2: 8.0}).median
    0.5
    """
    ratios = []
    for seed in sorted(times.keys() & base.keys()):
        own, other = times[seed], base[seed]
        if math.isfinite(own) or math.isfinite(other):
            ratios.append(own / other if other > 0 else math.inf)
    return spread(ratios)


def _phases(runs: Sequence[RunFacts]) -> dict[str, float]:
    """Median seconds per step by phase, until the target or else until the end, and the rest of the elapsed time."""
    per_run: list[dict[str, float]] = []
    for run in runs:
        hit = run.hit
        phases, elapsed, steps = (
            (run.phases, run.elapsed, run.steps) if hit is None else (hit.phases, hit.elapsed, hit.step)
        )
        if steps and phases and elapsed and run.status == "finished":
            rest = max(0.0, elapsed - sum(phases.values()))
            per_run.append({name: seconds / steps for name, seconds in {**phases, "rest": rest}.items()})
    names = list(dict.fromkeys(name for one in per_run for name in one))
    return {name: max(0.0, statistics.median(one.get(name, 0.0) for one in per_run)) for name in names}


def _prediction(runs: Sequence[RunFacts]) -> StepPrediction | None:
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
    return StepPrediction(
        communication=communication,
        codec=codec,
        step_low=max(compute, communication) + codec if overlaps else high,
        step_high=high,
        measured_communication=_median(_per_step(run.communication, run) for run in usable),
        measured_exposed=middle(lambda run: run.phases.get("exposed", 0.0) / run.steps),
        measured_codec=_median(_per_step(run.codec, run) for run in usable),
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


def _per_step(seconds: float | None, run: RunFacts) -> float | None:
    return None if seconds is None else seconds / run.steps


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _first_line(reason: str | None) -> str:
    return (reason or "no reason is recorded").strip().splitlines()[0]
