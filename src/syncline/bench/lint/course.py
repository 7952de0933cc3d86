"""Rules about the course of a run: it is complete (5), its whole time counts (6), and its end was fixed before (10).

```text
 run_start                        eval_start  sl_evaluation                       run_stop
 ──┴───┬───────────┬─────────┬────────┴────────────┴────────┬──────── … ────────────┴──►  seconds of rank 0's clock
   epoch_start   step 1    step 2                    logged elapsed                 time_ms of the wall clock
```
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from syncline.bench.lint.base import ExpectedSteps, LintCase, LintRule, Note, clock_tolerance, close, step_of
from syncline.bench.race.plan import RacePlan
from syncline.bench.runlog import RunRecord, finite

__all__ = ["RULES"]

MIN_PHASE_SHARE = 0.95
"""The phases must account for at least this share of a run's time."""
MAX_PHASE_SHARE = 1.02
"""The last phase is still being timed while the ranks exchange their times."""


# 5. Whole runs


def _describe_whole(case: LintCase) -> str:
    steps = sum(run.evaluations[-1].step for run in case.finished if run.evaluations)
    return f"{len(case.finished)} finished runs, {steps} steps" if case.finished else ""


def _check_whole(case: LintCase) -> Iterator[Note]:
    for run in case.finished:
        for note in _check_whole_run(run):
            yield replace(note, severity="violation")  # a race resumes no run from a checkpoint


def _check_whole_run(run: RunRecord) -> Iterator[Note]:
    starts, stops = run.lines("run_start"), run.lines("run_stop")
    resumed = [event.get("value") for event in run.lines("sl_resumed")]
    if resumed or len(starts) > 1:
        yield Note(
            f"{run.folder} was resumed (after {', '.join(f'{step} steps' for step in resumed) or 'a restart'}), and "
            "its clock did not run between the attempts",
            severity="warning" if len(starts) > len(resumed) else "violation",
        )
        return
    if not starts or not stops:
        yield Note(f"{run.folder}/log.jsonl has no {'run_stop' if starts else 'run_start'}")
        return
    expected = ExpectedSteps.of(run)
    if expected is None:
        yield Note(f"{run.folder}/config.json does not have samples, batch and epochs")
        return
    yield from _check_epochs(run, expected)
    yield from _check_counts(run, expected)


def _check_epochs(run: RunRecord, expected: ExpectedSteps) -> Iterator[Note]:
    starts, last = run.lines("epoch_start"), step_of(run.lines("run_stop")[-1])
    ends = [step_of(event) for event in run.lines("epoch_stop")]
    for position, event in enumerate(starts):
        number, step = event.get("metadata", {}).get("epoch_num"), step_of(event)
        if (number, step) != (position + 1, position * expected.epoch_steps):
            yield Note(
                f"{run.folder}: the log has epoch {number} after step {step}, where epoch {position + 1} begins after "
                f"step {position * expected.epoch_steps}"
            )
            return
    if len(starts) != len(ends) or not ends or ends[-1] != last:
        yield Note(
            f"{run.folder}: {len(starts)} epochs begin and {len(ends)} end, the last at step "
            f"{ends[-1] if ends else None}; run_stop has step {last}"
        )
    elif last is not None and last > expected.total:
        yield Note(f"{run.folder} has {last} steps, and {expected.epochs} epochs have {expected.total}")


def _check_counts(run: RunRecord, expected: ExpectedSteps) -> Iterator[Note]:
    """Samples follow from the steps; bytes and samples never decrease."""
    step, logical, wire = 0, 0.0, 0.0
    for one in run.evaluations:
        samples = expected.samples(one.step)
        if run.asynchronous:  # workers are at different positions of their epochs: exact to one step of all workers
            near = samples - expected.batch <= one.samples <= expected.samples(one.step + 1) + expected.batch
            samples = one.samples if near else samples
        if one.samples != samples or not close(one.epochs, samples / expected.train):
            yield Note(
                f"{run.folder}: {one.step} steps of {expected.batch} samples are {samples} samples "
                f"({samples / expected.train:.4g} epochs), and the log has {one.samples} ({one.epochs:.4g})"
            )
            return
        if one.step <= step or one.bytes_logical < logical or one.bytes_wire < wire:
            yield Note(
                f"{run.folder}: the log counts {one.bytes_wire:.0f} bytes at step {one.step}, and {wire:.0f} at the "
                f"earlier step {step}; steps and bytes only grow"
            )
            return
        step, logical, wire = one.step, one.bytes_logical, one.bytes_wire
    total = run.value("sl_comm_bytes_wire")
    if isinstance(total, (int, float)) and total < wire:
        yield Note(f"{run.folder}: {total:.0f} bytes in total, and {wire:.0f} at the last evaluation")


# 6. The clock


def _describe_clock(case: LintCase) -> str:
    stamps = sum(len(run.events) for run in case.finished)
    return f"time stamps of {stamps} lines and the phases of {len(case.finished)} runs" if stamps else ""


def _check_clock(case: LintCase) -> Iterator[Note]:
    for run in case.finished:
        yield from _check_run_clock(run)
        if not run.simulated and run.seconds is not None and (run.elapsed or 0.0) > run.seconds + 0.1:
            yield Note(f"{run.folder} took {run.elapsed:.3f} s by its log, {run.seconds:.3f} s by the registry")
    started: dict[str, float] = {}
    for line in case.race.lines:
        stamp, seconds = finite(line.get("time_ms")), finite(line.get("seconds"))
        if stamp is None:
            continue
        if line.get("event") == "begun":
            started[str(line.get("run"))] = stamp
        elif line.get("event") == "ended" and seconds is not None and line.get("run") in started:
            passed = (stamp - started[str(line["run"])]) / 1e3
            if abs(passed - seconds) > 0.5 + 0.02 * passed:
                yield Note(
                    f"{line['run']}: the registry says {seconds:.3f} s, and its time stamps are {passed:.3f} s apart"
                )


def _check_run_clock(run: RunRecord) -> Iterator[Note]:
    if len(run.lines("run_start")) != 1 or run.lines("sl_resumed"):
        return  # rule 5 reports it
    yield from _check_stamps(run)
    yield from _check_evaluation_times(run)
    yield from _check_phases(run)
    target, logged = finite(run.config.get("target")), finite(run.value("sl_time_to_target_seconds"))
    hit = None if target is None else run.hit(target, bool(run.config.get("higher_is_better")))
    if hit is not None and logged is not None and not close(hit.elapsed, logged, 1e-6):
        yield Note(f"{run.folder} reports {logged:.6g} s to the target, and its evaluation {hit.elapsed:.6g} s")


def _check_stamps(run: RunRecord) -> Iterator[Note]:
    """Both clocks only move forward; on real workers they run at the same speed."""
    for name in ("seconds", "time_ms"):
        stamps = [finite(event.get(name)) for event in run.events]
        if any(stamp is None for stamp in stamps):
            yield Note(f"{run.folder}/log.jsonl has a line without {name}")
            return
        known = [stamp for stamp in stamps if stamp is not None]
        back = [late - early for early, late in pairwise(known) if late < early]
        if back and (name == "seconds" or min(back) < -1000):  # wall clocks are adjusted now and then
            yield Note(f"{run.folder}/log.jsonl: {name} decreases by {-min(back):g} between two lines")
            return
    first, last = run.events[0], run.events[-1]
    clock, wall = last["seconds"] - first["seconds"], (last["time_ms"] - first["time_ms"]) / 1e3
    if not run.simulated and abs(clock - wall) > clock_tolerance(run, wall):
        yield Note(f"{run.folder} took {clock:.3f} s by the clock of rank 0, {wall:.3f} s by the wall clock")


def _check_evaluation_times(run: RunRecord) -> Iterator[Note]:
    """The time of an evaluation lies between its first and its last line."""
    started: float | None = None
    for event in run.events:
        if event.get("key") == "eval_start":
            # The result of a separate evaluator is logged later, when rank 0 reads it.
            started = 0.0 if run.asynchronous else run.since_start(event)
        if event.get("key") != "sl_evaluation" or not isinstance(event.get("value"), dict):
            continue
        stamp, elapsed = run.since_start(event), finite(event["value"].get("elapsed"))
        trained = finite(event["value"].get("trained"))
        if not _in_order(run, started, elapsed, stamp):
            yield Note(
                f"{run.folder}: an evaluation reports {_seconds(elapsed)}, and it lasted from {_seconds(started)} to "
                f"{_seconds(stamp)}"
            )
            return
        assert elapsed is not None
        if trained is None or trained > elapsed + clock_tolerance(run, elapsed):
            yield Note(f"{run.folder}: {_seconds(trained)} of training in {_seconds(elapsed)}")
            return


def _check_phases(run: RunRecord) -> Iterator[Note]:
    """The phases of a run add up to its time, and contain its evaluations and its waiting for data."""
    last = next(iter(run.lines("sl_phases")), None)
    if last is None or not isinstance(last.get("value"), dict):
        yield Note(f"{run.folder}/log.jsonl has no sl_phases, so the use of its time is not known")
        return
    phases = {name: finite(value) for name, value in last["value"].items()}
    stamp, elapsed = run.since_start(last), phases.pop("elapsed", None)
    before = next((run.since_start(event) for event in reversed(run.lines("eval_stop"))), 0.0)
    if not _in_order(run, before, elapsed, stamp) or elapsed is None:
        yield Note(
            f"{run.folder} reports {_seconds(elapsed)} in total; by its time stamps it ended between "
            f"{_seconds(before)} and {_seconds(stamp)}"
        )
        return
    spent = [value for value in phases.values() if value is not None]
    total, tolerance = sum(spent), clock_tolerance(run, elapsed)
    too_little = total < MIN_PHASE_SHARE * elapsed - clock_tolerance(run, 0.0)
    if too_little or total > MAX_PHASE_SHARE * elapsed + tolerance or min(spent, default=0.0) < -tolerance:
        share = total / elapsed if elapsed > 0 else 1.0
        yield Note(f"{run.folder}: its phases add up to {share:.1%} of {elapsed:.6g} s")
    waited = run.value("sl_data_wait_seconds")
    if not close(phases.get("data"), waited, 1e-6):
        yield Note(f"{run.folder} waited {waited} s for data, and {phases.get('data')} s of it are counted")
    starts = [run.since_start(event) for event in run.lines("eval_start")]
    stops = [run.since_start(event) for event in run.lines("eval_stop")]
    if len(starts) == len(stops):
        inside = sum((stop or 0.0) - (start or 0.0) for start, stop in zip(starts, stops, strict=True))
        if inside > (phases.get("evaluation") or 0.0) + clock_tolerance(run, inside):
            yield Note(f"{run.folder} evaluated for {inside:.6g} s, and {phases.get('evaluation')} s of it are counted")


def _seconds(seconds: float | None) -> str:
    return "no time" if seconds is None else f"{seconds:.6g} s"


def _in_order(run: RunRecord, early: float | None, middle: float | None, late: float | None) -> bool:
    """True if three readings of a run's clock are in order."""
    if early is None or middle is None or late is None:
        return False
    return early - clock_tolerance(run, early) <= middle <= late + clock_tolerance(run, late)


# 10. Target and end


def _describe_end(case: LintCase) -> str:
    plan = case.plan
    return (
        f"{sum(len(run.evaluations) for run in case.finished)} evaluations, target {plan.target:g}, one every "
        f"{plan.evaluate_samples} samples, {plan.evaluations_after} after the target is reached"
    )


def _check_end(case: LintCase) -> Iterator[Note]:
    plan = case.plan
    if [line.get("event") for line in case.race.lines][:1] != ["planned"]:
        yield Note("the registry does not begin with the plan: target and interval were written later")
    if plan.evaluations_after < 1:
        yield Note(
            "no evaluation follows the one that reaches the target, so it may be a lucky one",
            "race with at least one evaluation after the target is reached (2 are usual)",
        )
    for run in case.finished:
        yield from _check_evaluation_settings(plan, run)
        yield from _check_run_end(run)
    yield from _check_relapses(case)


def _check_run_end(run: RunRecord) -> Iterator[Note]:
    """The steps of the evaluations, and the end that follows from them."""
    expected = ExpectedSteps.of(run)
    # Rule 5 reports a run without a start or an end.
    if expected is None or run.status != "finished" or any(True for _ in _check_whole_run(run)):
        return
    steps = [one.step for one in run.evaluations]
    last = step_of(run.lines("run_stop")[-1]) or 0
    if run.asynchronous:
        if not _evaluated_in_order(expected, steps):
            yield Note(f"{run.folder}: evaluations at steps {steps}, and one is due every {expected.every}")
            return
    elif steps != expected.evaluations(last):
        missing = sorted(set(expected.evaluations(last)) ^ set(steps))
        yield Note(
            f"{run.folder}: {len(steps)} evaluations, and one every {expected.every or expected.epoch_steps} steps up "
            f"to step {last} makes {len(expected.evaluations(last))}; it differs at step "
            f"{missing[0] if missing else last}"
        )
        return
    yield from _check_stop(run, expected, last)


def _evaluated_in_order(expected: ExpectedSteps, steps: list[int]) -> bool:
    """True if no evaluation was too early. A separate evaluator may be late, and skip one."""
    every = expected.every or expected.epoch_steps
    intervals = [step // every for step in steps[:-1]]  # the last one is at the end of the run
    return steps == sorted(set(steps)) and all(intervals) and len(set(intervals)) == len(intervals)


def _check_stop(run: RunRecord, expected: ExpectedSteps, last: int) -> Iterator[Note]:
    """The reason for the end agrees with the evaluations."""
    config = run.config
    target, after = config.get("target"), int(config.get("evaluations_after") or 0)
    hit = None if target is None else run.hit(float(target), bool(config.get("higher_is_better")))
    logged = run.value("sl_time_to_target_seconds")
    if (hit is None) != (logged is None):
        yield Note(
            f"{run.folder} reports {logged} s to the target, and its evaluations "
            f"{'never reach' if hit is None else 'reach'} it"
        )
        return
    place = len(run.evaluations) if hit is None else run.evaluations.index(hit) + after
    by = run.stop.get("stopped_by")
    if by == "signal":
        return
    if place < len(run.evaluations):
        good = place == len(run.evaluations) - 1 and by == "target"
    else:
        good = last == expected.total and by in ("epochs", "steps")
    if not good:
        reached = "never reached" if hit is None else f"reached at step {hit.step}"
        yield Note(
            f"{run.folder} ended at step {last} of {expected.total} by {by!r}; the target {target} was {reached}, and "
            f"{after} evaluations follow it"
        )


def _check_evaluation_settings(plan: RacePlan, run: RunRecord) -> Iterator[Note]:
    """Target and evaluation interval of the run are those of the plan, for any batch."""
    expected, config = ExpectedSteps.of(run), run.config
    if expected is None:
        return
    target = None if run.kind == "tuning" else plan.target
    for name, wanted in (("target", target), ("evaluations_after", plan.evaluations_after)):
        values = [config.get(name), *(event.get("value") for event in run.lines(f"sl_{name}"))]
        if not all(close(one, wanted) for one in values):
            yield Note(f"{run.folder} ran with {name} {values[-1]}, and race.json has {wanted}")
    together = plan.batch * (plan.workers if plan.scaling == "strong" else run.workers)
    intervals = {max(1, round(plan.evaluate_samples / batch)) for batch in (expected.batch, together)}
    values = [config.get("evaluate_every"), *(event.get("value") for event in run.lines("sl_evaluate_every"))]
    if not set(values) <= intervals:
        yield Note(
            f"{run.folder} evaluated every {values[-1]} steps of {expected.batch} samples; race.json has "
            f"{plan.evaluate_samples} samples, which are {min(intervals)} steps"
        )


def _check_relapses(case: LintCase) -> Iterator[Note]:
    plan = case.plan
    fallen = []
    for run in case.finished:
        hit = run.hit(plan.target, plan.higher_is_better) if run.kind == "race" else None
        after = [] if hit is None else [one.metric for one in run.evaluations[run.evaluations.index(hit) + 1 :]]
        middle = statistics.median(after) if after else plan.target
        if not (middle >= plan.target if plan.higher_is_better else middle <= plan.target):
            fallen.append(f"{run.folder} ({', '.join(f'{value:.4g}' for value in after)})")
    if fallen:
        yield Note(
            f"{len(fallen)} runs reached the target of {plan.target:g} and were worse afterwards: {fallen[0]}",
            "mention it, or choose a target that stays reached",
            "warning",
        )


RULES = (
    LintRule(
        5,
        "Only a part of a run is shown",
        "runs are complete, from the first step to the last",
        "show the run from its first step to its last; run it again if the rest of the log is lost",
        _check_whole,
        _describe_whole,
        _check_whole_run,
    ),
    LintRule(
        6,
        "Time for I/O or evaluation is left out",
        "data, evaluation and everything else are inside the measured time; phases add up to 95 % of it",
        "time everything from run_start to run_stop, with data, evaluation and checkpoints; run it again",
        _check_clock,
        _describe_clock,
        _check_run_clock,
    ),
    LintRule(
        10,
        "Target or end were chosen afterwards",
        "target and evaluation interval were fixed before the run, and training continued after the target was reached",
        "fix target and evaluation interval before the race, end every run by them, and race again",
        _check_end,
        _describe_end,
        _check_run_end,
    ),
)
