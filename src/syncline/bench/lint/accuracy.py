"""Rules about accuracy: it is known for every number of workers (1), and measured on unseen data (2)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import combinations

from syncline.bench.lint.base import LintCase, LintRule, Note, some, step_of
from syncline.bench.race.plan import RacePlan
from syncline.bench.race.registry import MAX_SPLIT_DIGESTS, SPLITS, read_splits
from syncline.bench.runlog import RunRecord, finite

__all__ = ["RULES", "check_splits"]

MIN_LOSS_SHARE = 0.01
"""A loss of accuracy below this share of the target, or of one worker's metric, is not reported."""
MAX_OVERLAP_SHARE = 0.005
"""Some data sets contain duplicates. An overlap up to this share of the smaller split is only a warning."""
MAKE_DISJOINT = "make the splits disjoint, and race again: these numbers say nothing about unseen data"


# 1. Accuracy at every number of workers


def _scaling_runs(case: LintCase) -> list[RunRecord]:
    """The runs of a scaling curve; none if the race has one number of workers."""
    runs = [run for run in case.finished if run.kind in ("race", "scaling") and run.excluded is None]
    sizes = {run.workers for run in runs} | set(case.plan.scaling_workers)
    return runs if sizes - {case.plan.workers} else []


def _describe_scaling(case: LintCase) -> str:
    runs = _scaling_runs(case)
    sizes = sorted({run.workers for run in runs})
    return f"{len(runs)} finished runs on {', '.join(map(str, sizes))} workers" if runs else ""


def _check_scaling(case: LintCase) -> Iterator[Note]:
    runs = _scaling_runs(case)
    if not runs:
        return
    for run in runs:
        if not run.evaluations or finite(run.test) is None:
            yield Note(
                f"{run.folder} has a time and {'no test metric' if run.evaluations else 'no evaluation'}: it is a "
                "point of the scaling curve without accuracy"
            )
    finished = {(run.entry, run.workers) for run in runs}
    missing = [entry.name for entry in case.plan.entries if (entry.name, 1) not in finished]
    if missing:
        yield Note(
            f"{some(missing)} has no run on one worker, so the accuracy of {case.plan.workers} workers cannot be "
            "compared with it",
            "race again with --scaling weak or strong, which includes one worker",
        )
    for entry in case.plan.entries:
        yield from _accuracy_losses(case.plan, [run for run in runs if run.entry == entry.name])


def _accuracy_losses(plan: RacePlan, runs: list[RunRecord]) -> Iterator[Note]:
    """Sizes whose metric is worse than one worker's by more than the seeds differ."""
    tests: dict[int, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.workers):
        if run.test is not None and finite(run.test) is not None:
            tests.setdefault(run.workers, []).append(run.test)
    one = tests.pop(1, [])
    for size, several in tests.items() if one else ():
        mean, base = statistics.fmean(several), statistics.fmean(one)
        worse = base - mean if plan.higher_is_better else mean - base
        error = sum(statistics.variance(group) / len(group) for group in (several, one) if len(group) > 1) ** 0.5
        if worse > max(2 * error, MIN_LOSS_SHARE * max(abs(base), abs(plan.target))):
            yield Note(
                f"{runs[0].entry} ends with a test {plan.metric} of {mean:.4g} on {size} workers, {base:.4g} on one",
                "report the loss of accuracy next to the speed",
                "warning",
            )


# 2. Test accuracy


def _describe_test(case: LintCase) -> str:
    evaluations = sum(len(run.evaluations) for run in case.finished)
    digests = sum(len(split) for split in read_splits(case.race.path).values())
    return f"{evaluations} evaluations, digests of {digests} samples" if evaluations or digests else ""


def _check_test(case: LintCase) -> Iterator[Note]:
    scaling = {run.folder for run in _scaling_runs(case)}
    for run in case.finished:
        # Rule 1 reports a point of a scaling curve without its test metric.
        yield from _check_evaluations(run, test_needed=run.folder not in scaling)
    yield from check_splits(case)


def _check_evaluations(run: RunRecord, test_needed: bool = True) -> Iterator[Note]:
    metric, sizes = run.config.get("metric"), run.config.get("samples") or {}
    logged = {(step_of(event), finite(event.get("value"))) for event in run.lines(f"eval_{metric}")}
    for one in run.evaluations:
        if one.split != "validation" or one.count != sizes.get("validation"):
            yield Note(
                f"{run.folder}: step {one.step} was evaluated on {one.count} samples of {one.split!r}, and validation "
                f"has {sizes.get('validation')}"
            )
            return
        if logged and finite(one.metric) is not None and (one.step, one.metric) not in logged:
            yield Note(
                f"{run.folder}: step {one.step} has {metric} {one.metric:.6g}, which no eval_{metric} line confirms"
            )
            return
    yield from _check_fractions(run, sizes)
    yield from _check_test_once(run, f"sl_test_{metric}", test_needed)


def _check_fractions(run: RunRecord, sizes: dict[str, int]) -> Iterator[Note]:
    """An accuracy on n samples is a multiple of 1/n. Other values were measured on other samples."""
    values = [one.metric for one in run.evaluations if finite(one.metric) is not None]
    if run.config.get("metric") != "accuracy" or len(values) < 2 or not all(sizes.get(name) for name in SPLITS):
        return
    fits = {name: sum(_is_fraction(value, sizes[name]) for value in values) for name in SPLITS}
    own = fits["validation"]
    other = max(("train", "test"), key=lambda name: fits[name])
    if own < len(values) and (2 * own > len(values) or fits[other] == len(values)):
        strange = next(value for value in values if not _is_fraction(value, sizes["validation"]))
        also = (
            f"; all values are multiples of 1/{sizes[other]}, the {other} split" if fits[other] == len(values) else ""
        )
        yield Note(
            f"{run.folder}: accuracy {strange:.8g} is not a whole number of {sizes['validation']} validation samples "
            f"({strange * sizes['validation']:.3f}){also}"
        )


def _is_fraction(value: float, count: int) -> bool:
    return abs(value * count - round(value * count)) < 1e-3 + 2e-7 * count


def _check_test_once(run: RunRecord, key: str, needed: bool) -> Iterator[Note]:
    tests = [position for position, event in enumerate(run.events) if event.get("key") == key]
    if not tests:
        if needed and run.evaluations:
            yield Note(f"{run.folder} has no test metric ({key})")
        return
    last = max((place for place, event in enumerate(run.events) if event.get("key") == "sl_evaluation"), default=-1)
    step = run.evaluations[-1].step if run.evaluations else None
    if len(tests) > 1 or tests[0] < last or step_of(run.events[tests[0]]) not in (None, step):
        steps = ", ".join(str(step_of(run.events[place])) for place in tests)
        yield Note(
            f"{run.folder}: the test split was used {len(tests)} times (step {steps}), and the last evaluation is at "
            f"step {step}"
        )


def check_splits(case: LintCase) -> Iterator[Note]:
    """The splits share no samples, and are those of the workload."""
    splits = read_splits(case.race.path)
    for one, other in combinations(splits, 2):
        shared, smaller = len(splits[one] & splits[other]), min(len(splits[one]), len(splits[other]))
        if shared:
            yield Note(
                f"{one} and {other} share {shared} samples ({shared / max(1, smaller):.2%} of the smaller)",
                MAKE_DISJOINT,
                "violation" if shared > MAX_OVERLAP_SHARE * smaller else "warning",
            )
    for run in case.finished:
        sizes = run.config.get("samples") or {}
        wrong = [name for name in splits if len(splits[name]) > sizes.get(name, MAX_SPLIT_DIGESTS)]
        if wrong:
            yield Note(
                f"{run.folder} has {sizes} samples, and splits/{wrong[0]}.u64 has {len(splits[wrong[0]])}",
                MAKE_DISJOINT,
            )
            break
    yield from _compare_data(case, splits)


def _compare_data(case: LintCase, splits: dict[str, frozenset[int]]) -> Iterator[Note]:
    """Compare the digests with the data on this machine, if it is the same data."""
    here = case.data
    known = next((run.config.get("sha256") for run in case.finished), None)
    if here is None or not splits or known != here["config"].get("sha256"):
        return
    for name in splits:
        first = here["digests"][name]
        missing = sum(digest not in splits[name] for digest in first)
        if missing and here["config"]["samples"][name] <= MAX_SPLIT_DIGESTS:
            yield Note(
                f"{missing} of the first {len(first)} samples of {name} are not in splits/{name}.u64: it does not "
                "describe this workload's data",
                MAKE_DISJOINT,
            )


RULES = (
    LintRule(
        1,
        "Accuracy is missing in the scaling",
        "every number of workers has its accuracy, and there are runs on one worker to compare with",
        "report the test metric of every size; repeat the run if it was not measured",
        _check_scaling,
        _describe_scaling,
    ),
    LintRule(
        2,
        "Accuracy is not that of unseen data",
        "accuracy is measured on samples that were not used for training or choices; the test split is used once",
        "evaluate on the validation split, test once after the last step, and run again",
        _check_test,
        _describe_test,
        _check_evaluations,
    ),
)
