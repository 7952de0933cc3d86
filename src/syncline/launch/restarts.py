"""The ranks of an elastic job: which are started again after a failure, when and where, and whether enough are left.

```text
          ┌──ends well──► done          ┌──after 1 s, 2 s, 4 s …, as a new member──► running
running ──┼──leaves on a signal──► left │
          ├──fails──────────────────────┴──was started again too often──► lost
          └──its host is removed──► leaving ──ends, or is killed──► left
```

With a `HostDiscovery` the hosts change while the job runs: new ones get ranks.

When a rank has ended well, the job is about to end, and no rank is started again.
"""

from __future__ import annotations

import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.environment.base import LEFT_CODE
from syncline.errors import WorldError
from syncline.launch.discovery import HostDiscovery
from syncline.launch.elastic import MEMBERS_KEY, ElasticOptions, bounded, draw_member, open_control_log
from syncline.launch.process_events import ProcessEvents
from syncline.launch.processes import ErrorReport, Processes, ProcessExit, format_names
from syncline.launch.programs import LOCALHOST, Host, Program, newcomer_program

FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
"""Seconds before the first restart of a rank, twice as many before each further one, and at most."""
HEALTHY_AFTER_S = 30.0
"""Seconds after which a rank has started well: if it fails later, the delay is that of the first restart again."""
HOST_FAILURES, HOST_FAILURES_WITHIN_S = 3, 600.0
"""A host on which so many ranks have failed within these seconds is left out, if another host has a free place."""
JOINED_TIMEOUT_S = 20.0
"""Seconds that ranks that have joined have to end after the ranks of the launcher have ended."""
CHECKPOINT_SENTENCES = {
    "saved": "step {step} is saved in {folder}: to continue from there, call {load} after sl.distribute",
    "not saved": "step {step} could not be saved in {folder}: {reason}",
}
"""Messages about the last checkpoint of a job, by the kind of their entry in the control log."""
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

    def has_left(self, ended: ProcessExit) -> bool:
        """Whether a rank was asked to leave, and has left: it has not failed, and the job continues."""
        return False

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

    def announce_end(self, reason: str) -> None:
        """The launcher ends the job: the ranks save a checkpoint and leave."""

    def saving(self) -> bool:
        """Whether ranks that have joined may still save a checkpoint, after the others have ended."""
        return False

    def shortage(self) -> str | None:
        """A sentence with the numbers if fewer ranks are left than the job needs."""
        return None

    def checkpoint(self) -> str:
        """A sentence about the checkpoint that the last ranks have saved; empty if they have not tried to."""
        return ""

    def summary(self) -> str:
        """A sentence about the losses that an elastic job has survived."""
        return ""


@dataclass(frozen=True)
class ChangingHosts:
    """The hosts of a job that change while it runs."""

    discovery: HostDiscovery
    make_program: Callable[[str, int], Program]
    """The program of a rank on a host, by its name, with a local rank."""
    shortage_timeout_s: float
    """Seconds with fewer ranks than the minimum after which the job ends."""
    leave_timeout_s: float
    """Seconds after which a rank that was asked to leave is killed."""


@dataclass(eq=False)
class _Slot:
    """The place of one of the first ranks, and the rank that is there now."""

    program: Program
    """The first rank's program. The next ranks there differ from it by their member number."""
    member: int
    state: Literal["running", "waiting", "done", "leaving", "left", "lost"] = "running"
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
        hosts: ChangingHosts | None = None,
    ) -> None:
        """`hosts`: the hosts of the job change while it runs."""
        self._limits = limits
        self._hosts = hosts
        self._hosts_seen: tuple[Host, ...] | None = None
        self._hosts_problem = ""
        self._short_since: float | None = None
        self._say = say
        self._clock = clock
        self._store = bounded(events.store, OWN_STORE_TIMEOUT_S)
        self._log = open_control_log(self._store)
        self._slots = [_Slot(program, program.rank) for program in programs if program.rank is not None]
        self._own = {slot.member for slot in self._slots}
        self._joined: dict[int, str] = {}
        """Running ranks that other processes have started, with their hosts."""
        self._joined_done = 0
        self._checkpoint = ""
        self._left: set[int] = set()
        """Members that have left the job by themselves. Their processes may still run."""
        self._admitted: set[int] = set()
        """Members that have been in a team, or have trained in none."""
        self._team: set[int] = set()
        """The members of the latest team that the ranks have formed."""
        self._alone: set[int] = set()
        """Members that have joined an asynchronous run: they train, and are in no team."""
        self._log_read = clock()
        self._waiting_since: float | None = None
        self._failures: defaultdict[str, list[float]] = defaultdict(list)
        """By host: when ranks have failed there."""
        self._excluded: set[str] = set()
        self._lost = self._restarted = 0
        self._first = ranks = len(self._slots)
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

    def has_left(self, ended: ProcessExit) -> bool:
        slot = self._slot_of(ended)
        return slot is not None and (ended.code == LEFT_CODE or slot.state == "leaving")

    def record_exit(self, ended: ProcessExit) -> None:
        slot = self._slot_of(ended)
        if slot is not None:
            left = self.has_left(ended)
            self._read_log()
            late = not (ended.failed or left) and self._came_too_late(slot.member)
            slot.state = "left" if ended.failed or left or late else "done"
            reason = "it has left" if left else ended.reason() if ended.failed else "it ended well"
            reason = "it could not join before the end" if late else reason
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
        if self._fails_often(slot.program.host) and self._other_hosts(slot.program.host):
            self._exclude(slot.program.host)
        if self._finishing or slot.restarts >= self._limits.restarts or self._is_left_out(slot):
            slot.state = "lost"
            times = "once" if slot.restarts == 1 else f"{slot.restarts} times"
            return f"it was started again {times} already, and the others go on" if slot.restarts else ""
        healthy = slot.restarts == 0 or now - slot.started >= HEALTHY_AFTER_S
        slot.delay_s = FIRST_DELAY_S if healthy else min(2 * slot.delay_s, MAX_DELAY_S)
        slot.restarts += 1
        slot.state, slot.due = "waiting", now + slot.delay_s
        return f"it is started again in {slot.delay_s:.0f} s (restart {slot.restarts} of {self._limits.restarts})"

    def _is_left_out(self, slot: _Slot) -> bool:
        """With changing hosts: whether the slot's host fails often. Otherwise another host may have a free place."""
        return self._hosts is not None and slot.program.host in self._excluded

    def _other_hosts(self, host: str) -> bool:
        """Whether the script has named other hosts, which do not fail often."""
        return any(other.name != host and not self._fails_often(other.name) for other in self._hosts_seen or ())

    def _slot_of(self, ended: ProcessExit) -> _Slot | None:
        running = (slot for slot in self._slots if slot.state in ("running", "leaving"))
        return next((slot for slot in running if slot.member == ended.rank), None)

    @property
    def _finishing(self) -> bool:
        """Whether a rank has ended well."""
        return self._joined_done > 0 or any(slot.state == "done" for slot in self._slots)

    def start_due(self, processes: Processes, give_up: Callable[[], bool]) -> int:
        now = self._clock()
        if now - self._log_read >= READ_LOG_EVERY_S:
            self._log_read = now
            self._read_log()
        if self._hosts is not None and not self._finishing:
            self._follow_hosts(self._hosts, processes, now)
        due = [slot for slot in self._slots if slot.state == "waiting" and now >= slot.due and not self._finishing]
        started = 0
        for slot in due:
            running = sum(one.state in ("running", "leaving") for one in self._slots) + len(self._joined)
            if running < self._limits.maximum:
                started += self._restart(slot, processes, give_up)
        return started

    def _restart(self, slot: _Slot, processes: Processes, give_up: Callable[[], bool]) -> bool:
        self._leave_failing_host(slot)
        replaced, slot.member = slot.member, draw_member(self._store)
        self._own.add(slot.member)
        program = newcomer_program(slot.program, slot.member)
        if replaced >= 0:
            fields = {"replaces": replaced, "after_s": slot.delay_s, "attempt": slot.restarts}
            self._log.append("restart", member=slot.member, **fields)
        slot.state, slot.started = "running", self._clock()
        try:
            if not processes.add(program, give_up):
                slot.state = "waiting"
                return False
        except WorldError as error:
            failed = ProcessExit(name=program.name, rank=program.rank, code=1, report=ErrorReport(summary=str(error)))
            self._say(f"{error}; {self.record_failure(failed) or 'the others go on'}")
            return False
        self._restarted += replaced >= 0
        self._log_start(slot, processes.pids().get(program.name))
        return True

    def _leave_failing_host(self, slot: _Slot) -> None:
        """Exchange the slot's place for a free one on another host if ranks fail often on its host."""
        host = slot.program.host
        free = [one for one in self._slots if one.state == "lost" and not self._fails_often(one.program.host)]
        if not free or not self._fails_often(host):
            return
        slot.program, free[0].program = free[0].program, slot.program
        self._exclude(host)

    def _exclude(self, host: str) -> None:
        if host not in self._excluded:
            self._excluded.add(host)
            reason = f"{HOST_FAILURES} ranks failed there within {HOST_FAILURES_WITHIN_S / 60:.0f} minutes"
            self._log.append("excluded", host=host, reason=reason)
            self._say(f"host {host} is left out: {reason}")

    def _fails_often(self, host: str) -> bool:
        since = self._clock() - HOST_FAILURES_WITHIN_S
        return sum(when >= since for when in self._failures[host]) >= HOST_FAILURES

    # Hosts that change.

    def _follow_hosts(self, hosts: ChangingHosts, processes: Processes, now: float) -> None:
        """Add slots for new hosts, ask the ranks of removed ones to leave, and kill those that do not."""
        found = hosts.discovery.poll()
        if hosts.discovery.problem != self._hosts_problem:
            self._hosts_problem = hosts.discovery.problem
            if self._hosts_problem:
                self._say(f"the host discovery script failed: {self._hosts_problem}; the hosts stay as they are")
        if found is not None and found != self._hosts_seen:
            self._hosts_seen = found
            self._change_slots(hosts, {host.name: host.slots for host in found}, now)
        for slot in self._slots:
            if slot.state == "leaving" and now >= slot.due:
                slot.due = now + hosts.leave_timeout_s
                self._say(f"rank {slot.member} has not left within {hosts.leave_timeout_s:.0f} s, and is killed")
                processes.kill(f"rank {slot.member}")

    def _change_slots(self, hosts: ChangingHosts, wanted: Mapping[str, int], now: float) -> None:
        present: dict[str, list[_Slot]] = {name: [] for name in wanted}
        for slot in self._slots:
            if slot.state not in ("left", "leaving"):
                present.setdefault(slot.program.host, []).append(slot)
        for name, slots in present.items():
            count = wanted.get(name, 0)
            for slot in slots[count:]:
                self._remove(slot, hosts, now)
            new = 0 if name in self._excluded else count - len(slots)
            taken = {int(slot.program.variables["LOCAL_RANK"]) for slot in slots}
            for local in [number for number in range(count) if number not in taken][: max(0, new)]:
                self._slots.append(_Slot(hosts.make_program(name, local), member=-1, state="waiting", due=now))
            if new > 0:
                self._log.append("hosts", host=name, slots=count)
                self._say(f"host {name} has {count} slot{'s' * (count > 1)}")

    def _remove(self, slot: _Slot, hosts: ChangingHosts, now: float) -> None:
        if slot.state != "running":
            slot.state = "left"
            return
        reason = f"host {slot.program.host} is not available any more"
        slot.state, slot.due = "leaving", now + hosts.leave_timeout_s
        self._log.append("leave", member=slot.member, reason=reason)
        self._say(f"rank {slot.member} is asked to leave: {reason}")

    # The job.

    def _read_log(self) -> None:
        """Learn which team has formed, which ranks have joined, and which of these have ended."""
        for entry in self._log.read():
            if entry.kind == "team":
                self._team = set(entry.fields.get("team", ()))
                self._alone |= {entry.fields["alone"]} if "alone" in entry.fields else set()
                self._admitted |= self._team | self._alone
            elif entry.kind in CHECKPOINT_SENTENCES:
                self._checkpoint = CHECKPOINT_SENTENCES[entry.kind].format(**entry.fields)
            member = entry.fields.get("member")
            if entry.kind == "left" and isinstance(member, int):
                self._left.add(member)
            if member in self._own or not isinstance(member, int):
                continue
            if entry.kind == "started":
                self._joined[member] = str(entry.fields.get("host"))
                self._say(f"rank {member} joins from host {self._joined[member]}")
            elif entry.kind == "ended" and self._joined.pop(member, None) is not None:
                self._joined_done += entry.fields.get("code") == 0 and not self._came_too_late(member)
                self._lost += entry.fields.get("code") not in (0, LEFT_CODE)
                self._say(f"rank {member}, which had joined, has ended: {entry.fields.get('reason')}")

    def drop_unneeded(self) -> list[str]:
        if not self._finishing:
            return []
        self._read_log()
        running = [slot for slot in self._slots if slot.state == "running"]
        present = {slot.member for slot in running} | set(self._joined)
        if not self._team or present & (self._team | self._alone):
            return []
        waiting = [slot for slot in running if slot.member not in self._left]
        for slot in waiting:
            self._say(f"rank {slot.member} is not needed any more: the others have ended well")
            self.record_exit(ProcessExit(name=f"rank {slot.member}", rank=slot.member, code=-signal.SIGKILL))
        return [f"rank {slot.member}" for slot in waiting]

    def joined(self) -> list[str]:
        return [f"rank {member}" for member in self._joined]

    def announce_end(self, reason: str) -> None:
        self._log.append("ending", reason=reason)

    def saving(self) -> bool:
        self._read_log()
        self._waiting_since = self._clock() if self._waiting_since is None else self._waiting_since
        return bool(self._joined) and self._clock() - self._waiting_since < JOINED_TIMEOUT_S

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
        present = sum(slot.state in ("running", "waiting", "leaving", "done") for slot in self._slots)
        left = present + len(self._joined) + self._joined_done
        if left >= self._limits.minimum:
            self._short_since = None
            return None
        if self._hosts is not None and left:  # the script may name more hosts
            self._short_since = self._clock() if self._short_since is None else self._short_since
            if self._clock() - self._short_since < self._hosts.shortage_timeout_s:
                return None
        found = (
            f"{left} rank{'s are' if left != 1 else ' is'} left of {self._first}, and the job needs at least "
            f"{self._limits.minimum}: it ends"
        )
        self._log.append("ending", reason=found)
        return found

    def _came_too_late(self, member: int) -> bool:
        """Whether a member has never taken part: if it ends without an error, the job has not ended well by that."""
        return bool(self._admitted) and member not in self._admitted

    def checkpoint(self) -> str:
        self._read_log()
        return self._checkpoint

    def summary(self) -> str:
        lost = f"{self._lost} rank{'s were' if self._lost != 1 else ' was'} lost"
        again = f"{self._restarted} {'were' if self._restarted != 1 else 'was'} started again"
        return f"the job ended well; {lost}, {again}"
