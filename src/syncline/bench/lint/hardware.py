"""Rule 4: the same machine, software and place for all."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from syncline.bench.lint.base import Case, Note, some
from syncline.bench.race.reading import RanRun

__all__ = ["check", "looked"]

BY_SIZE = ("device", "threads", "hosts", "lab")
"""Of the world: the same for all runs on as many workers."""
BY_ENGINE = ("engine", "launcher")
"""And these for all of them whose entries were planned for the same engine."""
USABLE = "cores usable"
"""Of the machine, by rank 0: its share is larger where fewer share it."""
SAME = "run all entries on the same machine, with the same software, in one race"


def looked(case: Case) -> str:
    """What is there."""
    known = [run for run in case.race.runs if run.system]
    return f"system.json of {len(known)} runs" if known else ""


def check(case: Case) -> Iterator[Note]:
    """Compare what every run wrote down about where it was."""
    known = [run for run in case.race.runs if run.system]
    for section in ("machine", "versions"):
        fields = {key for run in known for key in _section(run.system, section)} - {USABLE}
        for field in sorted(fields):
            yield from _compare(
                f"{section}, {field}", [(run.folder, _section(run.system, section), field) for run in known]
            )
    planned = {entry.name: entry.engine for entry in case.plan.entries}
    for size in sorted({run.workers for run in known}):
        runs = [run for run in known if run.workers == size]
        yield from _compare(USABLE, [(run.folder, _section(run.system, "machine"), USABLE) for run in runs])
        for field in BY_SIZE:
            yield from _compare(
                f"{field} of {size} workers", [(run.folder, _section(run.system, "world"), field) for run in runs]
            )
        for engine in sorted(set(planned.values()), key=str):
            alike = [run for run in runs if planned.get(run.entry) == engine]
            for field in BY_ENGINE:
                yield from _compare(
                    f"{field} of {size} workers", [(run.folder, _section(run.system, "world"), field) for run in alike]
                )
    yield from _race(case, known)
    yield from _place(case, known)


def _compare(what: str, values: list[tuple[str, dict[str, Any], str]]) -> Iterator[Note]:
    groups: dict[str, list[str]] = defaultdict(list)
    for folder, section, field in values:
        groups[json.dumps(section.get(field))].append(folder)
    if len(groups) > 1:
        most, *others = sorted(groups.items(), key=lambda group: -len(group[1]))
        told = "; ".join(f"{value} in {some(folders, 2)}" for value, folders in others)
        yield Note(f"{what}: {most[0]} in {len(most[1])} runs, {told}", SAME)


def _race(case: Case, known: list[RanRun]) -> Iterator[Note]:
    """The machine that the race was planned on, where the workers were on it too."""
    if not known or not case.race.system:
        return
    planned, first = _section(case.race.system, "machine"), _section(known[0].system, "machine")
    for field, value in planned.items():
        # What a process may use of a machine is the business of whoever started it.
        if field not in ("host", USABLE) and first.get(field) != value:
            yield Note(f"{field}: {value!r} where the race was planned, {first.get(field)!r} where it ran", SAME)


def _place(case: Case, known: list[RanRun]) -> Iterator[Note]:
    """The runs were where the plan says."""
    kind = case.plan.place.kind
    for run in known:
        world = _section(run.system, "world")
        if world.get("size") != run.workers:
            yield Note(f"{run.folder} is counted with {run.workers} workers, and ran on {world.get('size')}", SAME)
            return
        asked = next((entry.engine for entry in case.plan.entries if entry.name == run.entry), None)
        if asked is not None and world.get("engine") != asked:
            yield Note(f"{run.folder} ran on engine {world.get('engine')!r}; its entry asks for {asked!r}", SAME)
            return
        if (world.get("engine") == "simulated") != (kind == "simulated") or (kind == "lab" and not world.get("lab")):
            yield Note(
                f"{run.folder} ran on engine {world.get('engine')!r}, lab {world.get('lab')!r}; race.json says "
                f"{kind} {case.plan.place.detail}",
                SAME,
            )
            return


def _section(system: dict[str, Any], name: str) -> dict[str, Any]:
    found = system.get(name)
    return found if isinstance(found, dict) else {}
