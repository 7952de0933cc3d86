"""Before the twelve: the folder is as the race wrote it. Whatever is missing, edited or foreign is named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from syncline.bench.lint.base import Case, Note
from syncline.bench.race.reading import REGISTRY, SYSTEM, mixed
from syncline.bench.race.registry import sha256
from syncline.bench.race.splits import SPLITS

__all__ = ["check", "looked"]

RESTORE = "put the files back as the race wrote them, or race again"


def looked(case: Case) -> str:
    """What is there."""
    return f"{len(case.race.lines)} lines of {REGISTRY}, the files of {len(case.race.runs)} runs"


def check(case: Case) -> Iterator[Note]:
    """What reading has found, and the sums that the first line of the registry keeps."""
    race = case.race
    of_other_code = set(mixed(race.plan, race.runs))  # rule 8 tells of it
    for problem in dict.fromkeys(race.problems):
        if problem not in of_other_code:
            yield Note(problem, RESTORE)
    planned = next((line for line in race.lines if line.get("event") == "planned"), {})
    kept = planned.get("splits")
    for name in SPLITS:
        path = race.path / "splits" / f"{name}.u64"
        if not path.exists():
            yield Note(f"splits/{name}.u64 is missing: nobody can see that the splits were disjoint", RESTORE)
        elif isinstance(kept, dict) and kept.get(name) != hashlib.sha256(path.read_bytes()).hexdigest():
            yield Note(f"splits/{name}.u64 was edited after the race began", RESTORE)
    system = race.path / SYSTEM
    if system.exists() and planned.get("system_sha256") not in (None, sha256(system)):
        yield Note(f"{SYSTEM} was edited after the race began", RESTORE)
