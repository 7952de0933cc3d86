"""Starts the programs of a run on this machine, forked or as new processes, and watches them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import WorldError
from syncline.launch.cleanup_process import CleanupProcess
from syncline.launch.output import OutputForwarder
from syncline.launch.prefork_client import Prefork, find_prefork
from syncline.launch.processes import ErrorReport, ProcessExit, ProcessState, read_error_report
from syncline.launch.programs import MPIEXEC, Program

WORKER = Path(__file__).with_name("worker.py")
"""The Python program that runs in every rank; it runs the user's script."""
KILL_TIMEOUT_S = 10.0
"""Timeout of the end of processes that were killed."""
STATE_CHECKS, STATE_CHECK_GAP_S = 2, 0.004
"""How many times a running thread is checked again, and the seconds between two checks."""
logger = logging.getLogger("syncline")


@dataclass(eq=False)
class _Process:
    program: Program
    pid: int
    error_file: str
    parent: Prefork | subprocess.Popen[bytes]
    """The process that started it: the prefork process or this launcher."""

    def has_ended(self) -> bool:
        if isinstance(self.parent, Prefork):
            return self.parent.code(self.pid) is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def reap(self) -> int:
        """The exit code of a process that has ended. Afterwards the system may reuse its process id."""
        if isinstance(self.parent, Prefork):
            code = self.parent.code(self.pid)
            assert code is not None
            self.parent.release(self.pid)
            return code
        return self.parent.wait()


class LocalProcesses:
    """The programs on this machine. Each runs in its own session; when it ends, its child processes are killed."""

    def __init__(self, programs: Sequence[Program], output: OutputForwarder, hosts: Sequence[str] = ()) -> None:
        """`hosts` names more hosts than those of the programs, for which programs may be added."""
        self._programs = programs
        self._output = output
        self._running: list[_Process] = []
        self._cleanup: CleanupProcess | None = None
        self._folder = ""
        self._hosts = {*hosts, *(program.host for program in programs)}

    def start(self, give_up: Callable[[], bool] = lambda: False) -> None:
        self._folder = tempfile.mkdtemp(prefix="syncline-run-")
        self._cleanup = CleanupProcess(self._folder, mpi=any(program.name == MPIEXEC for program in self._programs))
        for program in self._programs:
            if give_up() or not self.add(program, give_up):
                return

    def add(self, program: Program, give_up: Callable[[], bool] = lambda: False) -> bool:
        if program.host not in self._hosts or self._cleanup is None:
            return False
        try:
            process = self._start(program, give_up)
        except OSError as error:
            count = len(self._programs)
            raise WorldError(f"cannot start {program.name} of {count}: {error}; start fewer") from error
        if process is None:
            return False
        self._running.append(process)
        self._cleanup.add_group(process.pid)
        return True

    def _start(self, program: Program, give_up: Callable[[], bool]) -> _Process | None:
        folder = tempfile.mkdtemp(dir=self._folder)
        error_file = os.path.join(folder, "error.json")
        own = {"TORCHELASTIC_ERROR_FILE": error_file, "PYTHONUNBUFFERED": "1"}
        variables = {**os.environ, **program.variables, **own}
        with contextlib.ExitStack() as opened:
            nothing = opened.enter_context(open(os.devnull, "rb"))
            streams = [nothing.fileno() if sys.stdin is None else 0, 1, 2]  # None: standard input is closed
            if program.prefix is not None:
                for number, sink, name in ((1, self._output.out, "stdout"), (2, self._output.err, "stderr")):
                    path = os.path.join(folder, f"stream{number}")
                    streams[number] = opened.enter_context(open(path, "wb")).fileno()
                    copy = os.path.join(program.output, name) if program.output else None
                    self._output.follow(path, sink, program.prefix, copy)
                    os.unlink(path)  # both ends stay open, and no file is left, even if the launcher is killed
            prefork, why = find_prefork(program.target, variables, give_up)
            if give_up():
                return None
            if prefork is None:
                logger.info("%s is started as a new process: %s", program.name, why)
            pid = None if prefork is None else prefork.start(program.target, variables, program.enter, streams)
            if prefork is not None and pid is not None:
                return _Process(program, pid, error_file, prefork)
            process = _start_new(program, variables, streams)
            return _Process(program, process.pid, error_file, process)

    def poll(self) -> list[ProcessExit]:
        ended = [process for process in self._running if process.has_ended()]
        self._running = [process for process in self._running if process not in ended]
        return [self._reap(process) for process in ended]

    def _reap(self, process: _Process) -> ProcessExit:
        # Before it is reaped: until then the system does not reuse its process id, which is also its group id.
        _signal_group(process.pid, signal.SIGKILL)
        if self._cleanup is not None:
            self._cleanup.remove_group(process.pid)
        report = read_error_report(process.error_file)
        code = process.reap()
        if process.program.prefix is not None:
            self._output.finish(process.program.prefix)
        return _ended(process.program, code, report)

    def raised(self) -> list[ProcessExit]:
        reports = [(process.program, read_error_report(process.error_file)) for process in self._running]
        return [_ended(program, 1, report) for program, report in reports if report is not None]

    def running(self) -> list[str]:
        return [process.program.name for process in self._running]

    def pids(self) -> dict[str, int]:
        return {process.program.name: process.pid for process in self._running}

    def states(self) -> dict[str, ProcessState]:
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
        until = time.monotonic() + KILL_TIMEOUT_S
        while self._running and time.monotonic() < until:
            if not self.poll():
                time.sleep(0.005)
        if self._cleanup is not None:
            self._cleanup.close()


def _start_new(program: Program, variables: dict[str, str], streams: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a program as a new Python process."""
    return subprocess.Popen(
        (*program.enter, sys.executable, str(WORKER), *program.target),
        env={**variables, "SYNCLINE_SUPERVISOR": str(os.getpid())},
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        start_new_session=True,
    )


def _state(pid: int) -> ProcessState | None:
    """Whether a signal has stopped the process, or one of its threads runs or waits for a processor; else None.

    A thread counts as running if it runs at several checks in a row, so that a short wake-up does not count.
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
    """The state letter of each thread, from /proc; empty without such a process or without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
                found[thread] = fields[0] if fields else ""
    return found


def _ended(program: Program, code: int, report: ErrorReport | None) -> ProcessExit:
    known = report if code > 0 else None
    name = program.name if known is None or known.rank is None else f"rank {known.rank}"
    return ProcessExit(name=name, rank=program.rank, code=code, report=known)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
