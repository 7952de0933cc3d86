"""Rule 12's other half: every run that was planned or begun is there, once, and failures count as such."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from syncline.bench.lint.base import Case, Note, some
from syncline.bench.lint.evidence import events, number
from syncline.bench.race.plan import Run as PlannedRun
from syncline.bench.race.reading import RanRun

__all__ = ["check_dropped"]

KEEP = "keep every run; one that must not count is excluded with a reason: syncline lint --exclude RUN --why …"
RESUME = "go on with the race (--resume), or say that it was not finished"

Key = tuple[str, str, int, int, float | None]


def check_dropped(case: Case) -> Iterator[Note]:
    """The registry against the plan, the folders, the logs and the report."""
    yield from _ends(case)
    yield from _order(case)
    for run in case.race.runs:
        yield from _status(run)
        if run.excluded is not None:
            good = bool(run.excluded.strip())
            told = f"{run.folder} is excluded: {run.excluded}" if good else f"{run.folder} is excluded without a reason"
            yield Note(told, KEEP, "warning" if good else "violation")
    yield from _reported(case)


def _ends(case: Case) -> Iterator[Note]:
    tried = [run for run in case.race.runs if run.kind != "tuning"]
    ended = Counter(_key(run) for run in tried if run.status not in ("interrupted", "running"))
    planned = [_planned_key(run) for run in case.plan.runs(case.race.rates)]
    missing = [_told(key) for key in planned if not ended[key]]
    if missing:
        yield Note(f"{len(missing)} of {len(planned)} planned runs have no end: {some(missing)}", RESUME)
    for key, times in ended.items():
        if times > 1:
            yield Note(f"{_told(key)} was run to its end {times} times: which one counts is a choice", KEEP)
        if key not in planned:
            yield Note(f"{_told(key)} was run, and race.json does not plan it", KEEP)
    again = Counter(_key(run) for run in tried if run.status in ("interrupted", "running"))
    broken = [f"{_told(key)} ({times} times)" for key, times in again.items()]
    if broken:
        yield Note(
            f"broken off and begun again: {some(broken)}",
            "look at their logs: a run that is broken off when it looks bad is a dropped one",
            "violation" if max(again.values()) > 2 else "warning",
        )


def _order(case: Case) -> Iterator[Note]:
    """The order in which runs began is the one that the plan draws: a run that was done over stands out."""
    race = case.race
    stamps = [stamp for stamp in (number(line.get("time_ms")) for line in race.lines) if stamp is not None]
    if any(late < early - 1000 for early, late in pairwise(stamps)):
        yield Note("the times of the registry go back", KEEP)
    for planned, kinds in ((case.plan.tuning_runs(), ("tuning",)), (case.plan.runs(race.rates), ("race", "scaling"))):
        begun = [_key(run) for run in race.runs if run.kind in kinds and run.status not in ("interrupted", "running")]
        begun = list(dict.fromkeys(begun))
        drawn = [_planned_key(run) for run in planned if _planned_key(run) in begun]
        begun = [key for key in begun if key in drawn]
        for one, other in zip(begun, drawn, strict=True):
            if one != other:
                yield Note(f"{_told(one)} ran where the order that race.json draws has {_told(other)}", KEEP)
                break


def _status(run: RanRun) -> Iterator[Note]:
    """How the registry says that a run ended, against its own log."""
    stop = next(reversed(events(run, "run_stop")), None)
    told = None if stop is None else stop.get("metadata", {}).get("status")
    if run.status == "finished" and told == "aborted":
        why = (stop or {}).get("metadata", {}).get("error") or "aborted"
        yield Note(
            f"{run.folder} is counted as finished, and its log ends with {why!r}", "count it as failed: infinite"
        )
    elif run.status in ("failed", "diverged", "hung") and told == "success":
        yield Note(
            f"{run.folder} is counted as {run.status} ({run.reason}), and its log ends well",
            "run it again, or exclude it with a reason",
        )


def _reported(case: Case) -> Iterator[Note]:
    """A report beside the race has every run, with the time that its log has. An older one tells of fewer."""
    if _older(case):
        return
    for name in ("report.json", "runs.csv"):
        path = case.race.path / name
        try:
            text = path.read_text(encoding="utf-8")
            rows = list(_rows(json.loads(text) if path.suffix == ".json" else list(csv.DictReader(text.splitlines()))))
        except (OSError, ValueError, RecursionError):
            continue
        known = {str(row["folder"]): row.get("time_to_target") for row in rows}
        for run in case.race.runs:
            if known and run.folder not in known:
                yield Note(f"{name} leaves out {run.folder} ({run.status})", "write the report anew, of all runs")
            elif run.folder in known and run.kind != "tuning":
                hit = run.hit(case.plan.target, case.plan.higher_is_better) if run.status == "finished" else None
                true, told = math.inf if hit is None else hit.elapsed, _seconds(known[run.folder])
                if not (true == told or math.isclose(true, told, rel_tol=1e-3)):
                    yield Note(
                        f"{name} has {told:g} s to the target for {run.folder} ({run.status}); its log has {true:g}",
                        "write the report anew; what failed or never got there is infinite",
                    )


def _older(case: Case) -> bool:
    """Whether the report was written when the registry ended elsewhere: a race that was interrupted has one."""
    try:
        found = json.loads((case.race.path / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    head = found.get("registry_head") if isinstance(found, dict) else None
    hashes = [line.get("hash") for line in case.race.lines]
    return head in hashes[:-1]


def _rows(found: Any) -> Iterator[dict[str, Any]]:
    """Every table row that is about a run's time."""
    if isinstance(found, dict):
        if isinstance(found.get("folder"), str) and "time_to_target" in found:
            yield found
        for value in found.values():
            yield from _rows(value)
    elif isinstance(found, list):
        for value in found:
            yield from _rows(value)


def _seconds(value: Any) -> float:
    try:
        return math.inf if value in (None, "") else float(value)
    except (TypeError, ValueError):
        return math.inf


def _key(run: RanRun) -> Key:
    return run.kind, run.entry, run.workers, run.seed, run.factor


def _planned_key(run: PlannedRun) -> Key:
    return run.kind, run.entry.name, run.workers, run.seed, run.factor


def _told(key: Key) -> str:
    kind, entry, workers, seed, factor = key
    return f"{entry} on {workers}, seed {seed}" if kind != "tuning" else f"{entry}, rate times {factor:g}"
