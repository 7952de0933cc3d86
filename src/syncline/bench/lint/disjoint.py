"""Rule 2's other half: the splits share no samples, and are the workload's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from syncline.bench.lint.base import Case, Note
from syncline.bench.race.splits import MOST, read_splits

__all__ = ["check_splits"]

OVERLAP = 0.005
"""Of the smaller split. Some collections hold the same picture twice: a few are told, more are no accident."""
SPLIT = "make the splits disjoint, and race again: none of these numbers says anything about unseen data"


def check_splits(case: Case) -> Iterator[Note]:
    found = read_splits(case.race.path)
    for one, other in combinations(found, 2):
        shared, least = len(found[one] & found[other]), min(len(found[one]), len(found[other]))
        if shared:
            yield Note(
                f"{one} and {other} share {shared} samples ({shared / max(1, least):.2%} of the smaller)",
                SPLIT,
                "violation" if shared > OVERLAP * least else "warning",
            )
    for run in case.counted:
        sizes = run.config.get("samples") or {}
        wrong = [name for name in found if len(found[name]) > sizes.get(name, MOST)]
        if wrong:
            yield Note(
                f"{run.folder} knows {sizes} samples, and splits/{wrong[0]}.u64 has {len(found[wrong[0]])}", SPLIT
            )
            break
    yield from _data(case)


def _data(case: Case) -> Iterator[Note]:
    """The digests against the data as this machine has it, where it has the same."""
    here, found = case.data, read_splits(case.race.path)
    known = next((run.config.get("sha256") for run in case.counted), None)
    if here is None or not found or known != here["config"].get("sha256"):
        return
    for name in found:
        first = here["digests"][name]
        strange = sum(digest not in found[name] for digest in first)
        if strange and here["config"]["samples"][name] <= MOST:
            yield Note(
                f"{strange} of the first {len(first)} samples of {name} are not in splits/{name}.u64: it is not a "
                "list of this workload's data",
                SPLIT,
            )
