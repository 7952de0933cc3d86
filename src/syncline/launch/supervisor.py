"""Supervises the processes of a run: what happens after a failure, after Ctrl-C, and at the end."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Literal

from syncline.environment.base import LEFT_CODE
from syncline.environment.lost_after import LEFT
from syncline.launch.process_events import ProcessEvents
from syncline.launch.processes import Processes, ProcessExit, ProcessState, first_failure, format_names
from syncline.launch.restarts import FixedRanks
from syncline.launch.server_restarts import ServerRestarts

MAX_GAP_S = 2.0
"""Largest time in seconds that counts between two checks: the launcher itself may have been suspended."""


class HeartbeatMonitor:
    """Counts the seconds in which a program's heartbeat number stays the same.

    A program that has no world yet, or has left its world, sends none. It counts as alive unless a signal has stopped
    it. So does one that computes: compiled code may keep the thread that sends the heartbeats from running.

    >>> monitor = HeartbeatMonitor(lost_after=3.0)
    >>> [monitor.check(now, {"rank 0": "7", "rank 1": str(now)}, dict) for now in (0.0, 2.0, 4.0)]
    [{}, {}, {'rank 0': 4.0}]
    """

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._checked: float | None = None
        self._last: dict[str, str] = {}
        self._silent: dict[str, float] = {}

    def check(
        self, now: float, beats: Mapping[str, str], states: Callable[[], Mapping[str, ProcessState]]
    ) -> dict[str, float]:
        """Check the latest heartbeat of each running program ("" for none).

        Returns the programs that were silent for too long, with the seconds. `states` is called only if a heartbeat is
        the same as before.
        """
        gap = 0.0 if self._checked is None else min(now - self._checked, MAX_GAP_S)
        self._checked = now
        same = [name for name, beat in beats.items() if self._last.get(name) == beat]
        found = states() if same else {}
        for name, beat in beats.items():
            expected = beat not in ("", LEFT) or found.get(name) == "stopped"
            silent = name in same and expected and found.get(name) != "busy"
            self._silent[name] = self._silent.get(name, 0.0) + gap if silent else 0.0
            self._last[name] = beat
        return {name: self._silent[name] for name in beats if self._silent[name] > self._lost_after}


FailurePolicy = Literal["stop", "continue"]
Tick = Callable[[], str | None]
"""Called regularly while programs run. It returns a reason to end them, or None."""
ENDED_EARLY = 124
"""The exit code if `tick` has ended a run; timeout(1) uses the same."""

POLL_EVERY_S = 0.03
EXIT_TIMEOUT_S = 5.0
"""Seconds between the request to end and the kill."""
LAST_CHECKPOINT_TIMEOUT_S = 60.0
"""The same for the last ranks of an elastic job, which save a checkpoint. A batch system may end them earlier."""
SAVE_TIMEOUT_S = 20.0
"""The same for ranks that save before they end. Slurm and Kubernetes kill after 30 s."""
STOPPED = 128 + signal.SIGINT
"""The exit code of a rank that has ended after SIGINT."""
KILL_TIMEOUT_S = 5.0
"""Seconds that the supervisor waits for killed programs: a host that is cut off does not answer."""
BLAME_WAIT_S = 1.0
"""Seconds to wait for the first failure if all known failures are consequences."""
EVALUATOR_TIMEOUT_S = 60.0
"""Seconds that an evaluator has to finish after all ranks have ended well."""
CHECK_EVERY_S = 1.0
"""Seconds between checks that are not urgent, and before the user sees which programs are still running."""
SAME_SIGNAL_S = 0.2
"""A second signal within these seconds counts as the first: wrappers like `uv run` forward Ctrl-C once more."""
FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,  # Slurm's warning before the end of a job: #SBATCH --signal=B:USR1@60
}
"""The signals that end a run, and what its programs receive."""


class Supervisor:
    """Watches processes until all have ended.

    ```text
    running ──a rank fails (stop)───────────┐   a rank that sends no heartbeat is killed and counts as failed
       │  ──too few ranks are left (elastic)┤
       │  ──Ctrl-C, SIGTERM, HUP, USR1──────┤──► ending ──timeout, or Ctrl-C again──► killed ──no answer──► given up
       └──all ranks have ended (servers)────┘   an evaluator may finish first
    ```

    With `saves`, each of these signals means "save and end" to the ranks. Only the ranks receive it, as SIGINT;
    servers and evaluator are ended after the ranks. Programs that must end for another reason are killed at once,
    because SIGTERM would make them save.

    The ranks of an elastic job save a checkpoint if too few of them are left, and at each of these signals but Ctrl-C.
    They receive SIGTERM, and servers are ended after them.

    `elastic` decides which ranks are started again, and `servers` which servers.
    """

    def __init__(
        self,
        processes: Processes,
        events: ProcessEvents,
        ranks: int,
        *,
        policy: FailurePolicy,
        say: Callable[[str], None],
        tick: Tick | None = None,
        finishing: Collection[str] = (),
        servers: ServerRestarts | None = None,
        saves: bool = False,
        lost_after: float = math.inf,
        elastic: FixedRanks | None = None,
    ) -> None:
        self._processes = processes
        self._elastic = elastic or FixedRanks()
        self._shortage: str | None = None
        self._events = events
        self._policy = policy
        self._say = say
        self._tick = tick
        self._finishing = finishing
        """Names of programs that may finish their work after all ranks have ended."""
        self._servers = servers or ServerRestarts()
        """Servers whose shards other servers hold too. Their loss is no failure of the run."""
        self._saves = saves
        self._end_signal = signal.SIGKILL if saves else signal.SIGTERM
        self._grace = EXIT_TIMEOUT_S
        self._ranks_first = False
        """Whether only the ranks were asked to end. The other programs are ended after them."""
        self._stopped = False
        """Whether ranks have stopped, by their exit code, at a signal that did not come from this launcher."""
        self._ranks_ended: float | None = None
        self.ended_early: str | None = None
        """The reason that `tick` returned."""
        self._ranks = self._ranks_left = ranks
        self._failures: dict[str, ProcessExit] = {}
        self._signals: list[tuple[int, float]] = []
        self._ending_since: float | None = None
        self._killed = False
        """Whether a second signal has ended all programs at once."""
        self._first_failure = 0.0
        self._hang_checked = time.monotonic()
        self._raised: dict[str, float] = {}
        self._reported: set[str] = set()
        self._lost_after = lost_after
        self._heartbeats = HeartbeatMonitor(lost_after)
        self._heartbeats_checked = time.monotonic()
        self._lost: set[str] = set()
        """Programs that were killed because they sent no heartbeat. Their end is not waited for."""

    def run(self) -> int:
        """Start the processes, wait for their end, and return the exit code."""
        with self._signal_handlers():
            try:
                self._processes.start(self._signalled)
                self._elastic.record_start(self._processes)
                while True:
                    self._record_exits(self._processes.poll())
                    if self._is_over() or self._gives_up():
                        break
                    self._act()
                    time.sleep(POLL_EVERY_S)
            finally:
                self._processes.close()
        return self._conclude()

    @property
    def failure(self) -> ProcessExit | None:
        """The most likely first failure; None if there is none."""
        return first_failure(list(self._failures.values())) if self._failures else None

    def _signalled(self) -> bool:
        return bool(self._signals)

    def _is_over(self) -> bool:
        if self._processes.running():
            return False
        asked_to_save = self._ranks_first if self._signalled() else self._shortage is not None
        if asked_to_save and not self._killed and self._elastic.saving():
            return False
        return self._ending_since is not None or self._signalled() or not self._elastic.expects_more()

    def _gives_up(self) -> bool:
        """Whether the remaining programs did not end after they were killed."""
        if self._ending_since is None or time.monotonic() - self._ending_since <= self._grace + KILL_TIMEOUT_S:
            return False
        names = ", ".join(self._processes.running())
        self._say(
            f"{names} did not end within {KILL_TIMEOUT_S:.0f} s of being killed; check whether the host can be reached"
        )
        return True

    def _record_exits(self, ended: list[ProcessExit]) -> None:
        for one in ended:
            if one.name in self._lost:
                continue
            self._ranks_left -= one.rank is not None
            if self._saves and one.rank is not None and one.code == STOPPED:
                self._stopped = True
            elif self._elastic.has_left(one):
                self._events.post_dead(one, "it has left the job")  # servers and clocks do not wait for it
                if self._ending_since is None:
                    self._say(f"{one.name} has left the job, and the others go on")
            elif one.failed and self._ending_since is None:
                self._fail(one)
                continue
            elif one.failed and self._ranks_first:
                self._events.post_dead(one)  # the others save without it
            if one.rank is not None:
                self._elastic.record_exit(one)

    def _fail(self, ended: ProcessExit) -> None:
        if ended.name in self._failures:
            return
        if ended.name in self._servers:
            if ended.name not in self._reported:
                self._reported.add(ended.name)
                self._events.post_dead(ended)
                then = self._servers.record_failure(ended)
                self._say(f"{ended.reason(ended.name)}; {then}{_details(ended)}")
            return
        self._first_failure = self._first_failure or time.monotonic()
        self._failures[ended.name] = ended
        self._events.post_dead(ended)
        if self._policy == "continue":
            then = self._elastic.record_failure(ended) if ended.rank is not None else ""
            first = next(one for one in self._failures.values() if one.same_cause(ended))
            if first is not ended and ended.report is not None:
                self._say(f"{ended.reason(ended.name)} with the same error as {first.name}{then and f'; {then}'}")
            else:
                self._say(f"{ended.reason(ended.name)}; {then or 'the others go on'}{_details(ended)}")

    def _act(self) -> None:
        now = time.monotonic()
        if self._signals:
            first, since = self._signals[0]
            ending = self._ending_since is not None and self._ending_since < since
            again = self._signals[-1][1] - since > SAME_SIGNAL_S or (ending and first == signal.SIGINT)
            self._end_by_signal(signal.Signals(first), now)
            if again:
                self._killed = True
                self._processes.signal(signal.SIGKILL)
        if self._ending_since is None and now - self._heartbeats_checked >= CHECK_EVERY_S:
            self._heartbeats_checked = now
            self._kill_silent(now)
        if self._ending_since is None:
            self._ranks_left += self._elastic.start_due(self._processes, self._signalled)
            if self._ranks_left:
                self._servers.start_due(self._processes, self._signalled)
            for name in self._elastic.drop_unneeded():
                self._lost.add(name)
                self._ranks_left -= 1
                self._processes.kill(name)
            if self._too_few_left():
                self._request_last_checkpoint(now)
        if self._tick is not None and self._ending_since is None:
            self.ended_early = self._tick()
            if self.ended_early is not None:
                self._request_end(self._end_signal, now)
        if self._ending_since is not None:
            if self._ranks_first and self._ranks_left == 0 and not self._elastic.saving():
                self._processes.signal(self._end_signal)
            self._wait_for_end(now - self._ending_since)
        elif self._ranks_left == 0:
            if not self._elastic.expects_more():
                self._end_servers(now)
        elif self._failures and self._policy == "stop":
            for one in self._processes.raised():
                self._fail(one)
            own = [one for one in self._failures.values() if not one.consequence()]
            if own or now - self._first_failure > BLAME_WAIT_S:
                self._request_end(self._end_signal, now)
        elif now - self._hang_checked > CHECK_EVERY_S:
            self._hang_checked = now
            self._report_hanging_exits(now)

    def _kill_silent(self, now: float) -> None:
        """Kill programs that have sent no heartbeat for too long. They count as failed at once."""
        if self._lost_after == math.inf:
            return
        programs = [*self._processes.running(), *self._elastic.joined()]
        names = [name for name in programs if name not in self._lost]
        for name, seconds in self._heartbeats.check(
            now, self._events.read_heartbeats(names), self._processes.states
        ).items():
            kind, _, number = name.partition(" ")
            rank = int(number) if kind == "rank" else None
            self._kill(ProcessExit(name=name, rank=rank, code=-signal.SIGKILL, silent=seconds))

    def _kill(self, ended: ProcessExit) -> None:
        """Kill a program that counts as failed from now on. Its end is not waited for."""
        self._lost.add(ended.name)
        self._ranks_left -= ended.rank is not None and ended.name in self._processes.running()
        self._processes.kill(ended.name)
        self._fail(ended)

    def _too_few_left(self) -> bool:
        """Whether fewer ranks are left than an elastic job needs. The first time, a message says so."""
        if self._shortage is None and (self._failures or self._elastic.survives):
            self._shortage = self._elastic.shortage()
            if self._shortage is not None:
                self._say(self._shortage)
        return self._shortage is not None

    def _end_servers(self, now: float) -> None:
        """After the end of all ranks: end the servers, as soon as an evaluator has finished."""
        self._ranks_ended = now if self._ranks_ended is None else self._ranks_ended
        at_work = [name for name in self._processes.running() if name in self._finishing]
        failed = self._failures and self._policy == "stop"
        if failed or not at_work or now - self._ranks_ended > EVALUATOR_TIMEOUT_S:
            self._request_end(self._end_signal, now)
        elif now - self._ranks_ended > CHECK_EVERY_S and at_work[0] not in self._reported:
            self._reported.add(at_work[0])
            self._say(f"{', '.join(at_work)} is still at work and has {EVALUATOR_TIMEOUT_S:.0f} s; Ctrl-C ends it")

    def _wait_for_end(self, seconds: float) -> None:
        if seconds > self._grace:
            self._processes.signal(signal.SIGKILL)
        elif seconds > CHECK_EVERY_S and "" not in self._reported and self._processes.running():
            self._reported.add("")
            names = ", ".join(self._processes.running())
            left = self._grace - CHECK_EVERY_S
            self._say(
                f"{names} may take {left:.0f} s more to end, then a signal ends them; press Ctrl-C to end them at once"
            )

    def _report_hanging_exits(self, now: float) -> None:
        for one in self._processes.raised():
            since = self._raised.setdefault(one.name, now)
            if now - since >= EXIT_TIMEOUT_S and one.name not in self._reported and one.report is not None:
                self._reported.add(one.name)
                stops, survives = self._policy == "stop", self._elastic.survives
                self._say(
                    f"{one.name} has raised {one.report.summary} but does not end: "
                    "its threads or exit handlers are still at work"
                    + (f"; after {EXIT_TIMEOUT_S:.0f} s it counts as failed" if stops or survives else "")
                    + (", and all are ended" if stops else "")
                )
                if stops:
                    self._fail(one)
                elif survives:
                    self._kill(one)

    def _end_by_signal(self, received: signal.Signals, now: float) -> None:
        """The launcher has received a signal: ask the programs to end."""
        if self._ending_since is not None:
            return
        if self._saves:
            self._grace = SAVE_TIMEOUT_S
            self._request_end(signal.SIGINT, now, ranks_first=True)
        elif self._elastic.survives and received != signal.SIGINT:
            self._elastic.announce_end(f"the launcher received {received.name}")
            self._request_last_checkpoint(now)
        else:
            self._request_end(FORWARDED[received], now)

    def _request_last_checkpoint(self, now: float) -> None:
        """Ask the ranks of an elastic job to save a checkpoint and to end. Servers are ended after them."""
        self._grace = LAST_CHECKPOINT_TIMEOUT_S
        self._request_end(signal.SIGINT if self._saves else signal.SIGTERM, now, ranks_first=True)

    def _request_end(self, number: int, now: float, ranks_first: bool = False) -> None:
        if self._ending_since is None:
            self._ending_since, self._ranks_first = now, ranks_first
            self._processes.signal(number, ranks_first)

    def _conclude(self) -> int:
        if self._signals:
            if self._ranks_first and (text := self._elastic.checkpoint()):
                self._say(text)
            return 128 + self._signals[0][0]
        if self.ended_early is not None:
            return ENDED_EARLY
        if self._shortage is not None and (text := self._elastic.checkpoint()):
            self._say(text)
        if not self._failures:
            return LEFT_CODE if self._shortage is not None else STOPPED if self._stopped else 0
        failures = list(self._failures.values())
        if self._elastic.survives:
            return self._conclude_elastic(failures)
        if self._policy == "continue":
            all_failed = sum(one.rank is not None for one in failures) == self._ranks
            rest = "failed; the others ended by themselves"
            self._say(
                f"all {self._ranks} workers failed" if all_failed else f"{format_names([*self._failures])} {rest}"
            )
            # A failed evaluator does not count: a rank does its work instead, or has failed itself.
            return next((one.exit_code for one in failures if one.name not in self._finishing), 0)
        first = first_failure(failures)
        others = [one for one in failures if not one.consequence() and not one.same_cause(first)]
        while others:
            alike = [one for one in others if one.same_cause(others[0])]
            others = [one for one in others if one not in alike]
            summary = f": {alike[0].report.summary}" if alike[0].report is not None else ""
            self._say(f"{_reason(alike)}{summary}")
        self._say(f"{_reason([one for one in failures if one.same_cause(first)])}{_details(first)}")
        return first.exit_code

    def _conclude_elastic(self, failures: Sequence[ProcessExit]) -> int:
        """The exit code of an elastic job that has lost programs. Losses of ranks that it has survived do not count."""
        if self._too_few_left():
            return first_failure([one for one in failures if one.rank is not None] or failures).exit_code
        others = [one for one in failures if one.rank is None and one.name not in self._finishing]
        if others:
            self._say(f"{format_names([one.name for one in others])} failed; the ranks ended by themselves")
            return others[0].exit_code
        self._say(self._elastic.summary())
        return STOPPED if self._stopped else 0

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append((number, time.monotonic()))

        # An ignored signal stays ignored: nohup, or a background job of a shell.
        before = {number: signal.getsignal(number) for number in FORWARDED}
        handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number])


def _reason(alike: Sequence[ProcessExit]) -> str:
    """A sentence about programs that failed with the same cause."""
    first = alike[0]
    if len(alike) == 1:
        return first.reason(first.name)
    who = format_names([one.name for one in alike])
    if first.report is None:
        return first.reason(who).replace(" was killed", " were killed")
    return f"{who} failed with the same error (exit code {first.code})"


def _details(ended: ProcessExit) -> str:
    report = ended.report
    if report is None:
        return ""
    return f"\n{report.traceback.rstrip()}" if report.traceback and not report.shown else f": {report.summary}"
