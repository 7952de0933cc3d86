"""The ranks of an elastic job: which are started again after a failure, when and where, and whether enough are left.

```text
          ┌──ends well──► done          ┌──after 1 s, 2 s, 4 s …, as a new member──► running
running ──┼──leaves on a signal──► left │
          └──fails──────────────────────┴──was started again too often──► lost
```

When a rank has ended well, the job is about to end, and no rank is started again.
"""

from __future__ import annotations

import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.errors import WorldError
from syncline.launch.elastic import MEMBERS_KEY, ElasticOptions, bounded, draw_member, open_control_log
from syncline.launch.process_events import ProcessEvents
from syncline.launch.processes import ErrorReport, Processes, ProcessExit, format_names
from syncline.launch.programs import LOCALHOST, Program, newcomer_program

FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
"""Seconds before the first restart of a rank, twice as many before each further one, and at most."""
HEALTHY_AFTER_S = 30.0
"""Seconds after which a rank has started well: if it fails later, the delay is that of the first restart again."""
HOST_FAILURES, HOST_FAILURES_WITHIN_S = 3, 600.0
"""A host on which so many ranks have failed within these seconds is left out, if another host has a free place."""
JOINED_TIMEOUT_S = 20.0
"""Seconds that ranks that have joined have to end after the ranks of the launcher have ended well."""
READ_LOG_EVERY_S = 1.0
OWN_STORE_TIMEOUT_S = 600.0
"""Timeout in seconds of a call to the store, which this process serves itself; it may be suspended for a while."""


class FixedRanks:
    """The ranks of a job that is not elastic: none is started again, and none joins. The supervisor calls this."""

    survives = False
    """Whether the job may end well without the ranks that have failed."""

    def record_start(self, processes: Processes) -> None:
        """All ranks have been started."""

    def record_exit(self, ended: ProcessExit) -> None:
        """A rank has ended and has not failed."""

    def record_failure(self, ended: ProcessExit) -> str:
        """A rank has failed. Returns what happens next, for a message; empty if nothing does."""
        return ""

    def start_due(self, processes: Processes, give_up: Callable[[], bool]) -> int:
        """Start the ranks whose time has come again. Returns their number."""
        return 0

    def expects_more(self) -> bool:
        """Whether the job goes on although none of its running ranks belongs to this launcher."""
        return False

    def drop_unneeded(self) -> list[str]:
        """The names of ranks that wait for a team although all others have ended well. They are not needed any more."""
        return []

    def joined(self) -> list[str]:
        """The names of running ranks that other processes have started."""
        return []

    def shortage(self) -> str | None:
        """A sentence with the numbers if fewer ranks are left than the job needs."""
        return None

    def summary(self) -> str:
        """A sentence about the losses that an elastic job has survived."""
        return ""


@dataclass(eq=False)
class _Slot:
    """The place of one of the first ranks, and the rank that is there now."""

    program: Program
    """The first rank's program. The next ranks there differ from it by their member number."""
    member: int
    state: Literal["running", "waiting", "done", "left", "lost"] = "running"
    restarts: int = 0
    delay_s: float = 0.0
    """The delay before the latest restart."""
    due: float = 0.0
    started: float = 0.0


class ElasticRanks(FixedRanks):
    """The ranks of an elastic job. Writes what happens to them into the control log."""

    survives = True

    def __init__(
        self,
        limits: ElasticOptions,
        programs: Sequence[Program],
        events: ProcessEvents,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._say = say
        self._clock = clock
        self._store = bounded(events.store, OWN_STORE_TIMEOUT_S)
        self._log = open_control_log(self._store)
        self._slots = [_Slot(program, program.rank) for program in programs if program.rank is not None]
        self._own = {slot.member for slot in self._slots}
        self._joined: dict[int, str] = {}
        """Running ranks that other processes have started, with their hosts."""
        self._joined_done = 0
        self._team: set[int] = set()
        """The members of the latest team that the ranks have formed."""
        self._log_read = clock()
        self._waiting_since: float | None = None
        self._failures: defaultdict[str, list[float]] = defaultdict(list)
        """By host: when ranks have failed there."""
        self._excluded: set[str] = set()
        self._lost = self._restarted = 0
        ranks = len(self._slots)
        self._store.add(MEMBERS_KEY, ranks)
        self._log.append("job", ranks=ranks, minimum=limits.minimum, maximum=limits.maximum, target=ranks)

    def record_start(self, processes: Processes) -> None:
        running, pids = processes.running(), processes.pids()
        for slot in self._slots:
            if slot.program.name in running:
                self._log_start(slot, pids.get(slot.program.name))

    def _log_start(self, slot: _Slot, pid: int | None) -> None:
        host = slot.program.host
        name = socket.gethostname() if host == LOCALHOST else host
        self._log.append("started", member=slot.member, host=name, pid=pid)

    def record_exit(self, ended: ProcessExit) -> None:
        slot = self._slot_of(ended)
        if slot is not None:
            slot.state = "left" if ended.failed else "done"
            reason = ended.reason() if ended.failed else "it ended well"
            self._log.append("ended", member=slot.member, code=ended.code, reason=reason)

    def record_failure(self, ended: ProcessExit) -> str:
        self._lost += 1
        self._log.append("ended", member=ended.rank, code=ended.code, reason=ended.reason())
        slot = self._slot_of(ended)
        if slot is None:
            self._joined.pop(ended.rank or 0, None)
            return ""
        now = self._clock()
        self._failures[slot.program.host].append(now)
        if self._finishing or slot.restarts >= self._limits.restarts:
            slot.state = "lost"
            times = "once" if slot.restarts == 1 else f"{slot.restarts} times"
            return f"it was started again {times} already, and the others go on" if slot.restarts else ""
        healthy = slot.restarts == 0 or now - slot.started >= HEALTHY_AFTER_S
        slot.delay_s = FIRST_DELAY_S if healthy else min(2 * slot.delay_s, MAX_DELAY_S)
        slot.restarts += 1
        slot.state, slot.due = "waiting", now + slot.delay_s
        return f"it is started again in {slot.delay_s:.0f} s (restart {slot.restarts} of {self._limits.restarts})"

    def _slot_of(self, ended: ProcessExit) -> _Slot | None:
        return next((slot for slot in self._slots if slot.member == ended.rank and slot.state == "running"), None)

    @property
    def _finishing(self) -> bool:
        """Whether a rank has ended well."""
        return self._joined_done > 0 or any(slot.state == "done" for slot in self._slots)

    def start_due(self, processes: Processes, give_up: Callable[[], bool]) -> int:
        now = self._clock()
        if now - self._log_read >= READ_LOG_EVERY_S:
            self._log_read = now
            self._read_log()
        due = [slot for slot in self._slots if slot.state == "waiting" and now >= slot.due and not self._finishing]
        started = 0
        for slot in due:
            running = sum(one.state == "running" for one in self._slots) + len(self._joined)
            if running < self._limits.maximum:
                started += self._restart(slot, processes, give_up)
        return started

    def _restart(self, slot: _Slot, processes: Processes, give_up: Callable[[], bool]) -> bool:
        self._leave_failing_host(slot)
        replaced, slot.member = slot.member, draw_member(self._store)
        self._own.add(slot.member)
        program = newcomer_program(slot.program, slot.member)
        self._log.append("restart", member=slot.member, replaces=replaced, after_s=slot.delay_s, attempt=slot.restarts)
        slot.state, slot.started = "running", self._clock()
        try:
            if not processes.add(program, give_up):
                slot.state = "waiting"
                return False
        except WorldError as error:
            failed = ProcessExit(name=program.name, rank=program.rank, code=1, report=ErrorReport(summary=str(error)))
            self._say(f"{error}; {self.record_failure(failed) or 'the others go on'}")
            return False
        self._restarted += 1
        self._log_start(slot, processes.pids().get(program.name))
        return True

    def _leave_failing_host(self, slot: _Slot) -> None:
        """Exchange the slot's place for a free one on another host if ranks fail often on its host."""
        host = slot.program.host
        free = [one for one in self._slots if one.state == "lost" and not self._fails_often(one.program.host)]
        if not free or not self._fails_often(host):
            return
        slot.program, free[0].program = free[0].program, slot.program
        if host not in self._excluded:
            self._excluded.add(host)
            reason = f"{HOST_FAILURES} ranks failed there within {HOST_FAILURES_WITHIN_S / 60:.0f} minutes"
            self._log.append("excluded", host=host, reason=reason)
            self._say(f"host {host} is left out: {reason}")

    def _fails_often(self, host: str) -> bool:
        since = self._clock() - HOST_FAILURES_WITHIN_S
        return sum(when >= since for when in self._failures[host]) >= HOST_FAILURES

    def _read_log(self) -> None:
        """Learn which team has formed, which ranks have joined, and which of these have ended."""
        for entry in self._log.read():
            if entry.kind == "team":
                self._team = set(entry.fields.get("team", ()))
            member = entry.fields.get("member")
            if member in self._own or not isinstance(member, int):
                continue
            if entry.kind == "started":
                self._joined[member] = str(entry.fields.get("host"))
                self._say(f"rank {member} joins from host {self._joined[member]}")
            elif entry.kind == "ended" and self._joined.pop(member, None) is not None:
                self._joined_done += entry.fields.get("code") == 0
                self._lost += entry.fields.get("code") != 0
                self._say(f"rank {member}, which had joined, has ended: {entry.fields.get('reason')}")

    def drop_unneeded(self) -> list[str]:
        if not self._finishing:
            return []
        self._read_log()
        running = [slot for slot in self._slots if slot.state == "running"]
        present = {slot.member for slot in running} | set(self._joined)
        if not self._team or present & self._team:
            return []
        for slot in running:
            self._say(f"rank {slot.member} is not needed any more: the others have ended well")
            self.record_exit(ProcessExit(name=f"rank {slot.member}", rank=slot.member, code=-signal.SIGKILL))
        return [f"rank {slot.member}" for slot in running]

    def joined(self) -> list[str]:
        return [f"rank {member}" for member in self._joined]

    def expects_more(self) -> bool:
        if not self._finishing and any(slot.state == "waiting" for slot in self._slots):
            return True
        self._read_log()
        if not self._joined or not self._finishing:
            return bool(self._joined)
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
            self._say(f"{format_names(self.joined())} had joined and may take {JOINED_TIMEOUT_S:.0f} s to end")
        return now - self._waiting_since < JOINED_TIMEOUT_S

    def shortage(self) -> str | None:
        present = sum(slot.state in ("running", "waiting", "done") for slot in self._slots)
        left = present + len(self._joined) + self._joined_done
        if left >= self._limits.minimum:
            return None
        return (
            f"{left} rank{'s are' if left != 1 else ' is'} left of {len(self._slots)}, and the job needs at least "
            f"{self._limits.minimum}: it ends"
        )

    def summary(self) -> str:
        lost = f"{self._lost} rank{'s were' if self._lost != 1 else ' was'} lost"
        again = f"{self._restarted} {'were' if self._restarted != 1 else 'was'} started again"
        return f"the job ended well; {lost}, {again}"
