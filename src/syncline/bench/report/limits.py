"""What holds an entry back: the one thing whose removal would save most of its time, and what would remove it.

```text
limit           what its removal would save, as a part of the time to the target
communication   the share of exposed communication
codec           the share of encoding and decoding that held the worker up
data            the share of waiting for batches
evaluation      the share of evaluations
agreeing        the share of asking the others whether to go on
statistics      1 − 1/r, where it needs r times the epochs of the entry, or of the one worker, that needs fewest;
                only if r is at least 1.25: a little more is luck
compute         the share of compute: what is left when nothing else is larger
```
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.bench.report.analysis import Analysis, EntryFacts
from syncline.bench.report.words import number

__all__ = ["Limit", "Name", "binding_limit"]

Name = Literal["communication", "codec", "data", "evaluation", "agreeing", "statistics", "compute"]

CLEARLY = 1.25
"""So many times the epochs are more than luck."""
PHASES: dict[str, Name] = {
    "exposed": "communication",
    "codec": "codec",
    "data": "data",
    "evaluation": "evaluation",
    "agreeing": "agreeing",
    "compute": "compute",
}


@dataclass(frozen=True)
class Limit:
    """What binds an entry, how much of its time that is, and what would help."""

    entry: str
    name: Name
    share: float
    evidence: str
    advice: str
    shares: dict[Name, float]
    """What each removal would save."""


def binding_limit(race: Analysis, entry: EntryFacts) -> Limit | None:
    """The limit of an entry; None where no run of it has ended well."""
    if not entry.shares:
        return None
    shares: dict[Name, float] = {name: entry.shares.get(phase, 0.0) for phase, name in PHASES.items()}
    slower, than = _statistics(race, entry)
    if slower >= CLEARLY:
        shares["statistics"] = 1 - 1 / slower
    # Where two save the same, the one that is easier to remove is named: the order of PHASES, compute last.
    name = max(shares, key=lambda one: (shares[one], one != "compute"))
    evidence = _evidence(entry, name, shares[name], slower, than)
    return Limit(entry.name, name, shares[name], evidence, _advice(race, entry, name), shares)


def _statistics(race: Analysis, entry: EntryFacts) -> tuple[float, str]:
    """How many times the epochs of who needs fewest, and who that is."""
    if entry.epochs is None or not entry.epochs.finite:
        return 1.0, ""
    others = [
        (other.epochs.median, other.name)
        for other in race.entries
        if other is not entry and other.epochs is not None and other.epochs.finite and other.epochs.median > 0
    ]
    alone = [run.epochs_to_target for run in race.of(entry.name, "scaling") if run.workers == 1 and run.reached]
    if alone:
        others.append((statistics.median(alone), "one worker"))
    if not others:
        return 1.0, ""
    fewest, who = min(others)
    return entry.epochs.median / fewest, who


def _evidence(entry: EntryFacts, name: Name, share: float, slower: float, than: str) -> str:
    if name == "statistics" and entry.epochs is not None:
        return f"it needs {number(entry.epochs.median, 3)} epochs, {number(slower, 2)}× as many as {than}"
    phase = next(phase for phase, told in PHASES.items() if told == name)
    told = {"communication": "waiting for communication", "data": "waiting for data", "codec": "encoding and decoding"}
    a_step = 1e3 * entry.phases.get(phase, 0.0)
    return f"{100 * share:.0f} % of its time goes into {told.get(name, name)} ({number(a_step, 3)} ms a step)"


def _advice(race: Analysis, entry: EntryFacts, name: Name) -> str:
    share = entry.shares.get(next((phase for phase, told in PHASES.items() if told == name), ""), 0.0)
    gain = f"at most {number(1 / (1 - share), 2)}× sooner" if share < 1 else "much sooner"
    if name == "communication":
        thrifty = _thriftiest(race.entries, entry)
        return f"Without it the target would come {gain}: a faster network, fewer exchanges or fewer bytes{thrifty}."
    if name == "codec":
        return f"Without it the target would come {gain}: a cheaper codec (cast, quantize), or none on this network."
    if name == "data":
        return f"Without it the target would come {gain}: readers that work ahead, or data nearer to the workers."
    if name == "evaluation":
        return f"Without it the target would come {gain}: evaluate less often, or on fewer samples."
    if name == "agreeing":
        return f"Without it the target would come {gain}: the ranks wait for each other; look for the slow one."
    if name == "statistics":
        return (
            "A faster network or processor does not mend that: another learning rate, a smaller batch, less staleness "
            "or a gentler codec may."
        )
    waiting = entry.shares.get("exposed", 0.0) + entry.shares.get("codec", 0.0)
    return (
        f"Faster or more workers would help. Agreeing takes {100 * waiting:.0f} % in all: another way of doing it "
        "saves no more than that."
    )


def _thriftiest(entries: Sequence[EntryFacts], entry: EntryFacts) -> str:
    """Who got there with the fewest bytes, if that is somebody else by far."""
    known = [
        (other.bytes.median, other.name)
        for other in entries
        if other.bytes is not None and other.bytes.finite and other.bytes.median > 0
    ]
    if not known or entry.bytes is None or not entry.bytes.finite:
        return ""
    fewest, who = min(known)
    if who == entry.name or entry.bytes.median < 2 * fewest:
        return ""
    return f" ({who} reached it with {number(entry.bytes.median / fewest, 2)}× fewer)"
