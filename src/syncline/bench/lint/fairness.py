"""Rule 12: baselines run here with the same budget, enough seeds, the same ones for all, and nothing is dropped."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.bench.lint.base import Case, Note, some
from syncline.bench.lint.dropped import check_dropped
from syncline.bench.race.plan import Entry

__all__ = ["check", "looked"]

SEEDS = 3
"""Fewer tell nothing of luck."""


def looked(case: Case) -> str:
    """What is there."""
    plan = case.plan
    return (
        f"{len(plan.entries)} entries, {sum(map(_is_baseline, plan.entries))} to compare with, {len(plan.seeds)} "
        f"seeds; {len(case.race.lines)} lines of the registry"
    )


def check(case: Case) -> Iterator[Note]:
    """Who is compared with whom, on what budget; then whether all runs are there."""
    plan = case.plan
    if not any(map(_is_baseline, plan.entries)):
        yield Note(
            f"none of {some([entry.name for entry in plan.entries])} is a baseline",
            "let DDP or plain all-reduce race too: numbers from elsewhere are no comparison",
        )
    if len(set(plan.seeds)) < SEEDS:
        yield Note(
            f"{len(set(plan.seeds))} seeds ({plan.seeds}): at least {SEEDS} show luck", f"race with {SEEDS} seeds"
        )
    for name, reason in plan.skipped.items():
        if not str(reason).strip():
            yield Note(f"{name} was skipped without a reason", "say why it cannot run here, or let it run")
    for run in case.race.runs:
        planned = case.planned(run)
        if not run.config or planned is None:
            continue
        settings = plan.settings(planned)
        for field, wanted in (("epochs", settings.epochs), ("steps", settings.steps)):
            if run.config.get(field) != wanted:
                yield Note(
                    f"{run.folder} had a budget of {run.config.get(field)} {field}, and race.json gives all {wanted}",
                    "give every entry the same budget, and race again",
                )
    yield from check_dropped(case)


def _is_baseline(entry: Entry) -> bool:
    """Somebody else's, or the plainest of ours."""
    return entry.baseline or (entry.strategy == "allreduce" and entry.codec is None)
