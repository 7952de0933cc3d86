"""Rule 6: data, evaluation and everything else inside the clock, and the clock is the log's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from syncline.bench.lint.accounts import ALL, check_phases, lies_between, told_seconds
from syncline.bench.lint.base import Case, Note
from syncline.bench.lint.evidence import close, events, loose, number, simulated, since_start, slack
from syncline.bench.race.reading import RanRun

__all__ = ["check", "check_run", "looked"]


def looked(case: Case) -> str:
    """What is there."""
    stamps = sum(len(run.events) for run in case.counted)
    return f"stamps of {stamps} lines and the phases of {len(case.counted)} runs" if stamps else ""


def check(case: Case) -> Iterator[Note]:
    """Every finished run's clock, and the registry's around it."""
    for run in case.counted:
        yield from check_run(run)
        if not simulated(run) and run.seconds is not None and (run.elapsed or 0.0) > run.seconds + 0.1:
            yield Note(f"{run.folder} took {run.elapsed:.3f} s by its log, {run.seconds:.3f} s by the registry", ALL)
    begun: dict[str, float] = {}
    for line in case.race.lines:
        stamp, seconds = number(line.get("time_ms")), number(line.get("seconds"))
        if stamp is None:
            continue
        if line.get("event") == "begun":
            begun[str(line.get("run"))] = stamp
        elif line.get("event") == "ended" and seconds is not None and line.get("run") in begun:
            passed = (stamp - begun[str(line["run"])]) / 1e3
            if abs(passed - seconds) > 0.5 + 0.02 * passed:
                yield Note(f"{line['run']}: {passed:.3f} s pass in the registry, and it says {seconds:.3f} s", ALL)


def check_run(run: RanRun) -> Iterator[Note]:
    """Times told against the stamps of the lines that tell them."""
    if len(events(run, "run_start")) != 1 or events(run, "sl_resumed"):
        return  # rule 5 tells of it
    yield from _stamps(run)
    yield from _evaluations(run)
    yield from check_phases(run)
    hit = _first_hit(run)
    told = number(run.value("sl_time_to_target_seconds"))
    if hit is not None and told is not None and not close(hit, told, 1e-6):
        yield Note(f"{run.folder} tells {told:.6g} s to the target, and the evaluation that found it {hit:.6g} s", ALL)


def _first_hit(run: RanRun) -> float | None:
    target = number(run.config.get("target"))
    found = None if target is None else run.hit(target, bool(run.config.get("higher_is_better")))
    return None if found is None else found.elapsed


def _stamps(run: RanRun) -> Iterator[Note]:
    """Both clocks only go forward; on real workers they go alike."""
    for name in ("seconds", "time_ms"):
        stamps = [number(event.get(name)) for event in run.events]
        if any(stamp is None for stamp in stamps):
            yield Note(f"{run.folder}/log.jsonl has a line without {name}", ALL)
            return
        known = [stamp for stamp in stamps if stamp is not None]
        back = [late - early for early, late in pairwise(known) if late < early]
        if back and (name == "seconds" or min(back) < -1000):  # a wall clock is put right now and then
            yield Note(f"{run.folder}/log.jsonl: {name} goes back by {-min(back):g} between two lines", ALL)
            return
    first, last = run.events[0], run.events[-1]
    clock, wall = last["seconds"] - first["seconds"], (last["time_ms"] - first["time_ms"]) / 1e3
    if not simulated(run) and abs(clock - wall) > slack(run, wall):
        yield Note(f"{run.folder}: {clock:.3f} s pass on the clock of rank 0, {wall:.3f} s on the wall clock", ALL)


def _evaluations(run: RanRun) -> Iterator[Note]:
    """The time that an evaluation tells was read between its first line and its last."""
    begun: float | None = None
    for event in run.events:
        if event.get("key") == "eval_start":
            # What an evaluator beside the workers has found is written down when rank 0 reads it, later.
            begun = 0.0 if loose(run) else since_start(run, event)
        if event.get("key") != "sl_evaluation" or not isinstance(event.get("value"), dict):
            continue
        stamp, elapsed = since_start(run, event), number(event["value"].get("elapsed"))
        trained = number(event["value"].get("trained"))
        if not lies_between(run, begun, elapsed, stamp):
            yield Note(
                f"{run.folder}: an evaluation tells {told_seconds(elapsed)}; it lasted from "
                f"{told_seconds(begun)} to {told_seconds(stamp)}",
                ALL,
            )
            return
        assert elapsed is not None
        if trained is None or trained > elapsed + slack(run, elapsed):
            yield Note(f"{run.folder}: {told_seconds(trained)} of training in {told_seconds(elapsed)}", ALL)
            return
