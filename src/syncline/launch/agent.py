"""`python -m syncline.launch.agent`: starts the programs of a run on one host, as the launcher requests on stdin.

The first line is the job as JSON, so that no secret is on a command line. Each later line is a signal to forward,
names a program to kill, or describes one more program to start. When the input ends, the launcher has ended or stops
the job, and the agent ends its programs.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncline.errors import WorldError
from syncline.launch.local import LocalProcesses
from syncline.launch.output import OutputForwarder
from syncline.launch.process_events import ENDED, RAISED, ProcessEvents, join_store
from syncline.launch.processes import ErrorReport, ProcessExit
from syncline.launch.programs import Program, thread_variables
from syncline.launch.ssh import CONNECT_TIMEOUT_S, NO_STORE
from syncline.launch.supervisor import CHECK_EVERY_S, EXIT_TIMEOUT_S, POLL_EVERY_S


def main() -> int:
    """Run the job that stdin describes; return the exit code."""
    control = _take_standard_input()
    job = json.loads(control.read_line())
    address, port = str(job["address"]), int(job["port"])
    importlib.import_module("torch")  # takes seconds; the launcher may end meanwhile
    try:
        if control.has_closed():
            return 0
        # torch retries for a long time if the launcher has ended or cannot be reached, so this is tried first.
        socket.create_connection((address, port), CONNECT_TIMEOUT_S).close()
        events = ProcessEvents(join_store(address, port))
    except (OSError, RuntimeError, ValueError):
        return NO_STORE
    found = [Program.from_json(program) for program in job["programs"]]
    threads = thread_variables(sum(program.rank is not None for program in found))  # of this host's cores

    def with_threads(program: Program) -> Program:
        return replace(program, variables={**threads, **program.variables})

    with OutputForwarder(sys.stdout.buffer, sys.stderr.buffer) as output:
        processes = LocalProcesses([with_threads(program) for program in found], output)
        try:
            if control.orders() or control.closed:
                return 0
            processes.start(control.has_closed)
            events.post_ready(int(job["host"]))
            _watch(processes, events, control, bool(job["elastic"]), with_threads)
        finally:
            processes.close()
    return 0


def _watch(
    processes: LocalProcesses,
    events: ProcessEvents,
    control: LauncherInput,
    elastic: bool,
    with_threads: Callable[[Program], Program],
) -> None:
    ending_since: float | None = None
    checked = time.monotonic()
    reported: set[str] = set()
    while True:
        for ended in processes.poll():
            events.post(ENDED, ended)
        if not processes.running() and (control.closed or not elastic):
            return
        if time.monotonic() - checked > CHECK_EVERY_S:
            checked = time.monotonic()
            for raised in processes.raised():
                if raised.name not in reported:
                    reported.add(raised.name)
                    events.post(RAISED, raised)
        for order in control.orders():
            if "name" in order:
                processes.kill(order["name"])
            elif "program" in order:
                _add(processes, events, with_threads(Program.from_json(order["program"])))
            else:
                processes.signal(order["signal"], order.get("ranks_only", False))
        if control.closed and ending_since is None:
            ending_since = time.monotonic()
            processes.signal(signal.SIGTERM)
        if ending_since is not None and time.monotonic() - ending_since > EXIT_TIMEOUT_S:
            processes.signal(signal.SIGKILL)
        time.sleep(POLL_EVERY_S)


def _add(processes: LocalProcesses, events: ProcessEvents, program: Program) -> None:
    """Start one more program. A start that fails is a failure of the program."""
    try:
        processes.add(program)
    except WorldError as error:
        report = ErrorReport(summary=str(error))
        events.post(ENDED, ProcessExit(name=program.name, rank=program.rank, code=1, report=report))


class LauncherInput:
    """The lines that the launcher writes to the agent's stdin."""

    def __init__(self, fd: int) -> None:
        self.closed = False
        self._fd = fd
        self._rest = b""

    def read_line(self) -> bytes:
        """Wait for the first line. ssh ends the agent if the line does not come."""
        while b"\n" not in self._rest and not self.closed:
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def has_closed(self) -> bool:
        """Whether the launcher has ended or stops the job. Orders that arrive meanwhile are buffered."""
        while not self.closed and select.select([self._fd], [], [], 0)[0]:
            self._read()
        return self.closed

    def orders(self) -> list[dict[str, Any]]:
        """The orders since the last call.

        An order is a `signal` for all programs, for `ranks_only`, or for the one of a `name`; or a `program` to start.
        """
        self.has_closed()
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines if line]

    def _read(self) -> None:
        data = os.read(self._fd, 1 << 16)
        self._rest += data
        self.closed = not data


def _take_standard_input() -> LauncherInput:
    """Keep stdin for the agent: a worker that reads its stdin would take the launcher's lines."""
    fd = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return LauncherInput(fd)


if __name__ == "__main__":
    sys.exit(main())
