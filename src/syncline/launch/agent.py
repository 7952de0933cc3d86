"""`python -m syncline.launch.agent`: starts a host's share of a run, as the launcher says on its standard input.

The first line is the job as JSON, so that no secret is on a command line; each later line is a signal to pass on, or
names a program to kill. At the end of the input the launcher has ended or stops the job: the programs here end.
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
from dataclasses import replace
from typing import Any, NamedTuple

from syncline.launch.local import LocalProcesses
from syncline.launch.output import OutputForwarder
from syncline.launch.programs import Program, thread_variables
from syncline.launch.ssh import CONNECT_TIMEOUT, NO_STORE
from syncline.launch.store import ProcessEvents, join_store
from syncline.launch.supervisor import CHECK_EVERY_S, EXIT_TIMEOUT_S, PERIOD

__all__ = ["main"]


def main() -> int:
    """Run the job that standard input describes."""
    control = _take_standard_input()
    job = json.loads(control.read_line())
    address, port = str(job["address"]), int(job["port"])
    importlib.import_module("torch")  # takes seconds, in which the launcher may end
    try:
        if control.has_closed():
            return 0
        # torch would try for long where nobody listens: the launcher has ended, or cannot be reached from here.
        socket.create_connection((address, port), CONNECT_TIMEOUT).close()
        board = ProcessEvents(join_store(address, port))
    except (OSError, RuntimeError, ValueError):
        return NO_STORE
    found = [Program.from_json(program) for program in job["programs"]]
    threads = thread_variables(sum(program.rank is not None for program in found))  # of this host's cores
    programs = [replace(program, variables={**threads, **program.variables}) for program in found]
    with OutputForwarder(sys.stdout.buffer, sys.stderr.buffer) as output:
        crew = LocalProcesses(programs, output)
        try:
            if control.orders() or control.closed:
                return 0
            crew.start(control.has_closed)
            board.post_ready(int(job["host"]))
            _watch(crew, board, control)
        finally:
            crew.close()
    return 0


def _watch(crew: LocalProcesses, board: ProcessEvents, control: LauncherInput) -> None:
    asked: float | None = None
    looked = time.monotonic()
    told: set[str] = set()
    while True:
        for ended in crew.poll():
            board.post_ended(ended)
        if not crew.running():
            return
        if time.monotonic() - looked > CHECK_EVERY_S:
            looked = time.monotonic()
            for raised in crew.raised():
                if raised.name not in told:
                    told.add(raised.name)
                    board.post_raised(raised)
        for order in control.orders():
            crew.kill(order.name) if order.name else crew.signal(order.signal, order.ranks_only)
        if control.closed and asked is None:
            asked = time.monotonic()
            crew.signal(signal.SIGTERM)
        if asked is not None and time.monotonic() - asked > EXIT_TIMEOUT_S:
            crew.signal(signal.SIGKILL)
        time.sleep(PERIOD)


class SignalOrder(NamedTuple):
    """A signal for all programs or for the ranks only, or SIGKILL for the program of that name."""

    signal: int
    ranks_only: bool
    name: str


class LauncherInput:
    """Lines from the launcher."""

    def __init__(self, fd: int) -> None:
        self.closed = False
        self._fd = fd
        self._rest = b""

    def read_line(self) -> bytes:
        """The first line, waited for: ssh ends us when it does not come."""
        while b"\n" not in self._rest and not self.closed:
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def has_closed(self) -> bool:
        """Whether the launcher has ended or stops the job. Orders that arrive meanwhile are kept."""
        while not self.closed and select.select([self._fd], [], [], 0)[0]:
            self._read()
        return self.closed

    def orders(self) -> list[SignalOrder]:
        """The orders that have arrived since the last call."""
        self.has_closed()
        *lines, self._rest = self._rest.split(b"\n")
        found: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
        return [
            SignalOrder(int(one["signal"]), bool(one.get("ranks_only", False)), str(one.get("name", "")))
            for one in found
        ]

    def _read(self) -> None:
        data = os.read(self._fd, 1 << 16)
        self._rest += data
        self.closed = not data


def _take_standard_input() -> LauncherInput:
    """Keep standard input for ourselves: workers that read theirs would eat the launcher's words."""
    fd = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return LauncherInput(fd)


if __name__ == "__main__":
    sys.exit(main())
