"""Rule 3: every run that a learning rate was chosen with is here and counted, and all entries had as many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from syncline.bench.answer_cache import cache_answers
from syncline.bench.lint.base import Case, Note
from syncline.bench.lint.evidence import close
from syncline.bench.race.plan import Tuning
from syncline.training.system import code_digest

__all__ = ["check", "looked"]

COUNT = "tune every entry with the same rates, inside the race (--tune), and keep all of its runs"


def looked(case: Case) -> str:
    """What is there."""
    if case.plan.tuning is None:
        return f"where the rates of {len(case.plan.entries)} entries are from; no tuning"
    runs = [run for run in case.race.runs if run.kind == "tuning"]
    seconds = sum(run.seconds or 0.0 for run in runs)
    return f"{len(runs)} tuning runs of {len(case.plan.entries)} entries, {seconds:.1f} s"


def check(case: Case) -> Iterator[Note]:
    """The runs that were planned, what was chosen by them, and rates that come from nowhere."""
    tuning = case.plan.tuning
    if tuning is None:
        strays = [run.folder for run in case.race.runs if run.kind == "tuning"]
        if strays:
            yield Note(f"{strays[0]} tuned, and race.json plans no tuning", COUNT)
        yield from _sources(case)
        return
    if tuning.seed in case.plan.seeds:
        yield Note(f"rates were tuned with seed {tuning.seed}, which is raced too", "tune with a seed of its own")
    yield from _runs(case, tuning)
    yield from _chosen(case)


def _runs(case: Case, tuning: Tuning) -> Iterator[Note]:
    found = [run for run in case.race.runs if run.kind == "tuning"]
    ended = Counter((run.entry, run.factor) for run in found if run.status not in ("interrupted", "running"))
    for entry in case.plan.entries:
        tried = [factor for factor in tuning.factors if ended[entry.name, factor]]
        if len(tried) < len(tuning.factors):
            yield Note(
                f"{entry.name}: {len(tried)} of {len(tuning.factors)} tuning runs are here (rates times "
                f"{', '.join(f'{factor:g}' for factor in tried) or 'none'})",
                COUNT,
            )
        often = [factor for factor in tuning.factors if ended[entry.name, factor] > 1]
        if often:
            yield Note(
                f"{entry.name}: its rate times {often[0]:g} was tried {ended[entry.name, often[0]]} times", COUNT
            )
    strays = [run.folder for run in found if run.factor not in tuning.factors]
    if strays:
        yield Note(f"{strays[0]} tried a rate that race.json does not plan", COUNT)


def _chosen(case: Case) -> Iterator[Note]:
    """The rate is the one that the logs say is best, and was chosen between the tuning and the race."""
    lines = case.race.lines
    where = {str(line.get("entry")): number for number, line in enumerate(lines) if line.get("event") == "tuned"}
    kinds = {run.folder: run.kind for run in case.race.runs}
    raced = [n for n, line in enumerate(lines) if line.get("event") == "begun" and kinds.get(line["run"]) != "tuning"]
    tuned = [n for n, line in enumerate(lines) if line.get("event") == "ended" and kinds.get(line["run"]) == "tuning"]
    for entry in case.plan.entries:
        if entry.name not in where:
            if raced:
                yield Note(f"{entry.name} raced before its rate was chosen", COUNT)
            continue
        line: dict[str, Any] = lines[where[entry.name]]
        best = case.race.choose_rate(entry)
        if not close(line.get("learning_rate"), best["learning_rate"]) or line.get("tried") != best["tried"]:
            yield Note(
                f"{entry.name} races with rate {line.get('learning_rate')}; by the last validation of its tuning "
                f"runs ({best['tried']}) it is {best['learning_rate']:g}",
                COUNT,
            )
        elif (raced and raced[0] < where[entry.name]) or (tuned and tuned[-1] > where[entry.name]):
            yield Note(f"the rate of {entry.name} was not chosen between the tuning and the race", COUNT)


def _sources(case: Case) -> Iterator[Note]:
    """A rate that is neither the workload's nor a preset's was found by runs that nobody has counted."""
    presets = _preset_rates()
    usual = case.data["learning_rate"] if case.data and case.plan.code_digest == code_digest() else None
    for entry in case.plan.entries:
        if entry.rate_from == "tuned":
            yield Note(f"the rate of {entry.name} is tuned, and no tuning run is here", COUNT)
            continue
        factor = 1.0 if entry.codec or entry.rate_from == "workload" else presets.get(entry.strategy, 1.0)
        rate = entry.learning_rate
        expected = rate if usual is None or rate is None else usual * factor
        given = entry.rate_from == "given"
        if given or not close(rate, expected, 1e-6):
            said = "was given" if given else f"is not the {entry.rate_from}'s, {expected:g}"
            yield Note(
                f"the rate of {entry.name} ({rate}) {said}: what it took to find it is not counted",
                "say how it was found, or tune inside the race (--tune)",
                "warning",
            )


@cache_answers
def _preset_rates() -> dict[str, float]:
    """What each preset multiplies the workload's rate by."""
    from syncline.strategies import default_presets

    return {preset.spec: preset.rate for preset in default_presets()}
