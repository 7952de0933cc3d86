"""Rule 11: strong or weak scaling is declared, and it is what was done."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.bench.lint.base import Case, Note
from syncline.bench.lint.evidence import Course, events
from syncline.bench.race.reading import RanRun

__all__ = ["check", "check_run", "looked"]

DECLARE = "say which it is (--scaling weak: the batch of a worker stays; strong: that of all), and run all sizes so"


def looked(case: Case) -> str:
    """What is there."""
    sizes = sorted({run.workers for run in case.race.runs})
    if not sizes:
        return ""
    kind = case.plan.scaling or "no scaling"
    return f"batches of {len(case.race.runs)} runs on {', '.join(map(str, sizes))} workers: {kind}"


def check(case: Case) -> Iterator[Note]:
    """Batches follow from the plan, for every size."""
    plan = case.plan
    sizes = sorted({run.workers for run in case.race.runs} | {plan.workers, *plan.scaling_workers})
    if len(sizes) > 1 and plan.scaling is None:
        yield Note(f"runs on {', '.join(map(str, sizes))} workers, and race.json does not say what they keep", DECLARE)
        return
    for run in case.race.runs:
        planned = case.planned(run)
        if not run.config or planned is None:
            continue
        settings = plan.settings(planned)
        found = {name: run.config.get(name) for name in ("batch", "global_batch")}
        if found != {"batch": settings.batch, "global_batch": settings.global_batch}:
            kept = "batch of each worker" if plan.scaling != "strong" else "batch of all workers"
            yield Note(
                f"{run.folder} took {found['batch']} samples a step and worker; with the {kept} kept "
                f"({plan.scaling or 'one size'}, {plan.batch} on {plan.workers} workers) it is {settings.batch}",
                DECLARE,
            )
        yield from check_run(run)


def check_run(run: RanRun) -> Iterator[Note]:
    """The log's batch is that of the configuration."""
    course = Course.of(run)
    for event in events(run, "global_batch_size") if course else ():
        assert course is not None
        if event.get("value") != course.batch or run.config.get("samples_a_step") != course.batch:
            yield Note(
                f"{run.folder}: steps of {event.get('value')} samples in the log, {run.config.get('samples_a_step')} "
                f"in config.json, {course.batch} by batch and workers",
                DECLARE,
            )
