"""Rule 10: target and cadence were fixed before the run, and the run went on a little after the hit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from syncline.bench.lint.base import Case, Note
from syncline.bench.lint.evidence import Course, close, events, loose, step_of
from syncline.bench.lint.whole import check_run as check_whole
from syncline.bench.race.plan import Plan
from syncline.bench.race.reading import RanRun

__all__ = ["check", "check_run", "looked"]

FIXED = "fix target and cadence before the race, end every run by them, and race again"


def looked(case: Case) -> str:
    """What is there."""
    plan = case.plan
    return (
        f"{sum(len(run.evaluations) for run in case.counted)} evaluations against a target of {plan.target:g}, one "
        f"every {plan.evaluate_samples} samples, {plan.evaluations_after} after the hit"
    )


def check(case: Case) -> Iterator[Note]:
    """Every finished run evaluated when it had to, and ended where it had to."""
    plan = case.plan
    if [line.get("event") for line in case.race.lines][:1] != ["planned"]:
        yield Note("the registry does not begin with the plan: target and cadence were written down later", FIXED)
    if plan.evaluations_after < 1:
        yield Note(
            "no evaluation follows the one that finds the target reached: it may have been luck",
            "race with at least one evaluation after the hit (2 are usual)",
        )
    for run in case.counted:
        yield from _settings(plan, run)
        yield from check_run(run)
    yield from _relapses(case)


def check_run(run: RanRun) -> Iterator[Note]:
    """One run: the cadence of its evaluations, and the end that follows from them."""
    course = Course.of(run)
    # What has no beginning or end of its own is rule 5's.
    if course is None or run.status != "finished" or any(True for _ in check_whole(run)):
        return
    steps = [one.step for one in run.evaluations]
    last = step_of(events(run, "run_stop")[-1]) or 0
    if loose(run):
        if not _in_turn(course, steps):
            yield Note(f"{run.folder}: evaluations at steps {steps}, and one every {course.every} is due", FIXED)
            return
    elif steps != course.evaluations(last):
        missing = sorted(set(course.evaluations(last)) ^ set(steps))
        yield Note(
            f"{run.folder}: {len(steps)} evaluations, and one every {course.every or course.epoch_steps} steps up to "
            f"step {last} makes {len(course.evaluations(last))}; it differs at step {missing[0] if missing else last}",
            FIXED,
        )
        return
    yield from _end(run, course, last)


def _in_turn(course: Course, steps: list[int]) -> bool:
    """Whether no evaluation came before its time: an evaluator beside the workers may be late, and leave one out."""
    every = course.every or course.epoch_steps
    turns = [step // every for step in steps[:-1]]  # the last one is at the end, whenever that is
    return steps == sorted(set(steps)) and all(turns) and len(set(turns)) == len(turns)


def _end(run: RanRun, course: Course, last: int) -> Iterator[Note]:
    """What stopped the run is what its own evaluations say."""
    config = run.config
    target, after = config.get("target"), int(config.get("evaluations_after") or 0)
    hit = None if target is None else run.hit(float(target), bool(config.get("higher_is_better")))
    told = run.value("sl_time_to_target_seconds")
    if (hit is None) != (told is None):
        yield Note(
            f"{run.folder} tells {told} s to the target, and its evaluations "
            f"{'never reach' if hit is None else 'reach'} it",
            FIXED,
        )
        return
    place = len(run.evaluations) if hit is None else run.evaluations.index(hit) + after
    by = events(run, "run_stop")[-1].get("metadata", {}).get("stopped_by")
    if by == "signal":
        return
    if place < len(run.evaluations):
        good = place == len(run.evaluations) - 1 and by == "target"
    else:
        good = last == course.total and by in ("epochs", "steps")
    if not good:
        reached = "never reached" if hit is None else f"reached at step {hit.step}"
        yield Note(
            f"{run.folder} ended with step {last} of {course.total} by {by!r}; the target {target} was {reached}, and "
            f"{after} evaluations follow it",
            FIXED,
        )


def _settings(plan: Plan, run: RanRun) -> Iterator[Note]:
    """What the run was told is what was planned, whatever its batch."""
    course, config = Course.of(run), run.config
    if course is None:
        return
    target = None if run.kind == "tuning" else plan.target
    together = plan.batch * (plan.workers if plan.scaling == "strong" else run.workers)
    cadence = {max(1, round(plan.evaluate_samples / batch)) for batch in (course.batch, together)}
    for name, wanted in (("target", {target}), ("evaluations_after", {plan.evaluations_after})):
        key = f"sl_{name}"
        found = [config.get(name), *(event.get("value") for event in events(run, key))]
        if not all(any(close(one, want) for want in wanted) for one in found):
            yield Note(f"{run.folder} ran with {name} {found[-1]}, and race.json says {next(iter(wanted))}", FIXED)
    found = [config.get("evaluate_every"), *(event.get("value") for event in events(run, "sl_evaluate_every"))]
    if not set(found) <= cadence:
        yield Note(
            f"{run.folder} evaluated every {found[-1]} steps of {course.batch} samples; race.json says every "
            f"{plan.evaluate_samples} samples, {min(cadence)} steps",
            FIXED,
        )


def _relapses(case: Case) -> Iterator[Note]:
    plan = case.plan
    fallen = []
    for run in case.counted:
        hit = run.hit(plan.target, plan.higher_is_better) if run.kind == "race" else None
        after = [] if hit is None else [one.metric for one in run.evaluations[run.evaluations.index(hit) + 1 :]]
        if after and not _as_good(plan, statistics.median(after)):
            fallen.append(f"{run.folder} ({', '.join(f'{value:.4g}' for value in after)})")
    if fallen:
        yield Note(
            f"{len(fallen)} runs fell back behind the target of {plan.target:g} after they had reached it: {fallen[0]}",
            "say so, or take a target that is kept once it is reached",
            "warning",
        )


def _as_good(plan: Plan, value: float) -> bool:
    return value >= plan.target if plan.higher_is_better else value <= plan.target
