"""Starts the jobs of `syncline bench elastic`, kills their processes on a schedule, and samples their memory.

A job is started as a user starts it: `syncline run -n 4 --elastic 1:4 --restart 1000 …`. Contenders are started by the
same launcher, because torchft has none that starts lost workers again: their delays before a restart are the same.
Everything is observed from outside: the journals of the workers, the output of the launcher, and /proc.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from syncline.bench.elastic.analysis import VictimKill
from syncline.bench.elastic.plan import ElasticPlan, RunSchedule, is_contender, strategy_of
from syncline.bench.elastic.worker import ScriptSettings
from syncline.errors import WorldError
from syncline.runtime import RealRuntime
from syncline.strategies import build_strategy
from syncline.training.distribute import momentum_of
from syncline.workloads import build

__all__ = ["JobRun", "ProcessTable", "run_job", "unexpected_losses"]

POLL_S = 0.05
SAMPLE_EVERY_S = 2.0
"""Interval of the samples of memory and descriptors."""
REPORT_EVERY_S = 5.0
START_TIMEOUT_S = 120.0
"""Until all workers have completed a step."""
END_TIMEOUT_S = 90.0
"""Until the launcher has ended after the stop file was written."""
CLEAN_UP_TIMEOUT_S = 20.0
LEFT_TIMEOUT_S = 5.0
"""After this time a process that outlives its launcher counts as left behind."""
SERVER_SETTLE_S = 5.0
"""A server is killed only if all servers have run for this long: a new one needs time to copy its shards."""
RESTARTS = 1000
SERVER_MODULE = "syncline.server"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Say = Callable[[str], None]


@dataclass
class JobRun:
    """The observations of one job from outside."""

    schedule: RunSchedule
    folder: Path
    code: int | None = None
    """The exit code of the launcher; None if it had to be killed."""
    start: float = 0.0
    """When the last of the first workers had completed a step."""
    stop: float = 0.0
    problem: str | None = None
    """Why the run was aborted; None if it was not."""
    kills: list[VictimKill] = field(default_factory=list)
    skipped_kills: list[str] = field(default_factory=list)
    samples: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)
    """By program: seconds since the start, resident bytes, open descriptors."""
    max_zombies: int = 0
    left_processes: list[int] = field(default_factory=list)
    left_files: list[str] = field(default_factory=list)

    @property
    def journals(self) -> Path:
        return self.folder / "journals"

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop"


def run_job(plan: ElasticPlan, schedule: RunSchedule, folder: Path, say: Say) -> JobRun:
    """Run one job to its end, with the kills of its schedule."""
    run = JobRun(schedule, folder)
    run.journals.mkdir(parents=True)
    temporary = folder / "tmp"
    temporary.mkdir()
    with (
        open(run.output, "wb") as output,
        _interrupt_on_sigterm(),
        _contender_environment(schedule.strategy) as variables,
    ):
        environ = {**os.environ, **variables, "TMPDIR": str(temporary.absolute())}
        launcher = subprocess.Popen(
            _command(plan, run), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
        )
        monitor = _JobMonitor(plan, run, launcher, say)
        try:
            monitor.run()
        finally:
            monitor.clean_up()
    # torch makes a cache folder of its own
    run.left_files = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    return run


def _contender_environment(spec: str) -> contextlib.AbstractContextManager[Mapping[str, str]]:
    """Start what a contender needs besides its launcher. Yields environment variables for the job."""
    if not is_contender(spec):
        return contextlib.nullcontext({})
    from syncline.bench.elastic.torchft_worker import CONTENDERS

    return CONTENDERS.build(spec).lighthouse()


@contextlib.contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM to this process acts as Ctrl-C, so that all processes of the job end too."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _command(plan: ElasticPlan, run: JobRun) -> list[str]:
    words = [sys.executable, "-m", "syncline", "run", "-n", str(plan.workers)]
    words += ["--elastic", f"1:{plan.workers}", "--restart", str(RESTARTS), "--folder", str(run.folder / "job")]
    words += ["--servers", str(plan.servers), "--replicas", str(plan.replicas)] if plan.servers else []
    words += ["--lost-after", plan.lost_after] if plan.lost_after is not None else []
    script = "torchft_worker" if is_contender(run.schedule.strategy) else "worker"
    return [*words, "-m", f"syncline.bench.elastic.{script}", _settings(plan, run).as_json()]


def _settings(plan: ElasticPlan, run: JobRun) -> ScriptSettings:
    """The settings of the script. The learning rate and the momentum are those of the strategy's preset."""
    workload, strategy = build(plan.workload), build_strategy(strategy_of(run.schedule.strategy))
    preset = strategy.presets[0] if strategy.presets else None
    optimizer = workload.optimizer(workload.model(0))
    capped = (
        preset is not None
        and preset.momentum is not None
        and all("momentum" in group for group in optimizer.param_groups)
        and momentum_of(optimizer) > preset.momentum
    )
    # As in a race: the higher rate of a preset replaces the momentum that it removes.
    factor = 1.0 if preset is None else preset.rate if capped or preset.momentum is None else min(1.0, preset.rate)
    return ScriptSettings(
        folder=str(run.journals.absolute()),
        stop_file=str(run.stop_file.absolute()),
        strategy=run.schedule.strategy,
        workload=plan.workload,
        workers=plan.workers,
        batch=plan.batch or workload.defaults.batch,
        learning_rate=plan.learning_rate or workload.defaults.learning_rate * factor,
        momentum=preset.momentum if preset is not None and capped else None,
        transport=plan.transport,
        seed=plan.seed,
    )


class _JobMonitor:
    """Observes one job from its start to its end, and kills its processes on the schedule."""

    def __init__(self, plan: ElasticPlan, run: JobRun, launcher: subprocess.Popen[bytes], say: Say) -> None:
        self._plan = plan
        self._run = run
        self._launcher = launcher
        self._say = say
        self._table = ProcessTable(launcher.pid, run.journals)
        self._attacked: set[int] = set()
        """Process ids that were killed or frozen."""
        self._sampled_at = self._reported_at = -1e9

    def run(self) -> None:
        """Wait for the start, kill on the schedule, and wait for the end."""
        run, plan = self._run, self._plan
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._poll_end() and len(self._table.trained()) < plan.workers:
            if time.monotonic() > deadline:
                run.problem = f"the workers did not all complete a step within {START_TIMEOUT_S:.0f} s"
                return
        run.start = time.monotonic()
        run.stop = run.start + run.schedule.seconds
        kill_times = list(run.schedule.kill_times)
        while not self._poll_end() and time.monotonic() < run.stop:
            if kill_times and time.monotonic() >= run.start + kill_times[0]:
                self._kill(kill_times.pop(0))
            self._sample()
        if self._launcher.poll() is not None:
            run.problem = "the job ended before its time"
            return
        run.stop = time.monotonic()
        run.stop_file.touch()
        deadline = time.monotonic() + END_TIMEOUT_S
        while not self._poll_end():
            if time.monotonic() > deadline:
                run.problem = f"the job did not end within {END_TIMEOUT_S:.0f} s"
                return

    def _poll_end(self) -> bool:
        """Wait a moment; return whether the launcher has ended."""
        try:
            self._launcher.wait(POLL_S)
        except subprocess.TimeoutExpired:
            self._table.update()
            return False
        return True

    def _kill(self, kill_time: float) -> None:
        """Kill or freeze a random process, if enough others are left.

        The choice depends on the seed, the round and the time, so every job loses the worker at the same place.
        """
        trained = {member: pid for member, pid in self._table.trained().items() if self._lives(pid)}
        candidates = {}
        if self._plan.kill != "servers":
            workers = self._table.workers()
            for member in sorted(workers, key=self._table.place_of):
                if self._lives(workers[member]) and set(trained) - {member}:
                    candidates[f"rank {member}"] = workers[member]
        if self._plan.kill != "workers":
            candidates |= self._killable_servers()
        if not candidates:
            self._run.skipped_kills.append(
                f"at {kill_time:g} s: too few other workers with state, or servers, are running"
            )
            return
        rng = random.Random(f"{self._plan.seed} {self._run.schedule.turn} {kill_time}")
        name = rng.choice(list(candidates))
        pid = candidates[name]
        self._attacked.add(pid)
        self._run.kills.append(VictimKill(time.monotonic(), name, pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if self._plan.lost == "freeze" else signal.SIGKILL)

    def _killable_servers(self) -> dict[str, int]:
        servers = {pid: age for pid, age in self._table.servers().items() if self._lives(pid)}
        if len(servers) < self._plan.servers or min(servers.values()) < SERVER_SETTLE_S:
            return {}
        return {f"server process {pid}": pid for pid in sorted(servers)}

    def _lives(self, pid: int) -> bool:
        return pid not in self._attacked and self._table.lives(pid)

    def _sample(self) -> None:
        now = time.monotonic()
        if now - self._sampled_at >= SAMPLE_EVERY_S:
            self._sampled_at = now
            programs = {"launcher": self._launcher.pid}
            programs |= {f"rank {member}": pid for member, pid in self._table.workers().items() if self._lives(pid)}
            programs |= {f"server process {pid}": pid for pid in self._table.servers()}
            for name, pid in programs.items():
                with contextlib.suppress(OSError, ValueError):
                    usage = (now - self._run.start, resident_bytes(pid), len(os.listdir(f"/proc/{pid}/fd")))
                    self._run.samples.setdefault(name, []).append(usage)
            self._run.max_zombies = max(self._run.max_zombies, self._table.zombies())
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            living = sum(self._lives(pid) for pid in self._table.workers().values())
            self._say(
                f"{self._run.schedule.name}: {now - self._run.start:.0f} of {self._run.schedule.seconds:g} s, "
                f"{living} workers, step {self._table.last_step()}, {len(self._run.kills)} kills"
            )

    def clean_up(self) -> None:
        """End the launcher if it still runs, and note the processes that it has left."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._launcher.poll() is None:
                self._launcher.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._launcher.wait(CLEAN_UP_TIMEOUT_S)
        self._run.code = self._launcher.returncode
        runtime, deadline = RealRuntime(), time.monotonic() + LEFT_TIMEOUT_S
        while True:
            left = [pid for pid in sorted(self._table.start_times) if self._table.lives(pid)]
            if not left or time.monotonic() > deadline:
                self._run.left_processes = left
                return
            runtime.sleep(POLL_S)


class ProcessTable:
    """The processes of a job: the descendants of its launcher, and the workers by their journals."""

    def __init__(self, launcher: int, journals: Path) -> None:
        self._launcher = launcher
        self._journals = journals
        self._pids: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._trained: set[int] = set()
        self._server_since: dict[int, float] = {}
        self.start_times: dict[int, str] = {}
        """The start time of every process of the job, by process id. The system may use a process id again."""

    def update(self) -> None:
        """Read the journals of new workers, and record their processes."""
        for path in self._journals.iterdir():
            member = int(path.stem.partition("-")[2])
            if member in self._trained:
                continue
            with path.open("rb") as file:
                lines = file.read(4096).split(b"\n")
            if len(lines) > 1 and member not in self._pids:
                found = re.search(rb'"place": (\d+), "pid": (\d+)', lines[0])
                if found is None:
                    raise WorldError(f"{path} does not begin with a worker's facts: {lines[0][:80]!r}")
                self._places[member], self._pids[member] = int(found[1]), int(found[2])
            if len(lines) > 2 and not lines[1].startswith(b"{"):
                self._trained.add(member)
        self._record([self._launcher, *self._pids.values()])

    def _record(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self.start_times.setdefault(pid, process_stat(pid)[1])

    def lives(self, pid: int) -> bool:
        """Whether a recorded process still runs."""
        state, started = process_stat(pid)
        return state not in ("", "Z", "X") and started == self.start_times.get(pid)

    def workers(self) -> dict[int, int]:
        """The process ids of all workers so far, by member."""
        return dict(self._pids)

    def place_of(self, member: int) -> int:
        """The place of a worker; one that was started again has the place of the lost one."""
        return self._places[member]

    def trained(self) -> dict[int, int]:
        """The process ids of the workers that have completed a step: they have the state."""
        return {member: self._pids[member] for member in self._trained}

    def servers(self) -> dict[int, float]:
        """The process ids of the running servers, and the seconds since each was first seen."""
        now = time.monotonic()
        found = [pid for pid in descendants(self._launcher) if SERVER_MODULE in command_line(pid).split("\0")]
        self._server_since = {pid: self._server_since.get(pid, now) for pid in found}
        self._record(found)
        return {pid: now - since for pid, since in self._server_since.items()}

    def zombies(self) -> int:
        """The number of ended processes that their parents have not waited for."""
        return sum(process_stat(pid)[0] == "Z" for pid in descendants(self._launcher))

    def last_step(self) -> int:
        """The highest step number in the journals."""
        found = [0]
        for path in self._journals.iterdir():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 200))
                lines = [line.split() for line in file.read().split(b"\n")[:-1]]
            found += [int(words[1]) for words in lines[1:] if len(words) > 2 and not words[0].startswith(b"{")]
        return max(found)


def process_stat(pid: int) -> tuple[str, str]:
    """The letter of a process's state, such as R, S, T or Z, and its start time; both empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def command_line(pid: int) -> str:
    """The words of a process's command line, each with a zero byte at its end; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """The children of a process, and their descendants."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


def resident_bytes(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def unexpected_losses(output: str, kills: Sequence[VictimKill]) -> list[str]:
    """The launcher's sentences about programs that have failed although they were not killed.

    >>> unexpected_losses("syncline: rank 3 failed (exit code 1); the others go on: ValueError: boom\\n", [])
    ['rank 3 failed (exit code 1); the others go on: ValueError: boom']
    """
    ranks = {kill.program for kill in kills if kill.member is not None}
    servers = len(kills) - len(ranks)  # the number of a killed server is known only to the launcher
    found = re.findall(r"^syncline: ((rank|server) (\d+) (?:failed|was killed|sent no).*)$", output, re.MULTILINE)
    unexpected = []
    for sentence, kind, number in found:
        if kind == "server" and servers and "failed" not in sentence:
            servers -= 1
        elif f"{kind} {number}" not in ranks:
            unexpected.append(str(sentence))
    return unexpected
