"""A race whose plan and registry hold what they are said to hold, or a sentence that names what does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.bench.race.reading import Race, read_race
from syncline.errors import ProtocolError, SynclineError

__all__ = ["read"]

NUMBER, WHOLE, TEXT, NOTHING = "a number", "a whole number", "text", "nothing"

PLAN = {
    **dict.fromkeys(("workload", "metric", "command", "code_version", "code_digest"), (TEXT,)),
    **dict.fromkeys(("workers", "epochs", "batch", "evaluate_samples", "evaluations_after"), (WHOLE,)),
    **dict.fromkeys(("order_seed", "created_ms"), (WHOLE,)),
    **dict.fromkeys(("target", "limit"), (NUMBER,)),
    "seconds_a_sample": (NUMBER, NOTHING),
    "scaling": (TEXT, NOTHING),
}
ENTRY = {
    **dict.fromkeys(("name", "strategy", "collective", "scaling", "decay", "rate_from"), (TEXT,)),
    "codec": (TEXT, NOTHING),
    "learning_rate": (NUMBER, NOTHING),
    "momentum": (NUMBER, NOTHING),
    "warmup": (NUMBER,),
}
RUN = {
    **dict.fromkeys(("kind", "entry", "status"), (TEXT,)),
    **dict.fromkeys(("workers", "seed"), (WHOLE,)),
    **dict.fromkeys(("factor", "seconds"), (NUMBER, NOTHING)),
    "reason": (TEXT, NOTHING),
}


def read(folder: str | Path) -> Race:
    """A race's folder. What is wrong with a run is told in its problems; a plan that makes no sense is refused."""
    try:
        race = read_race(folder)
        _check(race)
    except SynclineError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"{folder} cannot be read as a race ({type(error).__name__}: {error}): race.json or registry.jsonl was "
            "edited, or written by another version"
        ) from None
    return race


def _check(race: Race) -> None:
    plan = race.plan
    _fields(vars(plan), PLAN, "race.json")
    _fields(vars(plan.place), {"kind": (TEXT,), "detail": (TEXT,)}, "race.json, place")
    for entry in plan.entries:
        _fields(vars(entry), ENTRY, f"race.json, entry {entry.name!r}")
    for name, numbers in (("seeds", plan.seeds), ("scaling_workers", plan.scaling_workers)):
        _fields(dict(enumerate(numbers)), dict.fromkeys(range(len(numbers)), (WHOLE,)), f"race.json, {name}")
    if plan.tuning is not None:
        _fields(vars(plan.tuning), {"epochs": (WHOLE,), "seed": (WHOLE,)}, "race.json, tuning")
        factors = plan.tuning.factors
        _fields(dict(enumerate(factors)), dict.fromkeys(range(len(factors)), (NUMBER,)), "race.json, tuning factors")
    _fields(plan.skipped, dict.fromkeys(plan.skipped, (TEXT,)), "race.json, skipped")
    if plan.workers < 1:
        raise ProtocolError(f"race.json has {plan.workers} workers: it was edited, or written by another version")
    for run in race.runs:
        _fields(vars(run), RUN, f"registry.jsonl, run {run.folder}")
    for number, line in enumerate(race.lines, 1):
        _fields({"event": None, **line}, {"event": (TEXT,)}, f"registry.jsonl, line {number}")
    _ = race.rates, race.left()


def _fields(found: Mapping[Any, Any], wanted: Mapping[Any, tuple[str, ...]], where: str) -> None:
    for name, kinds in wanted.items():
        value = found[name]
        if not any(_is(value, kind) for kind in kinds):
            raise ProtocolError(
                f"{where}: {name} is {value!r}, and not {' or '.join(kinds)}: it was edited, or written by another "
                "version; put the file back"
            )


def _is(value: Any, kind: str) -> bool:
    if kind == NOTHING:
        return value is None
    if kind == TEXT:
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if kind == WHOLE else isinstance(value, (int, float)) and math.isfinite(value)
