"""How a program ended, and who is to blame when several did."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = ["Ended", "Report", "culprit", "listed", "read_report"]


@dataclass(frozen=True, kw_only=True)
class Report:
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
class Ended:
    """A program that has ended. `code` is negative where a signal ended it."""

    name: str
    rank: int | None
    code: int
    report: Report | None = None
    time: float = field(default_factory=time.time)
    silent: float = 0.0
    """Seconds without a heartbeat after which the launcher killed it; 0 if it ended by itself."""

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def exit_code(self) -> int:
        """As a shell would give it: 128 and the signal.

        >>> Ended(name="rank 2", rank=2, code=-9).exit_code
        137
        """
        return self.code if self.code >= 0 else 128 - self.code

    def reason(self, who: str = "it") -> str:
        """What happened, in words.

        >>> Ended(name="rank 2", rank=2, code=-9).reason("rank 2")
        'rank 2 was killed by signal 9 (SIGKILL)'
        """
        if self.silent:
            return f"{who} sent no heartbeat for {self.silent:.0f} s (frozen, or cut off) and was killed"
        if self.code < 0:
            return f"{who} was killed by signal {-self.code} ({_signal_name(-self.code)})"
        return f"{who} failed (exit code {self.code})"

    def same_cause(self, other: Ended) -> bool:
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
    def from_json(cls, text: str | bytes) -> Ended:
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


def culprit(failures: Sequence[Ended]) -> Ended:
    """Who failed first, as far as one can tell: killed, then failed by itself, then aborted, then left alone.

    An abort comes after an exception: gloo aborts a process whose peer is gone.

    >>> lost = Report(summary="PeerLostError: rank 1 is gone", consequence=True, time=1.0)
    >>> own = Report(summary="ValueError: boom", time=2.0)
    >>> left_alone = Ended(name="rank 0", rank=0, code=1, report=lost)
    >>> culprit([left_alone, Ended(name="rank 1", rank=1, code=1, report=own)]).rank
    1
    """

    def order(ended: Ended) -> tuple[int, float]:
        when = ended.report.time if ended.report is not None and ended.report.time else ended.time
        if ended.code < 0:
            return (2 if -ended.code == signal.SIGABRT else 0), when
        return (3 if ended.consequence() else 1), when

    return min(failures, key=order)


def listed(names: Sequence[str]) -> str:
    """Names of programs for a message: ranks first, as ranges.

    >>> listed(["rank 0", "rank 1", "rank 2", "rank 3", "rank 5"])
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


def read_report(path: str) -> Report | None:
    """The report that a worker left, or None."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    return _report(found) if isinstance(found, dict) else None


def _report(found: Mapping[str, Any]) -> Report:
    """A report from JSON, ours or what torch's own `record` wrote."""
    message = found.get("traceback", found.get("message", ""))
    text = str(message.get("message", "")) if isinstance(message, dict) else str(message)
    lines = text.strip().splitlines()
    rank = found.get("rank")
    return Report(
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
