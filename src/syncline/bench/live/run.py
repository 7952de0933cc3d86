"""One run as its log tells it, while it grows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.bench.live.heat import HeatMap
from syncline.bench.live.series import Series, number
from syncline.bench.live.tail import Tail

__all__ = ["RunFeed"]

SPEEDS = {
    "train_loss": "loss",
    "sl_samples_per_second": "samples",
    "sl_bytes_per_second": "bytes",
    "sl_exposed_share": "exposed",
}
"""Keys of the log that are written together, and the columns that they become."""
POINTS = ("sl_workload", "sl_workers", "sl_strategy", "sl_codec", "sl_target", "sl_metric", "seed")


class RunFeed:
    """Reads a run's folder as often as it is asked to, each time what is new. Nothing in a log makes it fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        """Grows with everything that is read: who has the same one has seen it all."""
        self.behind = True
        """Whether there is something to read that was not read yet."""
        self._tail = Tail(path / "log.jsonl")
        self._begin()

    def _begin(self) -> None:
        self.config: dict[str, Any] = {}
        self.points: dict[str, Any] = {}
        self.curve = Series("step", "elapsed", "epochs", "bytes", "metric")
        self.speeds = Series("step", "elapsed", *SPEEDS.values())
        self.heat = HeatMap()
        self.step = 0
        self.begun_ms: int | None = None
        self.latest_ms: int | None = None
        self.first_step = 0
        self.stop: dict[str, Any] | None = None
        """What `run_stop` told: `status`, and `stopped_by` or `error`."""
        self.hit: dict[str, float] | None = None
        """The first evaluation that found the target reached: `step` and `elapsed`."""
        self.best: float | None = None
        self.test: float | None = None
        self._zero = self._elapsed = 0.0
        self._unread = 0

    def refresh(self) -> None:
        """Read on."""
        lines = self._tail.read()
        if self._tail.anew:
            self._begin()
            self.version += 1
        if not self.config:  # the loop writes it before the first line of the log
            self.config = _document(self.path / "config.json")
        for line in lines:
            self._take(line)
        self.version += bool(lines)
        self.behind = self._tail.more

    @property
    def problems(self) -> list[str]:
        """What cannot be read, in sentences."""
        found = []
        bad = self._tail.bad + self._unread
        if self._tail.gone:
            found.append(f"{self.path.name}/log.jsonl is gone; what was read of it is shown")
        if bad:
            found.append(f"{self.path.name}/log.jsonl: {bad} line{'s' * (bad > 1)} cannot be read and are left out")
        return found

    @property
    def total_steps(self) -> int | None:
        """Steps that the run takes if nothing ends it before, where its configuration tells."""
        try:
            a_step, samples = int(self.config["samples_a_step"]), int(self.config["samples"]["train"])
            steps = -(-samples // a_step) * int(self.config["epochs"])
            return min(steps, int(self.config.get("steps") or steps))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    @property
    def metric(self) -> str:
        return str(self.config.get("metric") or self.points.get("sl_metric") or "metric")

    @property
    def target(self) -> float | None:
        return number(self.points.get("sl_target", self.config.get("target")))

    @property
    def higher_is_better(self) -> bool:
        return bool(self.config.get("higher_is_better", True))

    def _take(self, line: Mapping[str, Any]) -> None:
        key, value, told = line.get("key"), line.get("value"), line.get("metadata")
        told = told if isinstance(told, dict) else {}
        seconds, ms, step = number(line.get("seconds"), 12), line.get("time_ms"), told.get("step")
        if isinstance(ms, int):
            self.latest_ms = ms
        if seconds is not None and self.begun_ms is not None and self.stop is None:
            self._elapsed = max(self._elapsed, seconds - self._zero)
        if type(step) is int:
            self.step = step
        if key in SPEEDS:
            self._speed(SPEEDS[key], value)
        elif not self._event(str(key), value, told, seconds):
            self._unread += 1

    def _event(self, key: str, value: Any, told: dict[str, Any], seconds: float | None) -> bool:
        """What is not a speed; False where it cannot be read. Keys that the page does not show pass by."""
        if key == "sl_ranks":
            return isinstance(value, dict) and self.heat.add(value)
        if key == "sl_evaluation":
            return self._evaluated(value)
        if key == "sl_resumed":
            return self._resumed(value)
        if key == "run_start":
            self._started(seconds)
        elif key == "run_stop":
            self.stop = told
        elif key in POINTS:
            self.points[key] = value
        elif key.startswith("sl_test_"):
            self.test = number(value)
        return True

    def _started(self, seconds: float | None) -> None:
        """A resumed run begins again; its clock may be another process's."""
        self._zero = (seconds or 0.0) - self._elapsed
        self.begun_ms, self.first_step, self.stop = self.latest_ms, self.step, None

    def _resumed(self, value: Any) -> bool:
        """Steps after the checkpoint are taken again."""
        at = number(value)
        if at is None:
            return False
        self.step = int(at)
        for table in (self.curve, self.speeds, self.heat):
            table.cut(at)
        kept = [metric for metric in self.curve.columns()["metric"] if metric is not None]
        self.best = None if not kept else max(kept) if self.higher_is_better else min(kept)
        if self.hit is not None and self.hit["step"] > at:
            self.hit = None
        return True

    def _evaluated(self, value: Any) -> bool:
        if not isinstance(value, dict) or "metric" not in value:
            return False
        metric, elapsed = number(value["metric"]), number(value.get("elapsed"))
        spent = [elapsed, number(value.get("epochs")), number(value.get("bytes_wire"), 9)]
        self.curve.add([self.step, *spent, metric])
        if metric is None:
            return True
        better = max if self.higher_is_better else min
        self.best = metric if self.best is None else better(self.best, metric)
        target = self.target
        if self.hit is None and target is not None and elapsed is not None and better(metric, target) == metric:
            self.hit = {"step": self.step, "elapsed": elapsed}
        return True

    def _speed(self, column: str, value: Any) -> None:
        row: list[float | None] = [None] * len(self.speeds.names)
        row[0], row[1] = self.step, number(self._elapsed)
        row[self.speeds.names.index(column)] = number(value)
        self.speeds.add(row)


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
