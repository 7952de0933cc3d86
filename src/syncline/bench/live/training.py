"""A single training in the live view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from syncline.bench.live.base import Feed
from syncline.bench.live.run import RunFeed
from syncline.bench.live.series import number

__all__ = ["TrainingFeed"]


class TrainingFeed(Feed):
    """The folder of a run of `syncline train`, or of one run of a race."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._run = RunFeed(folder)
        self.runs[0] = self._run

    def state(self) -> dict[str, Any]:
        run = self._run
        self._read([run])
        status, reason = _status(run)
        points, config = run.points, run.config
        workers = points.get("sl_workers", config.get("workers"))
        agreed = [points.get("sl_strategy", config.get("strategy")), points.get("sl_codec", config.get("codec"))]
        row = self._row(
            0,
            status,
            kind="training",
            entry=" with ".join(str(word) for word in agreed if word),
            workers=workers,
            seed=points.get("seed", config.get("seed")),
            reason=reason,
        )
        return {
            "kind": "training",
            "folder": str(self.folder),
            "workload": points.get("sl_workload", config.get("workload")),
            "metric": run.metric,
            "higher": run.higher_is_better,
            "target": run.target,
            "workers": workers,
            "place": None,
            "status": status,
            "reason": reason,
            "done": run.step,
            "total": run.total_steps,
            "unit": "steps",
            "left": self._left() if status == "running" else None,
            "quiet": self._quiet(run.latest_ms) if status == "running" else None,
            "reading": self.reading,
            "runs": [row],
            "skipped": {},
            "problems": run.problems,
        }

    def _left(self) -> float | None:
        """Seconds of wall clock that the steps left will take, at the speed so far."""
        run, total = self._run, self._run.total_steps
        taken = run.step - run.first_step
        if total is None or run.begun_ms is None or run.latest_ms is None or taken < 1:
            return None
        return number((run.latest_ms - run.begun_ms) / 1000 / taken * max(0, total - run.step), 3)


def _status(run: RunFeed) -> tuple[str, str | None]:
    """How it is, and why it ended where it did not end well."""
    if run.stop is None:
        return ("waiting" if run.begun_ms is None else "running"), None
    if run.stop.get("status") == "success":
        return "finished", None
    if run.stop.get("stopped_by") == "signal":
        return "stopped", "stopped by the user"
    return "failed", str(run.stop.get("error") or "no reason was written")[:500]
