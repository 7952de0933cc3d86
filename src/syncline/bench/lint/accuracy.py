"""Rule 1: accuracy at every size of the world, beside that of one worker."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from syncline.bench.lint.base import Case, Note, some
from syncline.bench.lint.evidence import number
from syncline.bench.race.plan import Plan
from syncline.bench.race.reading import RanRun

__all__ = ["check", "looked", "points"]

MARGIN = 0.01
"""Of the larger of target and one worker's metric: less is no loss."""


def points(case: Case) -> list[RanRun]:
    """Runs that a scaling curve is drawn through; none where the race has one size."""
    found = [run for run in case.counted if run.kind in ("race", "scaling") and run.excluded is None]
    sizes = {run.workers for run in found} | set(case.plan.scaling_workers)
    return found if sizes - {case.plan.workers} else []


def looked(case: Case) -> str:
    """What is there."""
    found = points(case)
    sizes = sorted({run.workers for run in found})
    return f"{len(found)} finished runs on {', '.join(map(str, sizes))} workers" if found else ""


def check(case: Case) -> Iterator[Note]:
    """Every point has its accuracy, and one worker's to compare it with."""
    runs = points(case)
    if not runs:
        return
    for run in runs:
        if not run.evaluations or number(run.test) is None:
            yield Note(
                f"{run.folder} has a time and {'no test metric' if run.evaluations else 'no evaluation'}: a point of "
                "the scaling curve without accuracy",
                "report the test metric of every size; run this one again if it was not measured",
            )
    known = {(run.entry, run.workers) for run in runs if run.status == "finished"}
    alone = [entry.name for entry in case.plan.entries if (entry.name, 1) not in known]
    if alone:
        yield Note(
            f"no run on one worker for {some(alone)}: nothing to compare the accuracy of {case.plan.workers} with",
            "race again with --scaling weak or strong: one worker is among the sizes then",
        )
    for entry in case.plan.entries:
        yield from _losses(case.plan, [run for run in runs if run.entry == entry.name])


def _losses(plan: Plan, runs: list[RanRun]) -> Iterator[Note]:
    """Sizes that end with less than one worker does, by more than seeds differ."""
    ends = {
        size: [
            run.test for run in runs if run.workers == size and run.test is not None and number(run.test) is not None
        ]
        for size in sorted({run.workers for run in runs})
    }
    one = ends.pop(1, [])
    for size, several in ends.items() if one else ():
        if not several:
            continue
        middle, base = statistics.fmean(several), statistics.fmean(one)
        worse = base - middle if plan.higher_is_better else middle - base
        error = sum(statistics.variance(group) / len(group) for group in (several, one) if len(group) > 1) ** 0.5
        if worse > max(2 * error, MARGIN * max(abs(base), abs(plan.target))):
            yield Note(
                f"{runs[0].entry} on {size} workers ends with a test {plan.metric} of {middle:.4g}, on one with "
                f"{base:.4g}",
                "say so beside the speed: more workers are worth less than their time says",
                "warning",
            )
