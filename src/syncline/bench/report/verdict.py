"""Who won, by how much and how sure that is, and what holds the winner and the baseline back.

A leader has the smallest median time to the target. It has *won* if, seed by seed, the interval of every rival's time ÷
its own lies above 1. Otherwise those rivals cannot be told apart from it, and nobody has won. With fewer than three
seeds there is no interval to go by: the leader is *ahead*, and that is all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from syncline.bench.report.analysis import Analysis, EntryFacts, paired
from syncline.bench.report.limits import Limit, binding_limit
from syncline.bench.report.spread import Spread
from syncline.bench.report.words import bytes_told, edges, number, seconds_told, time_unit

__all__ = ["Outcome", "Verdict", "judge"]

Outcome = Literal["won", "tied", "ahead", "alone", "nobody", "empty"]

SEEDS = 3
"""Fewer say nothing about luck."""


@dataclass(frozen=True)
class Verdict:
    """A sentence on top of a report, and its reasons."""

    outcome: Outcome
    sentence: str
    leader: str | None = None
    rivals: list[str] = field(default_factory=list)
    """Those that cannot be told apart from the leader."""
    limits: list[Limit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """All of it, for a terminal."""
        told = [f"{limit.entry} is bound by {limit.name}: {limit.evidence}. {limit.advice}" for limit in self.limits]
        return "\n".join([self.sentence, *told, *self.notes])


def judge(race: Analysis) -> Verdict:
    """The verdict on a race; on one that is not finished, so far."""
    found = _judged(race)
    if race.finished or found.outcome == "empty":
        return found
    return replace(found, sentence=f"So far: {found.sentence}")


def _judged(race: Analysis) -> Verdict:
    ran = [entry for entry in race.entries if entry.runs]
    if not ran:
        return Verdict("empty", "No run has ended yet: there is nothing to compare.")
    arrived = sorted((entry for entry in ran if entry.time is not None and entry.time.finite), key=_median)
    if not arrived:
        return _nobody(race, ran)
    leader = arrived[0]
    rivals = _rivals(race, leader, [entry for entry in ran if entry is not leader and entry.reached])
    seeds = min(entry.runs for entry in arrived)
    outcome: Outcome = "won"
    if len(ran) == 1:
        outcome = "alone"
    elif seeds < SEEDS:
        outcome = "ahead"
    elif rivals:
        outcome = "tied"
    sentence = _sentence(race, outcome, leader, rivals, sum(entry.reached > 0 for entry in ran))
    named = dict.fromkeys([leader.name, *([race.baseline] if race.baseline else [])])
    limits = [binding_limit(race, race.entry(name)) for name in named]
    known = [limit for limit in limits if limit is not None]
    return Verdict(outcome, sentence, leader.name, [entry.name for entry, _ in rivals], known, _notes(race))


def _median(entry: EntryFacts) -> float:
    return math.inf if entry.time is None else entry.time.median


def _rivals(race: Analysis, leader: EntryFacts, others: Sequence[EntryFacts]) -> list[tuple[EntryFacts, Spread | None]]:
    """Those whose time ÷ the leader's is not above 1 beyond doubt."""
    own = {run.seed: run.time_to_target for run in race.of(leader.name)}
    found = []
    for other in others:
        ratio = paired({run.seed: run.time_to_target for run in race.of(other.name)}, own)
        if ratio is None or ratio.samples < SEEDS or not ratio.low > 1:
            found.append((other, ratio))
    return found


def _sentence(
    race: Analysis,
    outcome: Outcome,
    leader: EntryFacts,
    rivals: Sequence[tuple[EntryFacts, Spread | None]],
    arrived: int,
) -> str:
    assert leader.time is not None
    goal = f"{race.metric} {number(race.target)}"
    when = f"median {seconds_told(leader.time)}"
    if outcome == "tied":
        told = ", ".join(f"{other.name} ({_beside(ratio)})" for other, ratio in rivals[:3])
        more = f" and {len(rivals) - 3} more" if len(rivals) > 3 else ""
        return (
            f"Nobody won beyond doubt: {leader.name} reached {goal} in {when}, and {told}{more} cannot be told apart "
            f"from it with {leader.runs} seeds."
        )
    against = _against(race, leader)
    if outcome == "ahead":
        seeds = f"{leader.runs} seed{'s' if leader.runs != 1 else ''}"
        return (
            f"{leader.name} was ahead: {goal} in {when}{against}. With {seeds} that may be luck; "
            f"{SEEDS} at least make an interval."
        )
    if outcome == "alone":
        return f"{leader.name} ran alone and reached {goal} in {when}."
    missed = "" if leader.reached == leader.runs else f", though only with {leader.reached} of {leader.runs} seeds"
    others = "; no other entry did" if arrived == 1 else ""
    return f"{leader.name} reached {goal} first: {when}{against}{missed}{others}."


def _beside(ratio: Spread | None) -> str:
    return "no seed in common" if ratio is None else f"time ratio {_ratio(ratio)}"


def _ratio(ratio: Spread) -> str:
    return f"{number(ratio.median, 3)}{edges(ratio)}"


def _against(race: Analysis, leader: EntryFacts) -> str:
    """How much sooner than the baseline, seed by seed; than the next one, where the baseline itself leads."""
    other = race.baseline
    if other == leader.name:
        others = [entry for entry in race.entries if entry.name != other and math.isfinite(_median(entry))]
        other = min(others, key=_median).name if others else None
    if other is None:
        return ""
    own = {run.seed: run.time_to_target for run in race.of(leader.name)}
    ratio = paired({run.seed: run.time_to_target for run in race.of(other)}, own)
    if ratio is None:
        return ""
    if not math.isfinite(ratio.median):
        return f"; {other} did not reach it"
    return f", {number(ratio.median, 3)}×{edges(ratio)} sooner than {other}"


def _nobody(race: Analysis, ran: Sequence[EntryFacts]) -> Verdict:
    """The target was never reached, or by too few seeds of anybody; with the best value."""
    goal = f"{race.metric} {number(race.target)}"
    notes = _notes(race)
    some = [f"{entry.name} with {entry.reached} of {entry.runs} seeds" for entry in ran if entry.reached]
    if some:
        return Verdict("nobody", f"Nobody reached {goal} with most seeds: {', '.join(some)}.", notes=notes)
    pick = max if race.higher_is_better else min
    tried = [(_best(race, entry), entry.name) for entry in ran if entry.best is not None]
    if not tried:
        return Verdict("nobody", f"Nobody reached {goal}, and no run came as far as an evaluation.", notes=notes)
    best, name = pick(tried)
    limit = binding_limit(race, race.entry(name))
    return Verdict(
        "nobody",
        f"Nobody reached {goal}. The best was {number(best)}, by {name}.",
        limits=[] if limit is None else [limit],
        notes=notes,
    )


def _notes(race: Analysis) -> list[str]:
    """What else whoever reads only the top should know."""
    notes = _alone(race)
    if race.simulated and any(entry.codec for entry in race.entries):
        notes.append("Simulated: encoding and decoding are taken to cost no time, so codecs look better than they are.")
    failed = [f"{entry.name} ({_counted(entry)})" for entry in race.entries if _bad(entry)]
    if failed:
        notes.append(f"Failed: {', '.join(failed)}.")
    missed = [
        f"{entry.name} ({entry.reached} of {entry.runs}, best {number(_best(race, entry))})"
        for entry in race.entries
        if entry.runs and entry.reached < entry.statuses.get("finished", 0) and entry.best is not None
    ]
    if missed:
        notes.append(f"Did not reach the target with every seed: {', '.join(missed)}.")
    frugal = [entry for entry in race.entries if entry.bytes is not None and entry.bytes.finite and entry.bytes.median]
    if len(frugal) > 1:
        least = min(frugal, key=lambda entry: entry.bytes.median if entry.bytes else math.inf)
        assert least.bytes is not None
        notes.append(
            f"Fewest bytes to the target: {least.name}, {bytes_told(least.bytes.median)} handed over by a worker."
        )
    return notes


def _alone(race: Analysis) -> list[str]:
    """Whether all these workers were worth it."""
    single = [
        (point.time.median, entry.name)
        for entry in race.entries
        for point in entry.scaling
        if point.workers == 1 and point.time.finite
    ]
    if not single or race.workers == 1:
        return []
    time, name = min(single)
    factor, unit = time_unit([time])
    told = f"{number(factor * time, 3)} {unit} ({name})"
    soonest = min(map(_median, race.entries))
    if time <= soonest:
        return [f"One worker alone was no slower than {race.workers}: {told}."]
    return [f"One worker alone took {told}, {number(time / soonest, 3)}× as long as the best of {race.workers}."]


def _best(race: Analysis, entry: EntryFacts) -> float:
    assert entry.best is not None
    return entry.best.most if race.higher_is_better else entry.best.least


def _bad(entry: EntryFacts) -> bool:
    return any(status != "finished" for status in entry.statuses)


def _counted(entry: EntryFacts) -> str:
    told = [f"{count} {status}" for status, count in entry.statuses.items() if status != "finished"]
    return f"{', '.join(told)} of {entry.runs}"
