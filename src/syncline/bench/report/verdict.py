"""The verdict of a race: which entry reached the target first, by how much, and what limits its speed.

The leader has the smallest median time to the target. It has *won* if, paired by seed, the interval of every other
entry's time ÷ its own lies above 1. Otherwise these entries cannot be distinguished from it, and no entry has won. With
fewer than three seeds there is no interval: then the leader is only *ahead*.

The limit of an entry is the cost whose removal would save most of its time:

```text
limit           what its removal would save, as a share of the time to the target
communication   the share of exposed communication
codec           the share of encoding and decoding that delayed the worker
data            the share of waiting for batches
evaluation      the share of evaluations
agreeing        the share of control messages, by which the ranks decide whether to continue
statistics      1 − 1/r, if it needs r times the epochs of the entry, or of the one worker, that needs fewest;
                only if r is at least 1.25
compute         the share of compute, if nothing else is larger
```
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from syncline.bench.report.analysis import Analysis, EntryFacts, Spread, paired
from syncline.bench.report.phrases import bytes_phrase, interval_phrase, number_phrase, seconds_phrase, time_unit

__all__ = ["RaceOutcome", "RaceVerdict", "SpeedLimit", "binding_limit", "judge"]

RaceOutcome = Literal["won", "tied", "ahead", "alone", "nobody", "empty"]
LimitName = Literal["communication", "codec", "data", "evaluation", "agreeing", "statistics", "compute"]

MIN_SEEDS = 3
"""Fewer seeds have no interval."""
MIN_EPOCHS_RATIO = 1.25
"""A smaller ratio of epochs may be random."""
PHASE_OF_LIMIT: dict[LimitName, str] = {
    "communication": "exposed",
    "codec": "codec",
    "data": "data",
    "evaluation": "evaluation",
    "agreeing": "agreeing",
    "compute": "compute",
}
LIMIT_PHRASES: dict[LimitName, str] = {
    "communication": "waiting for communication",
    "codec": "encoding and decoding",
    "data": "waiting for data",
    "agreeing": "control messages",
}
ADVICE: dict[LimitName, str] = {
    "codec": "use a cheaper codec (cast, quantize), or none on this network.",
    "data": "prefetch batches, or store the data closer to the workers.",
    "evaluation": "evaluate less often, or on fewer samples.",
    "agreeing": "the ranks wait for each other; look for the slow one.",
}


@dataclass(frozen=True)
class RaceVerdict:
    """The result in one sentence, with its reasons."""

    outcome: RaceOutcome
    sentence: str
    leader: str | None = None
    rivals: list[str] = field(default_factory=list)
    """Entries that cannot be distinguished from the leader."""
    limits: list[SpeedLimit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The verdict for a terminal."""
        limits = [
            f"{limit.entry} is limited by {limit.label}: {limit.evidence}. {limit.advice}" for limit in self.limits
        ]
        return "\n".join([self.sentence, *limits, *self.notes])


def judge(race: Analysis) -> RaceVerdict:
    """The verdict of a race. If it is not finished, the sentence says so."""
    verdict = _judge(race)
    if race.finished or verdict.outcome == "empty":
        return verdict
    return replace(verdict, sentence=f"So far: {verdict.sentence}")


def _judge(race: Analysis) -> RaceVerdict:
    ran = [entry for entry in race.entries if entry.runs]
    if not ran:
        return RaceVerdict("empty", "No run has ended yet: there is nothing to compare.")
    reached = sorted((entry for entry in ran if entry.time is not None and entry.time.finite), key=_median)
    if not reached:
        return _judge_unreached(race, ran)
    leader = reached[0]
    rivals = _rivals(race, leader, [entry for entry in ran if entry is not leader and entry.reached])
    seeds = min(entry.runs for entry in reached)
    outcome: RaceOutcome = "won"
    if len(ran) == 1:
        outcome = "alone"
    elif seeds < MIN_SEEDS:
        outcome = "ahead"
    elif rivals:
        outcome = "tied"
    sentence = _sentence(race, outcome, leader, rivals, sum(entry.reached > 0 for entry in ran))
    named = dict.fromkeys([leader.name, *([race.baseline] if race.baseline else [])])
    limits = [binding_limit(race, race.entry(name)) for name in named]
    known = [limit for limit in limits if limit is not None]
    return RaceVerdict(outcome, sentence, leader.name, [entry.name for entry, _ in rivals], known, _notes(race))


def _median(entry: EntryFacts) -> float:
    return math.inf if entry.time is None else entry.time.median


def _rivals(race: Analysis, leader: EntryFacts, others: Sequence[EntryFacts]) -> list[tuple[EntryFacts, Spread | None]]:
    """Entries whose time ÷ the leader's is not significantly above 1."""
    own = {run.seed: run.time_to_target for run in race.of(leader.name)}
    rivals = []
    for other in others:
        ratio = paired({run.seed: run.time_to_target for run in race.of(other.name)}, own)
        if ratio is None or ratio.samples < MIN_SEEDS or not ratio.low > 1:
            rivals.append((other, ratio))
    return rivals


def _sentence(
    race: Analysis,
    outcome: RaceOutcome,
    leader: EntryFacts,
    rivals: Sequence[tuple[EntryFacts, Spread | None]],
    number_reached: int,
) -> str:
    assert leader.time is not None
    goal = f"{race.metric} {number_phrase(race.target)}"
    when = f"median {seconds_phrase(leader.time)}"
    if outcome == "tied":
        names = ", ".join(f"{other.name} ({_ratio_phrase(ratio)})" for other, ratio in rivals[:3])
        more = f" and {len(rivals) - 3} more" if len(rivals) > 3 else ""
        return (
            f"No entry won: {leader.name} reached {goal} first ({when}), but with {leader.runs} seeds {names}{more} "
            "cannot be distinguished from it."
        )
    against = _against(race, leader)
    if outcome == "ahead":
        seeds = f"{leader.runs} seed{'s' if leader.runs != 1 else ''}"
        return (
            f"{leader.name} was ahead: {goal}, {when}{against}. With {seeds} this is not significant; use at least "
            f"{MIN_SEEDS} seeds."
        )
    if outcome == "alone":
        return f"{leader.name} was the only entry and reached {goal}: {when}."
    missed = "" if leader.reached == leader.runs else f", but only with {leader.reached} of {leader.runs} seeds"
    others = "; no other entry reached it" if number_reached == 1 else ""
    return f"{leader.name} reached {goal} first: {when}{against}{missed}{others}."


def _ratio_phrase(ratio: Spread | None) -> str:
    return "no common seed" if ratio is None else f"time ratio {number_phrase(ratio.median, 3)}{interval_phrase(ratio)}"


def _against(race: Analysis, leader: EntryFacts) -> str:
    """The speed-up over the baseline, paired by seed; over the next entry if the baseline leads."""
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
    return f", {number_phrase(ratio.median, 3)}×{interval_phrase(ratio)} faster than {other}"


def _judge_unreached(race: Analysis, ran: Sequence[EntryFacts]) -> RaceVerdict:
    """No entry reached the target with most of its seeds."""
    goal = f"{race.metric} {number_phrase(race.target)}"
    notes = _notes(race)
    some = [f"{entry.name} with {entry.reached} of {entry.runs} seeds" for entry in ran if entry.reached]
    if some:
        return RaceVerdict("nobody", f"No entry reached {goal} with most of its seeds: {', '.join(some)}.", notes=notes)
    pick = max if race.higher_is_better else min
    tried = [(_best(race, entry), entry.name) for entry in ran if entry.best is not None]
    if not tried:
        return RaceVerdict("nobody", f"No entry reached {goal}, and no run had an evaluation.", notes=notes)
    best, name = pick(tried)
    limit = binding_limit(race, race.entry(name))
    return RaceVerdict(
        "nobody",
        f"No entry reached {goal}. The best was {number_phrase(best)}, by {name}.",
        limits=[] if limit is None else [limit],
        notes=notes,
    )


def _notes(race: Analysis) -> list[str]:
    """Further sentences for readers of the verdict."""
    notes = _one_worker(race)
    if race.simulated and any(entry.codec for entry in race.entries):
        notes.append("Simulated: encoding and decoding take no time, so codecs look better than they are.")
    failed = [
        f"{entry.name} ({_failures(entry)})"
        for entry in race.entries
        if any(one != "finished" for one in entry.statuses)
    ]
    if failed:
        notes.append(f"Failed: {', '.join(failed)}.")
    missed = [
        f"{entry.name} ({entry.reached} of {entry.runs}, best {number_phrase(_best(race, entry))})"
        for entry in race.entries
        if entry.runs and entry.reached < entry.statuses.get("finished", 0) and entry.best is not None
    ]
    if missed:
        notes.append(f"Did not reach the target with every seed: {', '.join(missed)}.")
    counted = _medians((entry.bytes, entry.name) for entry in race.entries)
    if len(counted) > 1:
        fewest, name = min(counted)
        notes.append(f"Fewest bytes to the target: {name}, {bytes_phrase(fewest)} sent by a worker.")
    return notes


def _medians(spreads: Iterable[tuple[Spread | None, str]]) -> list[tuple[float, str]]:
    """The medians that are positive and finite, with the names of their entries."""
    return [(each.median, name) for each, name in spreads if each is not None and 0 < each.median < math.inf]


def _one_worker(race: Analysis) -> list[str]:
    """The comparison with one worker."""
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
    phrase = f"{number_phrase(factor * time, 3)} {unit} ({name})"
    fastest = min(map(_median, race.entries))
    if time <= fastest:
        return [f"One worker was not slower than {race.workers}: {phrase}."]
    return [
        f"One worker took {phrase}, {number_phrase(time / fastest, 3)}× as long as the best entry on {race.workers}."
    ]


def _best(race: Analysis, entry: EntryFacts) -> float:
    assert entry.best is not None
    return entry.best.most if race.higher_is_better else entry.best.least


def _failures(entry: EntryFacts) -> str:
    failures = [f"{count} {status}" for status, count in entry.statuses.items() if status != "finished"]
    return f"{', '.join(failures)} of {entry.runs}"


@dataclass(frozen=True)
class SpeedLimit:
    """What limits the speed of an entry, its share of the time, and what would help."""

    entry: str
    name: LimitName
    share: float
    evidence: str
    advice: str
    shares: dict[LimitName, float]
    """What the removal of each would save."""

    @property
    def label(self) -> str:
        return LIMIT_PHRASES["agreeing"] if self.name == "agreeing" else self.name


def binding_limit(race: Analysis, entry: EntryFacts) -> SpeedLimit | None:
    """The limit of an entry; None if no run of it has finished."""
    if not entry.shares:
        return None
    shares: dict[LimitName, float] = {name: entry.shares.get(phase, 0.0) for name, phase in PHASE_OF_LIMIT.items()}
    ratio, fewest = _epochs_ratio(race, entry)
    if ratio >= MIN_EPOCHS_RATIO:
        shares["statistics"] = 1 - 1 / ratio
    # Among equal shares, the one that is easier to remove: the order of PHASE_OF_LIMIT, compute last.
    name = max(shares, key=lambda one: (shares[one], one != "compute"))
    evidence = _evidence(entry, name, shares[name], ratio, fewest)
    return SpeedLimit(entry.name, name, shares[name], evidence, _advice(race, entry, name), shares)


def _epochs_ratio(race: Analysis, entry: EntryFacts) -> tuple[float, str]:
    """Epochs to the target ÷ those of the entry that needs fewest, and the name of that entry."""
    if entry.epochs is None or not entry.epochs.finite:
        return 1.0, ""
    others = _medians((other.epochs, other.name) for other in race.entries if other is not entry)
    alone = [run.epochs_to_target for run in race.of(entry.name, "scaling") if run.workers == 1 and run.reached]
    if alone:
        others.append((statistics.median(alone), "one worker"))
    if not others:
        return 1.0, ""
    fewest, name = min(others)
    return entry.epochs.median / fewest, name


def _evidence(entry: EntryFacts, name: LimitName, share: float, ratio: float, fewest: str) -> str:
    if name == "statistics" and entry.epochs is not None:
        return (
            f"it needs {number_phrase(entry.epochs.median, 3)} epochs, {number_phrase(ratio, 2)}× as many as {fewest}"
        )
    ms = number_phrase(1e3 * entry.phases.get(PHASE_OF_LIMIT[name], 0.0), 3)
    return f"{100 * share:.0f} % of its time is {LIMIT_PHRASES.get(name, name)} ({ms} ms per step)"


def _advice(race: Analysis, entry: EntryFacts, name: LimitName) -> str:
    if name == "statistics":
        return (
            "A faster network or processor does not change that; another learning rate, a smaller batch, less "
            "staleness or a more accurate codec may."
        )
    if name == "compute":
        waiting = entry.shares.get("exposed", 0.0) + entry.shares.get("codec", 0.0)
        return (
            f"Faster or more workers would help. Synchronisation takes {100 * waiting:.0f} % of the time, and another "
            "strategy cannot save more than that."
        )
    share = entry.shares.get(PHASE_OF_LIMIT[name], 0.0)
    gain = f"at most {number_phrase(1 / (1 - share), 2)}× earlier" if share < 1 else "much earlier"
    advice = (
        ADVICE.get(name) or f"use a faster network, fewer exchanges or fewer bytes{_fewest_bytes(race.entries, entry)}."
    )
    return f"Without it the target would be reached {gain}: {advice}"


def _fewest_bytes(entries: Sequence[EntryFacts], entry: EntryFacts) -> str:
    """The entry that reached the target with the fewest bytes, if it needs less than half."""
    known = _medians((other.bytes, other.name) for other in entries)
    if not known or entry.bytes is None or not entry.bytes.finite:
        return ""
    fewest, name = min(known)
    if name == entry.name or entry.bytes.median < 2 * fewest:
        return ""
    return f" ({name} reached it with {number_phrase(entry.bytes.median / fewest, 2)}× fewer bytes)"
