"""Reads the state of a running elastic job from its store: its members, its team, and what has happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from syncline.environment.lost_after import LEFT
from syncline.launch.elastic import STORE_PREFIX, open_control_log, started_members
from syncline.launch.job_folder import JobRecord, answers
from syncline.launch.process_events import ProcessEvents

if TYPE_CHECKING:
    from syncline.control import LogEntry
    from syncline.transports.key_value_store import BoundedStore

SAMPLE_S = 0.6
"""Seconds between the two readings of one status: rates and heartbeats are seen by their change, twice a second."""
WATCH_EVERY_S = 2.0
PROGRESS_KEY = "control/progress"
"""Under it, and its member number, each rank writes its progress."""


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """A member of the job that has been started and has not ended."""

    member: int
    host: str
    pid: int | None
    rank: int | None
    """Its rank in the team; None if the team does not contain it (yet)."""
    step: int | None
    steps_per_s: float | None
    heartbeat_s: float | None
    """Seconds since its last heartbeat, counted from the first reading if it has not changed since; None before its
    first heartbeat and after it has left its world."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A job at one time."""

    time: float
    generation: int
    """The number of the team; 0 before the first."""
    team: tuple[int, ...]
    """The members of the team in the order of their ranks."""
    members: tuple[MemberStatus, ...]
    events: tuple[LogEntry, ...]
    """All entries of the control log, in order."""

    def to_json(self, max_events: int) -> dict[str, Any]:
        """As JSON, with the last events."""
        shown = self.events[-max_events:]
        events = [{"number": one.number, "kind": one.kind, "time": one.time, **one.fields} for one in shown]
        members = [asdict(member) for member in self.members]
        return {
            "time": self.time,
            "generation": self.generation,
            "team": list(self.team),
            "members": members,
            "events": events,
        }


class JobReader:
    """Reads the state of a job again and again. A store that is gone raises a `RuntimeError`."""

    def __init__(self, store: BoundedStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = open_control_log(store)
        self._part = store.prefixed(STORE_PREFIX)
        self._beats = ProcessEvents(store)
        self._clock = clock
        self._entries: list[LogEntry] = []
        self._progress: dict[int, dict[str, Any]] = {}
        self._rates: dict[int, float] = {}
        self._seen: dict[int, tuple[str, float]] = {}
        """By member: its latest heartbeat, and when it was first seen."""

    def read(self) -> JobStatus:
        """The state of the job now."""
        self._entries += self._log.read()
        teams = [entry.fields for entry in self._entries if entry.kind == "team"]
        team = tuple(map(int, teams[-1]["team"])) if teams else ()
        started = started_members(self._entries)
        beats = self._beats.read_heartbeats([f"rank {member}" for member in started])
        members = []
        for member, entry in started.items():
            progress = self._read_progress(member)
            members.append(
                MemberStatus(
                    member=member,
                    host=str(entry.fields.get("host")),
                    pid=entry.fields.get("pid"),
                    rank=team.index(member) if member in team else None,
                    step=progress.get("step"),
                    steps_per_s=self._rates.get(member),
                    heartbeat_s=self._heartbeat_age(member, beats[f"rank {member}"]),
                )
            )
        generation = int(teams[-1]["generation"]) if teams else 0
        return JobStatus(
            time=time.time(), generation=generation, team=team, members=tuple(members), events=tuple(self._entries)
        )

    def _read_progress(self, member: int) -> dict[str, Any]:
        """The latest progress of a member. Its rate is that between the last two."""
        key, before = f"{PROGRESS_KEY}/{member}", self._progress.get(member)
        if not self._part.check([key]):
            return {}
        found: dict[str, Any] = json.loads(self._part.get(key))
        if before is not None and found["time"] > before["time"]:
            self._rates[member] = (found["step"] - before["step"]) / (found["time"] - before["time"])
        self._progress[member] = found
        return found

    def _heartbeat_age(self, member: int, beat: str) -> float | None:
        now = self._clock()
        if self._seen.get(member, ("", 0.0))[0] != beat:
            self._seen[member] = (beat, now)
        return None if beat in ("", LEFT) else now - self._seen[member][1]


def read_status(job: JobRecord, store: BoundedStore) -> Iterator[JobStatus]:
    """The state of a job, again and again while it answers."""
    reader = JobReader(store)
    reader.read()
    time.sleep(SAMPLE_S)
    while answers(job):
        yield reader.read()
        time.sleep(WATCH_EVERY_S)
