"""Rules about the record: unchanged files (0), all tuning runs (3), all runs and a baseline (12)."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from syncline.bench.answer_cache import cache_answers
from syncline.bench.lint.base import LintCase, LintRule, Note, close, some
from syncline.bench.race.plan import RaceEntry, RateTuning
from syncline.bench.race.registry import SPLITS, sha256
from syncline.bench.runlog import REGISTRY, SYSTEM, RunKey, RunRecord, finite, read_document, runs_with_other_code
from syncline.training.system import code_digest

__all__ = ["RULES"]

# 0. The files


def _describe_files(case: LintCase) -> str:
    return f"{len(case.race.lines)} lines of {REGISTRY}, the files of {len(case.race.runs)} runs"


def _check_files(case: LintCase) -> Iterator[Note]:
    """Problems found while reading, and the checksums in the first line of the registry."""
    race = case.race
    other_code = set(runs_with_other_code(race.plan, race.runs))  # rule 8 reports it
    for problem in dict.fromkeys(race.problems):
        if problem not in other_code:
            yield Note(problem)
    planned = next((line for line in race.lines if line.get("event") == "planned"), {})
    sums = planned.get("splits")
    for name in SPLITS:
        path = race.path / "splits" / f"{name}.u64"
        if not path.exists():
            yield Note(f"splits/{name}.u64 is missing, so disjoint splits cannot be proved")
        elif isinstance(sums, dict) and sums.get(name) != sha256(path):
            yield Note(f"splits/{name}.u64 was edited after the race began")
    system = race.path / SYSTEM
    if system.exists() and planned.get("system_sha256") not in (None, sha256(system)):
        yield Note(f"{SYSTEM} was edited after the race began")


# 3. Tuning


def _tuning_runs(case: LintCase) -> list[RunRecord]:
    return [run for run in case.race.runs if run.kind == "tuning"]


def _describe_tuning(case: LintCase) -> str:
    if case.plan.tuning is None:
        return f"the source of the learning rates of {len(case.plan.entries)} entries; no tuning"
    runs = _tuning_runs(case)
    seconds = sum(run.seconds or 0.0 for run in runs)
    return f"{len(runs)} tuning runs of {len(case.plan.entries)} entries, {seconds:.1f} s"


def _check_tuning(case: LintCase) -> Iterator[Note]:
    """The tuning runs are those of the plan, the rates follow from them, and no rate is of unknown origin."""
    tuning = case.plan.tuning
    if tuning is None:
        unplanned = [run.folder for run in _tuning_runs(case)]
        if unplanned:
            yield Note(f"{unplanned[0]} is a tuning run, and race.json plans no tuning")
        yield from _check_rate_sources(case)
        return
    if tuning.seed in case.plan.seeds:
        yield Note(f"rates were tuned with seed {tuning.seed}, which is also raced", "tune with a different seed")
    yield from _check_tuning_runs(case, tuning)
    yield from _check_chosen_rates(case)


def _check_tuning_runs(case: LintCase, tuning: RateTuning) -> Iterator[Note]:
    runs = _tuning_runs(case)
    ended = Counter((run.entry, run.factor) for run in runs if run.ended)
    for entry in case.plan.entries:
        tried = [factor for factor in tuning.factors if ended[entry.name, factor]]
        if len(tried) < len(tuning.factors):
            yield Note(
                f"{entry.name} has {len(tried)} of {len(tuning.factors)} tuning runs (rates times "
                f"{', '.join(f'{factor:g}' for factor in tried) or 'none'})"
            )
        repeated = [factor for factor in tuning.factors if ended[entry.name, factor] > 1]
        if repeated:
            times = ended[entry.name, repeated[0]]
            yield Note(f"{entry.name}: its rate times {repeated[0]:g} was tried {times} times")
    unplanned = [run.folder for run in runs if run.factor not in tuning.factors]
    if unplanned:
        yield Note(f"{unplanned[0]} tried a rate that race.json does not plan")


def _check_chosen_rates(case: LintCase) -> Iterator[Note]:
    """Each rate is the best one by the tuning logs, and was chosen between the tuning and the race."""
    lines = case.race.lines
    chosen = {str(line.get("entry")): number for number, line in enumerate(lines) if line.get("event") == "tuned"}
    kinds = {run.folder: run.kind for run in case.race.runs}
    raced = [n for n, line in enumerate(lines) if line.get("event") == "begun" and kinds.get(line["run"]) != "tuning"]
    tuned = [n for n, line in enumerate(lines) if line.get("event") == "ended" and kinds.get(line["run"]) == "tuning"]
    for entry in case.plan.entries:
        if entry.name not in chosen:
            if raced:
                yield Note(f"{entry.name} raced before its rate was chosen")
            continue
        place = chosen[entry.name]
        line, best = lines[place], case.race.choose_rate(entry)
        if not close(line.get("learning_rate"), best["learning_rate"]) or line.get("tried") != best["tried"]:
            yield Note(
                f"{entry.name} races with rate {line.get('learning_rate')}; the best one by the last validation of its "
                f"tuning runs ({best['tried']}) is {best['learning_rate']:g}"
            )
        elif (raced and raced[0] < place) or (tuned and tuned[-1] > place):
            yield Note(f"the rate of {entry.name} was not chosen between the tuning and the race")


def _check_rate_sources(case: LintCase) -> Iterator[Note]:
    """A rate that is neither the workload's nor a preset's was found by runs that are not counted."""
    presets = _preset_rates()
    default_rate = case.data["learning_rate"] if case.data and case.plan.code_digest == code_digest() else None
    for entry in case.plan.entries:
        if entry.rate_from == "tuned":
            yield Note(f"the rate of {entry.name} is tuned, and there is no tuning run")
            continue
        factor = 1.0 if entry.codec or entry.rate_from == "workload" else presets.get(entry.strategy, 1.0)
        rate = entry.learning_rate
        expected = rate if default_rate is None or rate is None else default_rate * factor
        by_user = entry.rate_from == "given"
        if by_user or not close(rate, expected, 1e-6):
            source = "was set by the user" if by_user else f"is not the {entry.rate_from}'s, {expected:g}"
            yield Note(
                f"the rate of {entry.name} ({rate}) {source}: the cost of finding it is not counted",
                "state how it was found, or tune inside the race (--tune)",
                "warning",
            )


@cache_answers
def _preset_rates() -> dict[str, float]:
    """The factor by which each preset multiplies the workload's rate."""
    from syncline.strategies import default_presets

    return {preset.spec: preset.rate for preset in default_presets()}


# 12. Baselines and runs

MIN_SEEDS = 3
FINISH_RACE = "finish the race (--resume), or state that it is not finished"


def _is_baseline(entry: RaceEntry) -> bool:
    """True for another library's implementation, and for plain all-reduce."""
    return entry.baseline or (entry.strategy == "allreduce" and entry.codec is None)


def _describe_fairness(case: LintCase) -> str:
    plan = case.plan
    return (
        f"{len(plan.entries)} entries, {sum(map(_is_baseline, plan.entries))} of them baselines, {len(plan.seeds)} "
        f"seeds; {len(case.race.lines)} lines of the registry"
    )


def _check_fairness(case: LintCase) -> Iterator[Note]:
    plan = case.plan
    if not any(map(_is_baseline, plan.entries)):
        yield Note(
            f"there is no baseline among {some([entry.name for entry in plan.entries])}",
            "add DDP or plain all-reduce: numbers from elsewhere cannot be compared",
        )
    if len(set(plan.seeds)) < MIN_SEEDS:
        yield Note(
            f"{len(set(plan.seeds))} seeds ({plan.seeds}): fewer than {MIN_SEEDS} do not show the variation",
            f"race with {MIN_SEEDS} seeds",
        )
    for name, reason in plan.skipped.items():
        if not str(reason).strip():
            yield Note(f"{name} was skipped without a reason", "state why it cannot run here, or run it")
    for run in case.configured:
        planned = case.planned(run)
        if planned is None:
            continue
        settings = plan.settings(planned)
        for name, wanted in (("epochs", settings.epochs), ("steps", settings.steps)):
            if run.config.get(name) != wanted:
                yield Note(
                    f"{run.folder} had a budget of {run.config.get(name)} {name}, and race.json has {wanted} for all",
                    "use the same budget for all entries, and race again",
                )
    yield from _check_ends(case)
    yield from _check_order(case)
    for run in case.race.runs:
        yield from _check_status(run)
        if run.excluded is not None:
            if run.excluded.strip():
                yield Note(f"{run.folder} is excluded: {run.excluded}", severity="warning")
            else:
                yield Note(f"{run.folder} is excluded without a reason")
    yield from _check_reports(case)


def _check_ends(case: LintCase) -> Iterator[Note]:
    """Every planned run ended once."""
    runs = [run for run in case.race.runs if run.kind != "tuning"]
    ended = Counter(run.key for run in runs if run.ended)
    planned = [run.key for run in case.plan.runs(case.race.rates)]
    missing = [_name(key) for key in planned if not ended[key]]
    if missing:
        yield Note(f"{len(missing)} of {len(planned)} planned runs have no end: {some(missing)}", FINISH_RACE)
    for key, times in ended.items():
        if times > 1:
            yield Note(f"{_name(key)} has {times} complete runs, of which one was chosen")
        if key not in planned:
            yield Note(f"{_name(key)} was run, and race.json does not plan it")
    interrupted = Counter(run.key for run in runs if not run.ended)
    if interrupted:
        names = [f"{_name(key)} ({times} times)" for key, times in interrupted.items()]
        yield Note(
            f"interrupted and repeated: {some(names)}",
            "look at their logs: a run that is interrupted because of a bad result is a dropped run",
            "violation" if max(interrupted.values()) > 2 else "warning",
        )


def _check_order(case: LintCase) -> Iterator[Note]:
    """The runs started in the random order of the plan: a run that was repeated by hand did not."""
    race = case.race
    stamps = [stamp for stamp in (finite(line.get("time_ms")) for line in race.lines) if stamp is not None]
    if any(late < early - 1000 for early, late in pairwise(stamps)):
        yield Note("the time stamps of the registry decrease")
    for planned, kinds in ((case.plan.tuning_runs(), ("tuning",)), (case.plan.runs(race.rates), ("race", "scaling"))):
        started = list(dict.fromkeys(run.key for run in race.runs if run.kind in kinds and run.ended))
        expected = [run.key for run in planned if run.key in started]
        started = [key for key in started if key in expected]
        for one, other in zip(started, expected, strict=True):
            if one != other:
                yield Note(f"{_name(one)} ran where the order of race.json has {_name(other)}")
                break


def _check_status(run: RunRecord) -> Iterator[Note]:
    """The status in the registry agrees with the end of the log."""
    logged = run.stop.get("status")
    if run.status == "finished" and logged == "aborted":
        why = run.stop.get("error") or "aborted"
        yield Note(
            f"{run.folder} is listed as finished, and its log ends with {why!r}",
            "count it as failed, with an infinite time",
        )
    elif run.status in ("failed", "diverged", "hung") and logged == "success":
        yield Note(
            f"{run.folder} is listed as {run.status} ({run.reason}), and its log ends with success",
            "run it again, or exclude it with a reason",
        )


def _check_reports(case: LintCase) -> Iterator[Note]:
    """The report has every run, with the time of its log. A report of an earlier state has fewer."""
    head = read_document(case.race.path / "report.json", []).get("registry_head")
    if head in [line.get("hash") for line in case.race.lines][:-1]:
        return
    for name in ("report.json", "runs.csv"):
        path = case.race.path / name
        try:
            text = path.read_text(encoding="utf-8")
            rows = list(_rows(json.loads(text) if path.suffix == ".json" else list(csv.DictReader(text.splitlines()))))
        except (OSError, ValueError, RecursionError):
            continue
        times = {str(row["folder"]): row.get("time_to_target") for row in rows}
        for run in case.race.runs:
            if times and run.folder not in times:
                yield Note(f"{name} leaves out {run.folder} ({run.status})", "write the report again, with all runs")
            elif run.folder in times and run.kind != "tuning":
                actual = run.time_to_target(case.plan.target, case.plan.higher_is_better)
                reported = _to_seconds(times[run.folder])
                if not (actual == reported or math.isclose(actual, reported, rel_tol=1e-3)):
                    yield Note(
                        f"{name} has {reported:g} s to the target for {run.folder} ({run.status}); its log has "
                        f"{actual:g}",
                        "write the report again; the time of a run that failed or missed the target is infinite",
                    )


def _rows(value: Any) -> Iterator[dict[str, Any]]:
    """All table rows that have the time of a run."""
    if isinstance(value, dict):
        if isinstance(value.get("folder"), str) and "time_to_target" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _rows(inner)


def _to_seconds(value: Any) -> float:
    try:
        return math.inf if value in (None, "") else float(value)
    except (TypeError, ValueError):
        return math.inf


def _name(key: RunKey) -> str:
    kind, entry, workers, seed, factor = key
    return f"{entry} on {workers}, seed {seed}" if kind != "tuning" else f"{entry}, rate times {factor:g}"


RULES = (
    LintRule(
        0,
        "Files were changed",
        "the folder is as the race wrote it: no file is missing, edited or added",
        "restore the files that the race wrote, or race again",
        _check_files,
        _describe_files,
    ),
    LintRule(
        3,
        "The tuning is not counted",
        "all runs that chose a learning rate are here, and all entries had the same number of them",
        "tune every entry with the same rates, inside the race (--tune), and keep all tuning runs",
        _check_tuning,
        _describe_tuning,
    ),
    LintRule(
        12,
        "Baselines or runs were selected",
        "baselines ran here with the same budget and enough seeds, and no run is missing",
        "keep every run; exclude one with a reason: syncline lint --exclude RUN --why …",
        _check_fairness,
        _describe_fairness,
    ),
)
