"""Rule 9: samples have the shape, kind and number that the workload gives them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from syncline.bench.lint.base import Case, Note, some
from syncline.bench.lint.data import is_built_in
from syncline.bench.lint.evidence import events
from syncline.bench.race.reading import RanRun

__all__ = ["check", "check_run", "looked"]

FIELDS = ("workload", "metric", "higher_is_better", "samples", "parameters", "sha256", "script_sha256", "input")
AGAIN = "train on the workload's own samples, as they are, and race again"


def looked(case: Case) -> str:
    """What is there."""
    known = [run for run in case.race.runs if run.config]
    beside = "" if case.data is None else "the data on this machine"
    missing = "" if beside else f"{case.plan.workload} cannot be built by the lint here: runs beside each other alone"
    return f"input and data of {len(known)} runs, beside {beside}" if beside and known else missing if known else ""


def check(case: Case) -> Iterator[Note]:
    """All runs had the same data, and it is the workload's."""
    known = [run for run in case.race.runs if run.config]
    for field in FIELDS:
        groups: dict[str, list[str]] = defaultdict(list)
        for run in known:
            groups[json.dumps(run.config.get(field), sort_keys=True)].append(run.folder)
        if len(groups) > 1:
            told = "; ".join(f"{value} in {some(folders, 2)}" for value, folders in groups.items())
            yield Note(f"{field} is not the same for all: {told}", AGAIN)
    for run in known:
        yield from check_run(run)
    if known and case.data is not None:
        yield from _beside(known[0], case.data["config"])
    elif known and is_built_in(str(known[0].config.get("workload")).partition("(")[0]):
        # Whoever names a script in the plan keeps the lint from building the workload.
        trained = str(known[0].config.get("workload"))
        if case.plan.workload.partition("(")[0].strip() != trained.partition("(")[0]:
            yield Note(f"race.json names the workload {case.plan.workload!r}, and the runs trained {trained!r}", AGAIN)


def check_run(run: RanRun) -> Iterator[Note]:
    """The log of one run counts the samples that its configuration tells."""
    sizes = run.config.get("samples")
    for key, split in (("train_samples", "train"), ("eval_samples", "validation")):
        for event in events(run, key):
            if isinstance(sizes, dict) and event.get("value") != sizes.get(split):
                yield Note(f"{run.folder}: {key} is {event.get('value')}, and {split} has {sizes.get(split)}", AGAIN)


def _beside(run: RanRun, here: dict[str, Any]) -> Iterator[Note]:
    if run.config.get("sha256") != here.get("sha256") and run.config.get("input") == here["input"]:
        yield Note(
            f"the race's data has the sum {run.config.get('sha256')}, this machine's {here.get('sha256')}",
            "lint where the data is the same, or say which data it was",
            "warning",
        )
        return
    for field in FIELDS:
        if run.config.get(field) != here.get(field):
            yield Note(
                f"{field} is {run.config.get(field)} in {run.folder}, and {here.get(field)} by the workload", AGAIN
            )
