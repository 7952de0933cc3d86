"""Rule 6's other half: the phases of a run account for its time."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.bench.lint.base import Note
from syncline.bench.lint.evidence import close, events, number, since_start, slack
from syncline.bench.race.reading import RanRun

__all__ = ["ALL", "check_phases", "lies_between", "told_seconds"]

LEAST = 0.95
"""Of a run's time that its phases must account for."""
MOST = 1.02
"""And may: the last of them goes on while its time is told to the others."""
ALL = "time everything from run_start to run_stop: data, evaluation and checkpoints too; run it again"


def check_phases(run: RanRun) -> Iterator[Note]:
    """Sums of a run's phases against its stamps."""
    last = next(iter(events(run, "sl_phases")), None)
    if last is None or not isinstance(last.get("value"), dict):
        yield Note(f"{run.folder}/log.jsonl has no sl_phases: where its time went is not known", ALL)
        return
    told = {name: number(value) for name, value in last["value"].items()}
    stamp, elapsed = since_start(run, last), told.pop("elapsed", None)
    before = next((since_start(run, event) for event in reversed(events(run, "eval_stop"))), 0.0)
    if not lies_between(run, before, elapsed, stamp) or elapsed is None:
        yield Note(
            f"{run.folder} tells {told_seconds(elapsed)} in all; by its stamps it ended between "
            f"{told_seconds(before)} and {told_seconds(stamp)}",
            ALL,
        )
        return
    spent = [value for value in told.values() if value is not None]
    share = sum(spent) / elapsed if elapsed > 0 else 1.0
    allowed = slack(run, elapsed)
    if (
        sum(spent) < LEAST * elapsed - slack(run, 0.0)
        or sum(spent) > MOST * elapsed + allowed
        or min(spent, default=0.0) < -allowed
    ):
        yield Note(f"{run.folder}: its phases add up to {share:.1%} of {elapsed:.6g} s", ALL)
    if not close(told.get("data"), run.value("sl_data_wait_seconds"), 1e-6):
        yield Note(
            f"{run.folder} waited {run.value('sl_data_wait_seconds')} s for data; {told.get('data')} s count", ALL
        )
    starts = [since_start(run, event) for event in events(run, "eval_start")]
    stops = [since_start(run, event) for event in events(run, "eval_stop")]
    if len(starts) == len(stops):
        inside = sum((stop or 0.0) - (start or 0.0) for start, stop in zip(starts, stops, strict=True))
        if inside > (told.get("evaluation") or 0.0) + slack(run, inside):
            yield Note(f"{run.folder} evaluated for {inside:.6g} s; {told.get('evaluation')} s of it count", ALL)


def told_seconds(seconds: float | None) -> str:
    """For a sentence."""
    return "no time" if seconds is None else f"{seconds:.6g} s"


def lies_between(run: RanRun, early: float | None, middle: float | None, late: float | None) -> bool:
    """Whether three readings of a run's clock follow each other."""
    if early is None or middle is None or late is None:
        return False
    return early - slack(run, early) <= middle <= late + slack(run, late)
