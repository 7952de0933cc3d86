"""The facts of one run and of one entry, computed only from the raw log and the plan."""

from __future__ import annotations

import inspect
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from syncline.bench.answer_cache import cache_answers
from syncline.bench.race.plan import RaceEntry, RacePlan
from syncline.bench.runlog import LoggedEvaluation, RunRecord
from syncline.bench.step_measurements import measure_step, rank_computation
from syncline.errors import SynclineError
from syncline.planner.measured_limits import StepMeasurement
from syncline.specs import Spec, parse

__all__ = ["RunFacts", "SettingsCount", "add_histograms", "count_settings", "run_facts", "staleness_rows"]

TRAINING_SETTINGS = ("learning rate", "batch", "momentum")
"""Settings of every entry."""
SCHEDULE_DEFAULTS = {"scaling": "none", "warmup": 0.0, "decay": "none"}
"""Settings that count only if they differ from these."""


@dataclass
class RunFacts:
    """A run in the report. Times are in seconds; None stands for values that the log does not have.

    `time_to_target` is infinite if the run failed or did not reach the target.
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
    """From the first step to the end, with evaluations, on the clock of the run."""
    worker_seconds: float = 0.0
    """Workers × seconds, with the start of the processes; in a simulation, virtual seconds."""
    phases: dict[str, float] = field(default_factory=dict)
    communication: float | None = None
    codec: float | None = None
    staleness: float | None = None
    staleness_mean: float | None = None
    staleness_counts: dict[int, int] = field(default_factory=dict)
    """Number of reads by staleness, of all workers if the log has them."""
    consensus: float | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    evaluations: list[LoggedEvaluation] = field(default_factory=list)
    step: StepMeasurement | None = None
    """The mean step until the last evaluation."""
    problem: str | None = None

    @property
    def counts(self) -> bool:
        """True if the run is part of the result: it is neither interrupted nor excluded."""
        return self.excluded is None and self.status not in ("interrupted", "running")

    @property
    def hit(self) -> LoggedEvaluation | None:
        """The first evaluation that reached the target."""
        return next((one for one in self.evaluations if one.step == self.steps_to_target), None)

    @property
    def reached(self) -> bool:
        return math.isfinite(self.time_to_target)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a training step: compute, waiting, codec and data, without evaluations."""
        spent = [self.phases.get(name, 0.0) for name in ("compute", "exposed", "codec", "data")]
        return sum(spent) / self.steps if self.steps and self.phases else None

    @property
    def throughput(self) -> float | None:
        """Samples per second of all workers, with evaluations."""
        return self.samples / self.elapsed if self.samples and self.elapsed else None


def run_facts(run: RunRecord, plan: RacePlan) -> RunFacts:
    """The facts of a run. A log that cannot be understood counts as a failed run."""
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
        facts.evaluations, facts.phases, facts.step = [], {}, None
    return facts


def _read(facts: RunFacts, run: RunRecord, plan: RacePlan) -> None:
    evaluations = [_checked(one) for one in run.evaluations]
    facts.evaluations = evaluations
    facts.phases = {name: float(seconds) for name, seconds in run.phases.items()}
    facts.elapsed, facts.test = run.elapsed, run.test
    simulated = plan.place.kind == "simulated"
    facts.worker_seconds = run.workers * float((run.elapsed if simulated else run.seconds) or 0.0)
    facts.best = run.best(plan.higher_is_better)
    if evaluations:
        last = evaluations[-1]
        facts.last, facts.steps, facts.samples = last.metric, last.step, last.samples
        facts.staleness, facts.consensus = last.staleness, last.consensus
        facts.staleness_mean = statistics.fmean(one.staleness for one in evaluations)
    facts.staleness_counts = read_histogram(run.value("sl_staleness_histogram"))
    facts.step = _measured_step(run, evaluations)
    facts.communication, facts.codec = (_to_float(run.value(f"sl_{what}_seconds")) for what in ("comm", "codec"))
    predicted = run.config.get("predicted")
    facts.predicted = {key: float(value) for key, value in predicted.items()} if isinstance(predicted, dict) else {}
    hit = run.hit(plan.target, plan.higher_is_better) if run.status == "finished" and run.kind != "tuning" else None
    if hit is not None:
        facts.time_to_target, facts.epochs_to_target = hit.elapsed, hit.epochs
        facts.bytes_to_target, facts.steps_to_target = hit.bytes_wire, hit.step


def _measured_step(run: RunRecord, evaluations: Sequence[LoggedEvaluation]) -> StepMeasurement | None:
    if not evaluations:
        return None
    last = evaluations[-1]
    spent = {"phases": last.phases, "communication": last.communication, "update": last.update}
    ranks = rank_computation(line.get("value") for line in run.lines("sl_ranks"))
    return measure_step({"workers": run.workers, **run.config}, spent, last.step, ranks)


def _checked(one: LoggedEvaluation) -> LoggedEvaluation:
    """Check the numbers of an evaluation. Only the metric may be NaN or infinite, if training has diverged."""
    if not isinstance(one.phases, dict):
        raise TypeError(f"the evaluation after step {one.step} has phases {one.phases!r}")
    for name in ("elapsed", "samples", "epochs", "bytes_wire", "staleness"):
        number: Any = getattr(one, name)
        if isinstance(number, str) or not 0 <= float(number) < math.inf:
            raise TypeError(f"the evaluation after step {one.step} has {name} {number!r}")
    return one


def _to_float(value: Any) -> float | None:
    return None if value is None else float(value)


@dataclass(frozen=True)
class StalenessRow:
    """The staleness of an entry's reads, as shares by bin."""

    entry: str
    reads: int
    mean: float
    most: int
    shares: tuple[float, ...]
    """One for each bin of the table."""


def read_histogram(histogram: Any) -> dict[int, int]:
    """The value of `sl_staleness_histogram` as numbers.

    >>> read_histogram({"0": 3, "2": 1})
    {0: 3, 2: 1}
    """
    if histogram is None:
        return {}
    counts = {int(key): int(count) for key, count in histogram.items()}
    if any(key < 0 or count < 0 for key, count in counts.items()):
        raise ValueError(f"a staleness or a count below 0: {histogram}")
    return counts


def add_histograms(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum of several histograms.

    >>> add_histograms([{0: 1}, {0: 2, 5: 1}])
    {0: 3, 5: 1}
    """
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(sorted(total.items()))


def staleness_bins(most: int) -> list[tuple[int, int]]:
    """First and last staleness of each bin. The width of the bins doubles.

    >>> staleness_bins(11)
    [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]
    """
    bins, high = [(0, 0)], 1
    while bins[-1][1] < most:
        bins.append((bins[-1][1] + 1, high))
        high *= 2
    return bins


def staleness_rows(histograms: Mapping[str, Mapping[int, int]]) -> tuple[list[str], list[StalenessRow]]:
    """The headings of the columns, and a row for each entry that has a histogram.

    >>> heads, (row,) = staleness_rows({"ssp": {0: 1, 3: 3}, "allreduce": {}})
    >>> heads, row.shares, row.mean
    (['0', '1', '2', '3–4'], (0.25, 0.0, 0.0, 0.75), 2.25)
    """
    known = {name: counts for name, counts in histograms.items() if sum(counts.values())}
    columns = staleness_bins(max((max(counts) for counts in known.values()), default=0))
    heads = [str(low) if low == high else f"{low}–{high}" for low, high in columns]
    return heads if known else [], [_row(name, counts, columns) for name, counts in known.items()]


def _row(name: str, counts: Mapping[int, int], columns: Sequence[tuple[int, int]]) -> StalenessRow:
    reads = sum(counts.values())
    shares = [sum(count for key, count in counts.items() if low <= key <= high) / reads for low, high in columns]
    mean = sum(key * count for key, count in counts.items()) / reads
    return StalenessRow(name, reads, mean, max(key for key, count in counts.items() if count), tuple(shares))


@dataclass(frozen=True)
class SettingsCount:
    """Number of hyper-parameters of an entry. None if its package is not installed here."""

    strategy: int | None
    codec: int | None
    training: int
    chosen: int
    """Arguments in its specs, and training settings that differ from the workload's."""

    @property
    def total(self) -> int | None:
        """All settings that a user can change."""
        if self.strategy is None or self.codec is None:
            return None
        return self.strategy + self.codec + self.training


def count_settings(entry: RaceEntry) -> SettingsCount:
    """Count the constructor arguments of the strategy and the codecs, and the settings of the training.

    >>> found = count_settings(RaceEntry(name="a", codec="topk(0.01)|quantize(4)", learning_rate=0.1))
    >>> found.total == found.strategy + found.codec + 3, found.chosen
    (True, 3)
    """
    used = [name for name, default in SCHEDULE_DEFAULTS.items() if getattr(entry, name) != default]
    chosen = len(used) + (entry.rate_from != "workload" or entry.learning_rate is not None)
    chosen += entry.momentum is not None
    links: list[Spec] = []
    with suppress(SynclineError):
        links = [*parse(entry.strategy), *(parse(entry.codec) if entry.codec else ())]
    return SettingsCount(
        strategy=_count_arguments("strategy", entry.strategy),
        codec=_count_arguments("codec", entry.codec) if entry.codec else 0,
        training=len(TRAINING_SETTINGS) + len(used),
        chosen=chosen + sum(len(link.args) + len(link.kwargs) for link in links),
    )


def _count_arguments(kind: str, spec: str) -> int | None:
    """Arguments of a strategy, or of all codecs of a chain; None if its package is missing here."""
    try:
        return sum(_constructor_arguments(kind, str(link)) for link in parse(spec))
    except (SynclineError, ImportError):
        return None


@cache_answers
def _constructor_arguments(kind: str, spec: str) -> int:
    from syncline.bench.race.entries import build_race_strategy
    from syncline.codecs import build_codec

    built = build_race_strategy(spec) if kind == "strategy" else build_codec(spec)
    return 0 if built is None else len(inspect.signature(type(built)).parameters)
