"""Rule 5: whole runs, from the first step to the last; no kernel, no warm part, no middle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from syncline.bench.lint.base import Case, Note
from syncline.bench.lint.evidence import Course, close, events, loose, step_of
from syncline.bench.race.reading import RanRun

__all__ = ["check", "check_run", "looked"]

AGAIN = "show the run from its first step to its last; run it again if the rest of the log is lost"


def looked(case: Case) -> str:
    """What is there."""
    steps = sum(run.evaluations[-1].step for run in case.counted if run.evaluations)
    return f"{len(case.counted)} finished runs, {steps} steps" if case.counted else ""


def check(case: Case) -> Iterator[Note]:
    """Every finished run. In a race none goes on from a checkpoint."""
    for run in case.counted:
        for note in check_run(run):
            yield replace(note, severity="violation")


def check_run(run: RanRun) -> Iterator[Note]:
    """Beginning, epochs, counts and end of one run."""
    starts, stops = events(run, "run_start"), events(run, "run_stop")
    resumed = [event.get("value") for event in events(run, "sl_resumed")]
    if resumed or len(starts) > 1:
        yield Note(
            f"{run.folder} was resumed (after {', '.join(f'{step} steps' for step in resumed) or 'a restart'}): its "
            "clock stood still between the attempts",
            AGAIN,
            "warning" if len(starts) > len(resumed) else "violation",
        )
        return
    if not starts or not stops:
        yield Note(f"{run.folder}/log.jsonl has no {'run_stop' if starts else 'run_start'}", AGAIN)
        return
    course = Course.of(run)
    if course is None:
        yield Note(f"{run.folder}/config.json does not tell samples, batch and epochs", AGAIN)
        return
    yield from _epochs(run, course)
    yield from _counts(run, course)


def _epochs(run: RanRun, course: Course) -> Iterator[Note]:
    starts, last = events(run, "epoch_start"), step_of(events(run, "run_stop")[-1])
    ends = [step_of(event) for event in events(run, "epoch_stop")]
    for position, event in enumerate(starts):
        number, step = event.get("metadata", {}).get("epoch_num"), step_of(event)
        if (number, step) != (position + 1, position * course.epoch_steps):
            yield Note(
                f"{run.folder}: epoch {position + 1} must begin after step {position * course.epoch_steps}, and the "
                f"log has epoch {number} after step {step}",
                AGAIN,
            )
            return
    if len(starts) != len(ends) or not ends or ends[-1] != last:
        yield Note(
            f"{run.folder}: {len(starts)} epochs begin and {len(ends)} end, the last with step "
            f"{ends[-1] if ends else None}; run_stop has step {last}",
            AGAIN,
        )
    elif last is not None and last > course.total:
        yield Note(f"{run.folder} has {last} steps, and {course.epochs} epochs have {course.total}", AGAIN)


def _counts(run: RanRun, course: Course) -> Iterator[Note]:
    """Samples follow from the steps; bytes and samples never fall."""
    step, logical, wire = 0, 0.0, 0.0
    for one in run.evaluations:
        expected = course.samples(one.step)
        if loose(run):  # workers in different places of their epochs: to a step of all
            near = expected - course.batch <= one.samples <= course.samples(one.step + 1) + course.batch
            expected = one.samples if near else expected
        if one.samples != expected or not close(one.epochs, expected / course.train):
            yield Note(
                f"{run.folder}: {one.step} steps of {course.batch} samples are {expected} samples "
                f"({expected / course.train:.4g} epochs), and the log has {one.samples} ({one.epochs:.4g})",
                AGAIN,
            )
            return
        if one.step <= step or one.bytes_logical < logical or one.bytes_wire < wire:
            yield Note(
                f"{run.folder}: at step {one.step} the log counts {one.bytes_wire:.0f} bytes, and before, at step "
                f"{step}, {wire:.0f}: steps and bytes only grow",
                AGAIN,
            )
            return
        step, logical, wire = one.step, one.bytes_logical, one.bytes_wire
    total = run.value("sl_comm_bytes_wire")
    if isinstance(total, (int, float)) and total < wire:
        yield Note(f"{run.folder}: {total:.0f} bytes in all, and {wire:.0f} before the last evaluation", AGAIN)
