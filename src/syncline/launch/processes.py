"""The contract of classes that start and watch processes, and the record of how a process ended."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

from syncline.launch.programs import Program

ProcessState = Literal["stopped", "busy"]
"""The state of a process in the kernel: stopped by a signal, or running."""


DISK_FULL_MESSAGES = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Parts of the errors of a process that could not write a file."""


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """The uncaught exception of a worker."""

    summary: str
    traceback: str = ""
    time: float = 0.0
    consequence: bool = False
    """True if the error says that another process is gone."""
    shown: bool = False
    """True if the script has printed its traceback itself."""
    rank: int | None = None
    """The rank that failed. It is needed only for mpiexec, one program that represents all ranks."""


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """How a process ended. `code` is negative if a signal ended it."""

    name: str
    rank: int | None
    code: int
    report: ErrorReport | None = None
    time: float = field(default_factory=time.time)
    silent: float = 0.0
    """Seconds without a heartbeat after which the launcher killed it; 0 if it ended by itself."""

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the number of the signal.

        >>> ProcessExit(name="rank 2", rank=2, code=-9).exit_code
        137
        """
        return self.code if self.code >= 0 else 128 - self.code

    def reason(self, who: str = "it") -> str:
        """A sentence that says how it ended.

        >>> ProcessExit(name="rank 2", rank=2, code=-9).reason("rank 2")
        'rank 2 was killed by signal 9 (SIGKILL)'
        >>> full = ErrorReport(summary="OSError: [Errno 28] No space left on device")
        >>> ProcessExit(name="rank 2", rank=2, code=1, report=full).reason("rank 2")
        'rank 2 failed (exit code 1): its disk is full (OSError: [Errno 28] No space left on device)'
        """
        if self.silent:
            return f"{who} sent no heartbeat for {self.silent:.0f} s (frozen, or cut off) and was killed"
        if self.code < 0:
            return f"{who} was killed by signal {-self.code} ({_signal_name(-self.code)})"
        summary = "" if self.report is None else self.report.summary
        full = f": its disk is full ({summary})" if any(words in summary for words in DISK_FULL_MESSAGES) else ""
        return f"{who} failed (exit code {self.code}){full}"

    def same_cause(self, other: ProcessExit) -> bool:
        """Whether both failed with the same exit code and the same error."""
        mine = None if self.report is None else self.report.summary
        theirs = None if other.report is None else other.report.summary
        return self.code == other.code and mine == theirs

    def consequence(self) -> bool:
        """Whether it most likely failed because another process failed."""
        return self.report is not None and self.report.consequence

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessExit:
        found = json.loads(text)
        report = found["report"]
        return cls(**{**found, "report": None if report is None else ErrorReport(**report)})


def first_failure(failures: Sequence[ProcessExit]) -> ProcessExit:
    """The most likely first failure: a killed process, else an exception, else an abort, else a consequence.

    An abort is less likely than an exception, because gloo aborts a process whose peer is gone.

    >>> lost = ErrorReport(summary="PeerLostError: rank 1 is gone", consequence=True, time=1.0)
    >>> own = ErrorReport(summary="ValueError: boom", time=2.0)
    >>> consequence = ProcessExit(name="rank 0", rank=0, code=1, report=lost)
    >>> first_failure([consequence, ProcessExit(name="rank 1", rank=1, code=1, report=own)]).rank
    1
    """

    def order(ended: ProcessExit) -> tuple[int, float]:
        when = ended.report.time if ended.report is not None and ended.report.time else ended.time
        if ended.code < 0:
            return (2 if -ended.code == signal.SIGABRT else 0), when
        return (3 if ended.consequence() else 1), when

    return min(failures, key=order)


def format_names(names: Sequence[str]) -> str:
    """Format names of programs for a message: ranks first, as ranges.

    >>> format_names(["rank 0", "rank 1", "rank 2", "rank 3", "rank 5"])
    'ranks 0-3 and 5'
    """
    ranks = sorted(int(name.removeprefix("rank ")) for name in names if name.startswith("rank "))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 3 else map(str, run))]
    shown = [f"{'rank' if len(ranks) == 1 else 'ranks'} {_joined(parts)}"] if ranks else []
    return _joined([*shown, *(name for name in names if not name.startswith("rank "))])


def _joined(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def read_error_report(path: str) -> ErrorReport | None:
    """Read the report that a worker has written; None if there is none."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    return _report(found) if isinstance(found, dict) else None


def _report(found: Mapping[str, Any]) -> ErrorReport:
    """Decode a report, written by `worker.py` or by torch's `record`."""
    message = found.get("traceback", found.get("message", ""))
    text = str(message.get("message", "")) if isinstance(message, dict) else str(message)
    lines = text.strip().splitlines()
    rank = found.get("rank")
    return ErrorReport(
        summary=str(found.get("summary", lines[-1] if lines else "")),
        traceback=text,
        time=float(found.get("time", 0.0)),
        consequence=bool(found.get("consequence", False)),
        shown=bool(found.get("shown", False)),
        rank=rank if isinstance(rank, int) else None,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class Processes(Protocol):
    """A group of processes, on this machine or elsewhere. The supervisor decides what to do with them."""

    def start(self, give_up: Callable[[], bool]) -> None:
        """Start all processes; stop as soon as `give_up()` is true."""

    def add(self, program: Program, give_up: Callable[[], bool]) -> bool:
        """Start one more process. Returns False if its host does not belong to this group, or `give_up()` is true."""

    def poll(self) -> list[ProcessExit]:
        """The processes that have ended since the last call. Does not wait."""

    def raised(self) -> list[ProcessExit]:
        """The processes that have reported an exception but have not ended yet."""

    def running(self) -> list[str]:
        """The names of the processes that have not ended."""

    def pids(self) -> dict[str, int]:
        """The process ids, by name, of the processes that have not ended, as far as they are known here."""

    def states(self) -> dict[str, ProcessState]:
        """The states, by name, of processes that are stopped or busy, as far as they are known here."""

    def signal(self, number: int, ranks_only: bool = False) -> None:
        """Send a signal to the running processes, or only to the ranks, and to their child processes."""

    def kill(self, name: str) -> None:
        """Kill one process and its child processes. Does not wait."""

    def close(self) -> None:
        """Kill all processes that are left, and wait for their end."""


class CombinedProcesses:
    """The processes of several machines as one group."""

    def __init__(self, parts: Sequence[Processes]) -> None:
        self._parts = parts

    def start(self, give_up: Callable[[], bool]) -> None:
        for part in self._parts:
            part.start(give_up)

    def add(self, program: Program, give_up: Callable[[], bool]) -> bool:
        return any(part.add(program, give_up) for part in self._parts)

    def poll(self) -> list[ProcessExit]:
        return [ended for part in self._parts for ended in part.poll()]

    def raised(self) -> list[ProcessExit]:
        return [ended for part in self._parts for ended in part.raised()]

    def running(self) -> list[str]:
        return [name for part in self._parts for name in part.running()]

    def pids(self) -> dict[str, int]:
        return {name: pid for part in self._parts for name, pid in part.pids().items()}

    def states(self) -> dict[str, ProcessState]:
        return {name: state for part in self._parts for name, state in part.states().items()}

    def signal(self, number: int, ranks_only: bool = False) -> None:
        for part in self._parts:
            part.signal(number, ranks_only)

    def kill(self, name: str) -> None:
        for part in self._parts:
            part.kill(name)

    def close(self) -> None:
        for part in self._parts:
            part.close()
