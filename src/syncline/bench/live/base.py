"""What the page can ask of a race or a training."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from syncline.bench.live.heat import KINDS
from syncline.bench.live.run import RunFeed
from syncline.bench.live.series import number

__all__ = ["PATIENCE", "Feed", "seconds_since"]

PATIENCE = 0.25
"""Seconds of reading before an answer: what is left is read when the page asks again, at once."""
POINTS = 20_000
"""Points in one answer, of all curves together."""
QUIET = 30.0
"""Seconds without a new line after which the page says so."""


class Feed(ABC):
    """A folder as small JSON documents. Each question reads what is new, and nothing is read without one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[int, RunFeed] = {}
        """By a number that is never used again: the page asks for runs by it, never by a path."""
        self.reading = False

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What is run, how far it is, and a row for each run with the version of what is known of it."""

    def curves(self, numbers: Iterable[int]) -> dict[str, Any]:
        """Evaluations of these runs; unknown numbers are left out."""
        known = [one for one in dict.fromkeys(numbers) if one in self.runs]
        most = max(50, POINTS // max(1, len(known)))
        return {
            "runs": {
                str(one): {"version": self.runs[one].version, **self.runs[one].curve.columns(most)} for one in known
            }
        }

    def detail(self, run: int, kind: str) -> dict[str, Any] | None:
        """One run's speeds, and its ranks × steps; None where there is no such run or kind."""
        found = self.runs.get(run)
        if found is None or kind not in KINDS:
            return None
        return {
            "id": run,
            "version": found.version,
            "speeds": found.speeds.columns(),
            "heat": found.heat.document(kind),
            "straggler": found.heat.straggler(),
        }

    def _read(self, runs: Sequence[RunFeed]) -> None:
        """Read on in these, for as long as the page may wait."""
        until = time.monotonic() + PATIENCE
        for run in runs:
            run.refresh()
            while run.behind and time.monotonic() < until:
                run.refresh()
            if time.monotonic() > until:
                break
        self.reading = any(run.behind for run in runs)

    def _row(self, id_: int, status: str, **facts: Any) -> dict[str, Any]:
        """What the page shows of a run."""
        run = self.runs[id_]
        last = run.curve.last
        return {
            "id": id_,
            "version": run.version,
            "unread": run.behind,
            "status": status,
            "step": run.step,
            "steps": run.total_steps,
            "epochs": last[2] if last else None,
            "last": last[4] if last else None,
            "best": run.best,
            "hit": run.hit and run.hit["elapsed"],
            "test": run.test,
            **facts,
        }

    def _quiet(self, latest_ms: int | None) -> float | None:
        """Seconds since anything was written, where that is long."""
        found = seconds_since(latest_ms)
        return number(found, 3) if found is not None and found > QUIET else None


def seconds_since(ms: int | None) -> float | None:
    """By the wall clock, as the log's milliseconds are."""
    return None if ms is None else max(0.0, time.time() - ms / 1000)
