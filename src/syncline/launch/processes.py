"""How processes are started and watched: the contract, and how a process ended."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = [
    "CombinedProcesses",
    "ErrorReport",
    "ProcessExit",
    "ProcessState",
    "Processes",
    "first_failure",
    "format_names",
    "read_error_report",
]


ProcessState = Literal["stopped", "busy"]
"""The state of a process in the kernel: stopped by a signal, or running."""


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """What a worker said of its uncaught exception."""

    summary: str
    traceback: str = ""
    time: float = 0.0
    consequence: bool = False
    """The error says that somebody else is gone."""
    shown: bool = False
    """The script has shown its traceback itself."""
    rank: int | None = None
    """Who says it, where that cannot be told from the program: mpiexec stands for all of its ranks."""


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """A program that has ended. `code` is negative where a signal ended it."""

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
        """As a shell would give it: 128 and the signal.

        >>> ProcessExit(name="rank 2", rank=2, code=-9).exit_code
        137
        """
        return self.code if self.code >= 0 else 128 - self.code

    def reason(self, who: str = "it") -> str:
        """What happened, in words.

        >>> ProcessExit(name="rank 2", rank=2, code=-9).reason("rank 2")
        'rank 2 was killed by signal 9 (SIGKILL)'
        """
        if self.silent:
            return f"{who} sent no heartbeat for {self.silent:.0f} s (frozen, or cut off) and was killed"
        if self.code < 0:
            return f"{who} was killed by signal {-self.code} ({_signal_name(-self.code)})"
        return f"{who} failed (exit code {self.code})"

    def same_cause(self, other: ProcessExit) -> bool:
        """Whether both failed with the same exit code and the same error, if they reported one."""
        told, too = self.report, other.report
        if told is None or too is None:
            return self.code == other.code and told is too
        return self.code == other.code and told.summary == too.summary

    def consequence(self) -> bool:
        """Whether it most likely failed because another did."""
        return self.report is not None and self.report.consequence

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessExit:
        found = json.loads(text)
        report = found["report"]
        rank = found["rank"]
        return cls(
            name=str(found["name"]),
            rank=None if rank is None else int(rank),
            code=int(found["code"]),
            report=None if report is None else _report(report),
            time=float(found["time"]),
            silent=float(found.get("silent", 0.0)),
        )


def first_failure(failures: Sequence[ProcessExit]) -> ProcessExit:
    """Who failed first, as far as one can tell: killed, then failed by itself, then aborted, then left alone.

    An abort comes after an exception: gloo aborts a process whose peer is gone.

    >>> lost = ErrorReport(summary="PeerLostError: rank 1 is gone", consequence=True, time=1.0)
    >>> own = ErrorReport(summary="ValueError: boom", time=2.0)
    >>> left_alone = ProcessExit(name="rank 0", rank=0, code=1, report=lost)
    >>> first_failure([left_alone, ProcessExit(name="rank 1", rank=1, code=1, report=own)]).rank
    1
    """

    def order(ended: ProcessExit) -> tuple[int, float]:
        when = ended.report.time if ended.report is not None and ended.report.time else ended.time
        if ended.code < 0:
            return (2 if -ended.code == signal.SIGABRT else 0), when
        return (3 if ended.consequence() else 1), when

    return min(failures, key=order)


def format_names(names: Sequence[str]) -> str:
    """Names of programs for a message: ranks first, as ranges.

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
    """The report that a worker left, or None."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    return _report(found) if isinstance(found, dict) else None


def _report(found: Mapping[str, Any]) -> ErrorReport:
    """A report from JSON, ours or what torch's own `record` wrote."""
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
    """Programs on this machine or elsewhere, watched without a policy: that is the supervisor's."""

    def start(self, give_up: Callable[[], bool]) -> None:
        """Start them all, but no more as soon as `give_up` says so."""

    def poll(self) -> list[ProcessExit]:
        """Those that have ended since the last call. Does not wait."""

    def raised(self) -> list[ProcessExit]:
        """Those that have left a report of an exception but have not ended yet."""

    def running(self) -> list[str]:
        """The names of those that have not ended."""

    def states(self) -> dict[str, ProcessState]:
        """The states, by name, of programs that a signal has stopped or that compute, as far as they are known here."""

    def signal(self, number: int, ranks_only: bool = False) -> None:
        """Send a signal to the running programs, or only to the ranks, and to all processes that they have started."""

    def kill(self, name: str) -> None:
        """Kill one program and all processes that it has started. Does not wait."""

    def close(self) -> None:
        """End what is left, at once; nothing remains."""


class CombinedProcesses:
    """Crews on several machines as one."""

    def __init__(self, crews: Sequence[Processes]) -> None:
        self.crews = crews

    def start(self, give_up: Callable[[], bool]) -> None:
        for crew in self.crews:
            crew.start(give_up)

    def poll(self) -> list[ProcessExit]:
        return [ended for crew in self.crews for ended in crew.poll()]

    def raised(self) -> list[ProcessExit]:
        return [ended for crew in self.crews for ended in crew.raised()]

    def running(self) -> list[str]:
        return [name for crew in self.crews for name in crew.running()]

    def states(self) -> dict[str, ProcessState]:
        return {name: state for crew in self.crews for name, state in crew.states().items()}

    def signal(self, number: int, ranks_only: bool = False) -> None:
        for crew in self.crews:
            crew.signal(number, ranks_only)

    def kill(self, name: str) -> None:
        for crew in self.crews:
            crew.kill(name)

    def close(self) -> None:
        for crew in self.crews:
            crew.close()
