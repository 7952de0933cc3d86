"""Programs on this machine, started and watched with torch's elastic multiprocessing.

One of elastic's contexts for each program: a context of several would end them all when one fails, and whether
to do that is the supervisor's to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.errors import WorldError
from syncline.launch.failures import Ended, Report, read_report
from syncline.launch.heartbeats import State
from syncline.launch.output import Output
from syncline.launch.programs import MPIEXEC, Program
from syncline.launch.sweeper import Sweeper

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

__all__ = ["LocalCrew"]

WORKER = Path(__file__).with_name("worker.py")
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ELASTICS_OWN = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
PATIENCE = 10.0
"""Seconds that a killed process may take to be gone."""
STATE_CHECKS, STATE_CHECK_GAP_S = 2, 0.004
"""How often a running thread is checked again, and the seconds between two checks."""


@dataclass(eq=False)
class _Process:
    program: Program
    context: PContext
    pid: int

    @property
    def error_file(self) -> str:
        return str(self.context.error_files[0])


class LocalCrew:
    """Programs of this machine. Each has a session of its own, and takes all it has started along when it ends."""

    def __init__(self, programs: Sequence[Program], output: Output) -> None:
        self._programs = programs
        self._output = output
        self._running: list[_Process] = []
        self._sweeper: Sweeper | None = None

    def start(self) -> None:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
        folder = tempfile.mkdtemp(prefix="syncline-run-")
        self._sweeper = Sweeper(folder, mpi=any(program.name == MPIEXEC for program in self._programs))
        with _signals_left_alone() as handled:
            for number, program in enumerate(self._programs):
                try:
                    process = self._start(program, os.path.join(folder, str(number)), handled)
                except OSError as error:
                    count = len(self._programs)
                    raise WorldError(f"cannot start {program.name} of {count}: {error}; start fewer") from error
                self._running.append(process)
                self._sweeper.begun(process.pid)

    def _start(self, program: Program, folder: str, handled: str) -> _Process:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

        argv = (*program.enter, sys.executable, str(WORKER), *program.target)
        own = {"SYNCLINE_SUPERVISOR": str(os.getpid()), "PYTHONUNBUFFERED": "1", HANDLED: handled}
        context = start_processes(
            name=program.name,
            entrypoint=argv[0],
            args={0: argv[1:]},
            envs={0: {**program.variables, **own}},
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.NONE if program.prefix is None else Std.ALL),
        )
        if program.prefix is not None:
            for path, sink in ((context.stdouts[0], self._output.out), (context.stderrs[0], self._output.err)):
                self._output.follow(path, sink, program.prefix)
                os.unlink(path)  # both ends are open: nothing is left of it however we end
        return _Process(program, context, context.pids()[0])

    def poll(self) -> list[Ended]:
        ended = [process for process in self._running if _has_ended(process.pid)]
        self._running = [process for process in self._running if process not in ended]
        return [self._reap(process) for process in ended]

    def _reap(self, process: _Process) -> Ended:
        # Before it is reaped: until then its number, which is its group's too, cannot be given to anybody else.
        _signal_group(process.pid, signal.SIGKILL)
        if self._sweeper is not None:
            self._sweeper.over(process.pid)
        report = read_report(process.error_file)
        code = _exit_code(process.context)
        if process.program.prefix is not None:
            self._output.finish(process.program.prefix)
        return _ended(process.program, code, report)

    def raised(self) -> list[Ended]:
        reports = [(process.program, read_report(process.error_file)) for process in self._running]
        return [_ended(program, 1, report) for program, report in reports if report is not None]

    def running(self) -> list[str]:
        return [process.program.name for process in self._running]

    def states(self) -> dict[str, State]:
        found = {process.program.name: _state(process.pid) for process in self._running}
        return {name: state for name, state in found.items() if state is not None}

    def signal(self, number: int, ranks_only: bool = False) -> None:
        for process in self._running:
            if not ranks_only or process.program.rank is not None:
                _signal_group(process.pid, number)

    def kill(self, name: str) -> None:
        for process in self._running:
            if process.program.name == name:
                _signal_group(process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        until = time.monotonic() + PATIENCE
        while self._running and time.monotonic() < until:
            if not self.poll():
                time.sleep(0.005)
        if self._sweeper is not None:
            self._sweeper.close()


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _state(pid: int) -> State | None:
    """The state of a process in the kernel: stopped by a signal, or with a thread that runs or waits for a processor.

    A thread that wakes now and then does not count: it must be found running several times in a row.
    """
    if _thread_states(pid).get(str(pid)) == "T":
        return "stopped"
    running = set(_running(pid))
    for _ in range(STATE_CHECKS if running else 0):
        time.sleep(STATE_CHECK_GAP_S)
        running &= set(_running(pid))
    return "busy" if running else None


def _running(pid: int) -> list[str]:
    return [thread for thread, state in _thread_states(pid).items() if state == "R"]


def _thread_states(pid: int) -> dict[str, str]:
    """The state of each thread from /proc; empty if there is no such process, or no /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
                found[thread] = fields[0] if fields else ""
    return found


def _exit_code(context: PContext) -> int:
    try:
        result = None
        while result is None:
            result = context.wait(0)
    except (ValueError, KeyError, TypeError):  # elastic cannot read what the script itself has left as a report
        return 1
    return int(result.failures[0].exitcode) if result.failures else 0


def _ended(program: Program, code: int, report: Report | None) -> Ended:
    known = report if code > 0 else None
    name = program.name if known is None or known.rank is None else f"rank {known.rank}"
    return Ended(name=name, rank=program.rank, code=code, report=known)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[str]:
    """Keep elastic from putting its signal handlers over ours; what the workers are to have instead."""
    before = os.environ.get(HANDLED)
    os.environ[HANDLED] = ""
    try:
        yield before or ELASTICS_OWN
    finally:
        if before is None:
            del os.environ[HANDLED]
        else:
            os.environ[HANDLED] = before
