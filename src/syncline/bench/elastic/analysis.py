"""Reads the journals of a run, and computes what its losses and its newcomers cost.

```text
survivor     ──┼──┼──┼──────────────┼──┼──┼─────────┼──┼──┼──┼──►  steps
                     ▲ kill         │          ▲    │
                     ├─ next step ──┤          │    newcomer's first step
                     ├── pause ─────┤          ├─────────┤ window of the admission
```

The *pause* after a kill is the longest time without a step of a survivor, from the kill until shortly before the next
newcomer's first step. Unlike the next step, it is not shortened by a step that was almost complete at the kill.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Admission",
    "Growth",
    "PushCheck",
    "Recovery",
    "VictimKill",
    "WorkerJournal",
    "admissions",
    "check_pushes",
    "count_batches",
    "count_steps",
    "growth",
    "longest_gap",
    "median_step",
    "percentile",
    "read_journals",
    "recoveries",
]

ADMISSION_WINDOW_S = 1.0
"""Seconds before and after a newcomer's first step. The others' longest step in them is the newcomer's cost."""
MAX_INFLIGHT_PUSHES = 2
"""Pushes of a killed worker that the servers may have applied, and that its journal does not have."""
WARM_UP_SHARE = 0.2
"""The first part of a process's run time, which does not count for the growth of its memory."""


@dataclass
class WorkerJournal:
    """What one worker has written."""

    member: int
    pid: int = 0
    joined: bool = False
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each step was complete, in seconds of the monotonic clock."""
    steps: list[int] = field(default_factory=list)
    """The number of each step."""
    sizes: list[int] = field(default_factory=list)
    """The number of workers in each step."""
    clocks: list[int] = field(default_factory=list)
    """With servers: the pushes that were acknowledged after each step."""
    applied: list[int] = field(default_factory=list)
    """With servers: the steps of all workers that the servers had counted."""
    end: Mapping[str, Any] | None = None
    """The metrics and the steps at the end; None if the worker did not end well."""
    refused: str | None = None

    @classmethod
    def parse(cls, text: str) -> WorkerJournal:
        """Read the lines of a journal. The last one may be cut off.

        >>> WorkerJournal.parse('{"member": 2, "pid": 7, "joined": true, "time": 1.5}\\n2.0 31 4\\n2.5 3').times
        [2.0]
        """
        found = cls(member=-1)
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            if line.startswith("{"):
                found._read_facts(json.loads(line))
            else:
                found._read_step(line.split())
        return found

    def _read_facts(self, facts: Mapping[str, Any]) -> None:
        if "member" in facts:
            self.member, self.pid, self.joined = int(facts["member"]), int(facts["pid"]), bool(facts["joined"])
            self.began = float(facts["time"])
        elif "refused" in facts:
            self.refused = str(facts["refused"])
        else:
            self.end = facts

    def _read_step(self, words: Sequence[str]) -> None:
        self.times.append(float(words[0]))
        self.steps.append(int(words[1]))
        self.sizes.append(int(words[2]))
        if len(words) > 3:
            self.clocks.append(int(words[3]))
            self.applied.append(int(words[4]))


def read_journals(folder: Path) -> dict[int, WorkerJournal]:
    """The journals of a run by member, in order."""
    found = [WorkerJournal.parse(path.read_text()) for path in folder.glob("worker-*.txt")]
    return {one.member: one for one in sorted(found, key=lambda one: one.member) if one.member >= 0}


@dataclass(frozen=True)
class VictimKill:
    """A process that the bench has killed or frozen."""

    time: float
    program: str
    """Such as "rank 3" or "server process 4711"."""
    pid: int

    @property
    def member(self) -> int | None:
        """The member number of a worker; None for a server."""
        kind, _, number = self.program.partition(" ")
        return int(number) if kind == "rank" else None


@dataclass(frozen=True)
class Recovery:
    """The survivors of one kill."""

    kill: VictimKill
    next_step_s: Mapping[int, float]
    """By survivor: seconds from the kill to its next complete step."""
    pause_s: Mapping[int, float]
    """By survivor: its longest time without a step before the next newcomer."""
    stuck: tuple[int, ...] = ()
    """Survivors that completed no more steps, and were not killed themselves."""


def recoveries(journals: Mapping[int, WorkerJournal], kills: Sequence[VictimKill], end: float) -> list[Recovery]:
    """What each kill cost its survivors. A survivor had completed a step before it. `end` is the end of the run."""
    killed_at = {kill.member: kill.time for kill in kills if kill.member is not None}
    arrivals = sorted(one.times[0] for one in journals.values() if one.joined and one.times)
    found = []
    for number, kill in enumerate(kills):
        until = kills[number + 1].time if number + 1 < len(kills) else end
        arrival = next((when for when in arrivals if when > kill.time), math.inf)
        next_step, pause, stuck = {}, {}, []
        for member, journal in journals.items():
            dead_at = killed_at.get(member, math.inf)
            if member == kill.member or not journal.times or journal.times[0] >= kill.time or dead_at < kill.time:
                continue
            place = bisect_right(journal.times, kill.time)
            if place < len(journal.times):
                next_step[member] = journal.times[place] - kill.time
                quiet_until = min(until, max(journal.times[place], arrival - ADMISSION_WINDOW_S))
                pause[member] = longest_gap(journal.times, kill.time, quiet_until)
            elif dead_at == math.inf and journal.end is None:
                stuck.append(member)
        found.append(Recovery(kill, next_step, pause, tuple(stuck)))
    return found


def longest_gap(times: Sequence[float], since: float, until: float) -> float:
    """The longest time between two steps that overlaps the interval from `since` to `until`; 0 if there is none.

    >>> longest_gap([0.0, 1.0, 4.0, 5.0], 1.5, 4.5)
    3.0
    """
    first, last = max(1, bisect_right(times, since)), bisect_left(times, until)
    return max((times[place] - times[place - 1] for place in range(first, min(last + 1, len(times)))), default=0.0)


@dataclass(frozen=True)
class Admission:
    """A newcomer that has begun to train."""

    member: int
    time: float
    """Its first step."""
    start_s: float
    """Seconds from the first line of its script to its first step."""
    extra_s: Mapping[int, float]
    """By other worker: its longest step around the admission, less the median step."""


def admissions(journals: Mapping[int, WorkerJournal], kills: Sequence[VictimKill], median_s: float) -> list[Admission]:
    """What each newcomer cost the others.

    Only the steps of others within `ADMISSION_WINDOW_S` of its first step count, and none that a kill interrupted or
    that had begun before the newcomer: a pause after a kill is not the cost of a newcomer that is admitted in it.
    """
    found = []
    for member, newcomer in journals.items():
        if not (newcomer.joined and newcomer.times):
            continue
        when = newcomer.times[0]
        before = max((kill.time for kill in kills if kill.time < when), default=-math.inf)
        after = min((kill.time for kill in kills if kill.time >= when), default=math.inf)
        extra = {}
        for other, journal in journals.items():
            if other == member or not journal.times or journal.times[0] >= when or journal.times[-1] <= when:
                continue
            recovered = bisect_right(journal.times, max(before, newcomer.began))
            since = max(when - ADMISSION_WINDOW_S, journal.times[recovered])
            until = min(when + ADMISSION_WINDOW_S, after)
            extra[other] = max(0.0, longest_gap(journal.times, since, until) - median_s)
        found.append(Admission(member, when, when - newcomer.began, extra))
    return found


def median_step(journals: Iterable[WorkerJournal]) -> float:
    """The median time between two steps of a worker, in seconds; 0 if there are none."""
    gaps = [after - before for one in journals for before, after in zip(one.times, one.times[1:], strict=False)]
    return statistics.median(gaps) if gaps else 0.0


def count_steps(journals: Iterable[WorkerJournal], since: float, until: float) -> int:
    """The steps of the team in an interval: the growth of the highest step number. For synchronous strategies."""
    early, late = 0, 0
    for one in journals:
        first, last = bisect_right(one.times, since), bisect_right(one.times, until)
        early = max([early, *one.steps[max(0, first - 1) : first]])
        late = max([late, *one.steps[max(0, last - 1) : last]])
    return max(0, late - early)


def count_batches(journals: Iterable[WorkerJournal], since: float, until: float) -> int:
    """The batches that all workers together have trained in an interval."""
    return sum(bisect_right(one.times, until) - bisect_right(one.times, since) for one in journals)


@dataclass(frozen=True)
class Growth:
    """The first and the last value of a series, and the slope of its regression line after the warm-up."""

    first: float
    last: float
    per_hour: float
    samples: int


def growth(samples: Sequence[tuple[float, float]]) -> Growth | None:
    """The growth of a series of (seconds, value), without its first fifth; None if fewer than two are left.

    >>> growth([(0, 9.0), (3600, 1.0), (7200, 2.0), (10800, 3.0), (14400, 4.0)])
    Growth(first=1.0, last=4.0, per_hour=1.0, samples=4)
    """
    if not samples:
        return None
    begin = samples[0][0] + WARM_UP_SHARE * (samples[-1][0] - samples[0][0])
    warm = [(seconds, value) for seconds, value in samples if seconds >= begin]
    if len(warm) < 2 or warm[0][0] == warm[-1][0]:
        return None
    slope = statistics.linear_regression([seconds for seconds, _ in warm], [value for _, value in warm]).slope
    return Growth(warm[0][1], warm[-1][1], slope * 3600, len(warm))


@dataclass(frozen=True)
class PushCheck:
    """Whether the servers have applied what they have acknowledged: once, and all of it."""

    acknowledged: int
    """The sum of the steps that all workers have pushed, by their journals."""
    applied: int
    """The steps that the servers have counted at the end."""
    unknown: int
    """Pushes that may have been applied although no journal has them: those in flight of killed workers."""

    @property
    def lost(self) -> int:
        return max(0, self.acknowledged - self.applied)

    @property
    def doubled(self) -> int:
        return max(0, self.applied - self.acknowledged - self.unknown)


def check_pushes(journals: Mapping[int, WorkerJournal], killed: Iterable[int]) -> PushCheck | None:
    """Compare the workers' pushed steps with the steps that the servers have counted; None without servers.

    A worker that ends well has waited for all of its pushes. Another one may have had some in flight. The servers count
    once more for those that end well, after the last push of all.
    """
    clocks, applied, open_ended = 0, 0, set(killed)
    for member, one in journals.items():
        if not one.clocks:
            continue
        ended = one.end is not None and "clock" in one.end
        clocks += int(one.end["clock"]) if one.end is not None and ended else one.clocks[-1]
        applied = max(applied, one.applied[-1], int(one.end["applied"]) if one.end is not None and ended else 0)
        open_ended |= set() if ended else {member}
    if not applied:
        return None
    return PushCheck(clocks, applied, MAX_INFLIGHT_PUSHES * len(open_ended & journals.keys()))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed.

    >>> percentile([4, 1, 2, 3], 0.5), percentile([4, 1, 2, 3], 0.95)
    (2, 4)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
