"""The state of one run for the live page, updated from its growing log. Its size does not grow with the run."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.bench.runlog import CONFIG, LOG, LogTail, read_document
from syncline.bench.step_measurements import measure_step
from syncline.planner.measured_limits import measured_limits

__all__ = ["HeatMap", "RunFeed", "Series", "rounded"]

MAX_SERIES_ROWS = 2000
HEAT_KINDS = ("compute", "exposed", "codec", "data", "seconds")
"""What the log has for each rank: seconds per step; `seconds` is the whole step."""
MAX_HEAT_COLUMNS = 400
MAX_HEAT_ROWS = 256
MAX_HEAT_CELLS = 40_000
"""A browser draws this many cells every second."""
STRAGGLER_RATIO = 1.3
"""The page names a rank whose computation takes this many times the median."""
SPEEDS = {
    "train_loss": "loss",
    "sl_samples_per_second": "samples",
    "sl_bytes_per_second": "bytes",
    "sl_exposed_share": "exposed",
}
"""Keys of the log that are written together, and their columns."""
SETTING_KEYS = ("sl_workload", "sl_workers", "sl_strategy", "sl_codec", "sl_target", "sl_metric", "seed")

Row = list[float | None]


def rounded(value: Any, digits: int = 6) -> float | None:
    """A finite number with this many digits, else None. JSON has no NaN, and the log writes it as a string.

    >>> rounded("0.1234567"), rounded("nan"), rounded(None), rounded(True)
    (0.123457, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


def expert_load(layer: str, tokens: Sequence[int], dropped: Sequence[int]) -> dict[str, Any]:
    """The share of the tokens that go to the busiest expert, its number, and the share of those that were dropped.

    >>> expert_load("blocks.1", [30, 10, 5, 5], [10, 0, 0, 0])
    {'layer': 'blocks.1', 'experts': 4, 'busiest': 0, 'share': 0.6667, 'dropped': 0.1667}
    """
    wanted = [int(kept) + int(lost) for kept, lost in zip(tokens, dropped, strict=True)]
    total = max(1, sum(wanted))
    busiest = max(range(len(wanted)), key=wanted.__getitem__)
    share, lost = rounded(wanted[busiest] / total, 4), rounded(sum(map(int, dropped)) / total, 4)
    return {"layer": layer, "experts": len(wanted), "busiest": busiest, "share": share, "dropped": lost}


class Series:
    """Named columns of numbers; the first is the step. If there are too many rows, every second row is dropped.

    >>> series = Series("step", "loss", max_rows=4)
    >>> for step in range(10):
    ...     series.add([step, step / 2])
    >>> series.columns()
    {'step': [0, 4, 8, 9], 'loss': [0.0, 2.0, 4.0, 4.5]}
    """

    def __init__(self, *names: str, max_rows: int = MAX_SERIES_ROWS) -> None:
        self.names = names
        self._max_rows = max_rows
        self._rows: list[Row] = []
        self._every = 1
        self._count = 0
        self.last: Row | None = None
        """The last row, which is always part of `columns`."""

    def add(self, row: Row) -> None:
        """Append a row. A row with the same step as the last one replaces the values that it has."""
        if self.last is not None and self.last[0] == row[0]:
            self.last[:] = [old if new is None else new for old, new in zip(self.last, row, strict=True)]
            return
        self.last = row
        if self._count % self._every == 0:
            self._rows.append(row)
            if len(self._rows) >= self._max_rows:
                self._rows, self._every = self._rows[::2], 2 * self._every
        self._count += 1

    def cut(self, step: float) -> None:
        """Remove the rows after a step: the run was resumed there."""
        self._rows = [row for row in self._rows if (row[0] or 0) <= step]
        self.last = self._rows[-1] if self._rows else None
        self._count = len(self._rows) * self._every

    def columns(self, max_rows: int | None = None) -> dict[str, list[float | None]]:
        """All rows, or about `max_rows` of them, by column."""
        rows = self._rows
        if max_rows is not None and len(rows) > max_rows:
            rows = rows[:: -(-len(rows) // max_rows)]
        if self.last is not None and (not rows or rows[-1] is not self.last):
            rows = [*rows, self.last]
        return {name: [row[index] for row in rows] for index, name in enumerate(self.names)}


@dataclass
class _HeatColumn:
    """Seconds per step of all ranks, for the steps from `start` to `stop`."""

    start: int
    stop: int
    lines: int
    kinds: dict[str, array[float]]

    def merged(self, other: _HeatColumn) -> _HeatColumn:
        """One column for the steps of both; the seconds are weighted with the steps."""
        mine, theirs = max(1, self.stop - self.start), max(1, other.stop - other.start)
        share = theirs / (mine + theirs)
        kinds = {
            kind: array("f", (a + (b - a) * share for a, b in zip(self.kinds[kind], other.kinds[kind], strict=True)))
            for kind in HEAT_KINDS
        }
        return _HeatColumn(self.start, other.stop, self.lines + other.lines, kinds)


class HeatMap:
    """Seconds per step by rank (rows) and steps (columns). Adjacent steps share a column in a long run.

    With more than 256 ranks, a row shows the slowest of several neighbours, so that a straggler stays visible.

    >>> heat = HeatMap()
    >>> line = {"compute": [1, 4], "exposed": [3, 0], "codec": [0, 0], "data": [0, 0], "seconds": [4, 4]}
    >>> heat.add({"step": 10, "steps": 10, **line})
    True
    >>> heat.document("compute")["rows"], heat.straggler()
    ([[1.0], [4.0]], {'rank': 1, 'times': 4.0})
    """

    def __init__(self) -> None:
        self._columns: list[_HeatColumn] = []
        self._lines_per_column = 1
        self.ranks = 0

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add one `sl_ranks` line of the log; return False if it cannot be read."""
        try:
            step, steps = int(line["step"]), int(line["steps"])
            kinds = {kind: array("f", (float(value) for value in line[kind])) for kind in HEAT_KINDS}
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        sizes = {len(values) for values in kinds.values()}
        if len(sizes) != 1 or not min(sizes) or steps < 1 or step < steps:
            return False
        if sizes != {self.ranks}:  # the run was resumed with another number of workers
            self._columns, self._lines_per_column, self.ranks = [], 1, sizes.pop()
        column = _HeatColumn(step - steps, step, 1, kinds)
        if self._columns and self._columns[-1].lines < self._lines_per_column:
            self._columns[-1] = self._columns[-1].merged(column)
        else:
            self._columns.append(column)
        if len(self._columns) > max(100, min(MAX_HEAT_COLUMNS, MAX_HEAT_CELLS // min(self.ranks, MAX_HEAT_ROWS))):
            self._halve()
        return True

    def _halve(self) -> None:
        columns, self._lines_per_column = self._columns, 2 * self._lines_per_column
        pairs = [first.merged(second) for first, second in zip(columns[::2], columns[1::2], strict=False)]
        self._columns = pairs + columns[2 * len(pairs) :]

    def cut(self, step: float) -> None:
        """Remove the columns after a step: the run was resumed there."""
        self._columns = [column for column in self._columns if column.stop <= step]

    def document(self, kind: str) -> dict[str, Any]:
        """The table of one kind, with the steps at the edges of the columns."""
        together = max(1, -(-self.ranks // MAX_HEAT_ROWS))
        rows = [
            [rounded(max(column.kinds[kind][first : first + together]), 4) for column in self._columns]
            for first in range(0, self.ranks, together)
        ]
        edges = [self._columns[0].start, *(column.stop for column in self._columns)] if self._columns else []
        return {"kind": kind, "edges": edges, "ranks": self.ranks, "together": together, "rows": rows}

    def means(self) -> dict[str, list[float]]:
        """The mean seconds of each rank by kind. Empty without data."""
        weights = [max(1, column.stop - column.start) for column in self._columns]
        if not weights:
            return {}
        pairs = list(zip(self._columns, weights, strict=True))
        return {
            kind: [
                sum(column.kinds[kind][rank] * weight for column, weight in pairs) / sum(weights)
                for rank in range(self.ranks)
            ]
            for kind in HEAT_KINDS
        }

    def straggler(self) -> dict[str, float] | None:
        """The rank with the longest computation, if it is well above the median."""
        if self.ranks < 2 or not self._columns:
            return None
        spent = self.means()["compute"]
        slowest = max(range(self.ranks), key=lambda rank: spent[rank])
        median = statistics.median_low(spent)
        if median <= 0 or spent[slowest] < STRAGGLER_RATIO * median:
            return None
        return {"rank": slowest, "times": rounded(spent[slowest] / median, 3) or 0.0}


class RunFeed:
    """Reads a run's folder; each `refresh` reads what is new. Invalid lines are counted and cause no error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        """Increases with every change. A page that has the same version is up to date."""
        self.behind = True
        """True if there is more to read at once."""
        self._tail = LogTail(path / LOG)
        self._reset()

    def _reset(self) -> None:
        self.config: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.curve = Series("step", "elapsed", "epochs", "bytes", "metric")
        self.speeds = Series("step", "elapsed", *SPEEDS.values())
        self.heat = HeatMap()
        self.spent: tuple[int, Mapping[str, Any]] | None = None
        """The steps of this attempt and the phases at its latest evaluation, or at the latest `sl_ranks` before it."""
        self.experts: list[dict[str, Any]] = []
        """The latest `expert_load` of each layer of experts."""
        self.step = 0
        self.started_ms: int | None = None
        self.latest_ms: int | None = None
        self.first_step = 0
        self.stop: dict[str, Any] | None = None
        """The metadata of `run_stop`: `status`, and `stopped_by` or `error`."""
        self.hit: dict[str, float] | None = None
        """`step` and `elapsed` of the first evaluation that reached the target."""
        self.best: float | None = None
        self.test: float | None = None
        self._zero = self._elapsed = 0.0
        self._bad_events = 0

    def refresh(self) -> None:
        """Read the next part of the log."""
        lines = self._tail.read()
        if self._tail.restarted:
            self._reset()
            self.version += 1
        if not self.config:  # it is written before the first line of the log
            self.config = read_document(self.path / CONFIG, [])
        for line in lines:
            self._apply(line)
        self.version += bool(lines)
        self.behind = self._tail.more

    @property
    def problems(self) -> list[str]:
        """A sentence for each defect."""
        problems = []
        bad = self._tail.bad_lines + self._bad_events
        if self._tail.gone:
            problems.append(f"{self.path.name}/{LOG} was removed; the page shows what was read before")
        if bad:
            problems.append(f"{self.path.name}/{LOG}: {bad} line{'s' * (bad > 1)} cannot be read and are left out")
        return problems

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if its configuration has them."""
        try:
            per_step, samples = int(self.config["samples_a_step"]), int(self.config["samples"]["train"])
            steps = -(-samples // per_step) * int(self.config["epochs"])
            return min(steps, int(self.config.get("steps") or steps))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    @property
    def metric(self) -> str:
        return str(self.config.get("metric") or self.settings.get("sl_metric") or "metric")

    @property
    def target(self) -> float | None:
        return rounded(self.settings.get("sl_target", self.config.get("target")))

    @property
    def higher_is_better(self) -> bool:
        return bool(self.config.get("higher_is_better", True))

    def _apply(self, line: Mapping[str, Any]) -> None:
        key, value, metadata = line.get("key"), line.get("value"), line.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        seconds, ms, step = rounded(line.get("seconds"), 12), line.get("time_ms"), metadata.get("step")
        if isinstance(ms, int):
            self.latest_ms = ms
        if seconds is not None and self.started_ms is not None and self.stop is None:
            self._elapsed = max(self._elapsed, seconds - self._zero)
        if type(step) is int:
            self.step = step
        if key in SPEEDS:
            self._add_speed(SPEEDS[key], value)
        elif not self._apply_event(str(key), value, metadata, seconds):
            self._bad_events += 1

    def _apply_event(self, key: str, value: Any, metadata: dict[str, Any], seconds: float | None) -> bool:
        """Apply an event that is not a speed. Return False if it cannot be read; unknown keys are ignored."""
        if key == "sl_ranks":
            return isinstance(value, dict) and self.heat.add(value)
        if key == "sl_experts":
            return self._set_experts(value)
        if key == "sl_evaluation":
            return self._add_evaluation(value)
        if key == "sl_resumed":
            return self._resume(value)
        if key == "run_start":  # a resumed run starts again, perhaps with another clock
            self._zero = (seconds or 0.0) - self._elapsed
            self.started_ms, self.first_step, self.stop = self.latest_ms, self.step, None
        elif key == "run_stop":
            self.stop = metadata
        elif key in SETTING_KEYS:
            self.settings[key] = value
        elif key.startswith("sl_test_"):
            self.test = rounded(value)
        return True

    def _set_experts(self, value: Any) -> bool:
        """The load of each layer of experts in the latest interval."""
        try:
            self.experts = [expert_load(str(name), layer["tokens"], layer["dropped"]) for name, layer in value.items()]
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            return False
        return True

    def _resume(self, value: Any) -> bool:
        """Remove everything after the checkpoint: these steps are repeated."""
        at = rounded(value)
        if at is None:
            return False
        self.step = int(at)
        for table in (self.curve, self.speeds, self.heat):
            table.cut(at)
        metrics = [metric for metric in self.curve.columns()["metric"] if metric is not None]
        self.best = None if not metrics else max(metrics) if self.higher_is_better else min(metrics)
        if self.hit is not None and self.hit["step"] > at:
            self.hit = None
        self.spent = None
        return True

    def _add_evaluation(self, value: Any) -> bool:
        if not isinstance(value, dict) or "metric" not in value:
            return False
        if isinstance(value.get("phases"), dict) and self.step > self.first_step:
            self.spent = self.step - self.first_step, value
        metric, elapsed = rounded(value["metric"]), rounded(value.get("elapsed"))
        self.curve.add([self.step, elapsed, rounded(value.get("epochs")), rounded(value.get("bytes_wire"), 9), metric])
        if metric is None:
            return True
        better = max if self.higher_is_better else min
        self.best = metric if self.best is None else better(self.best, metric)
        target = self.target
        if self.hit is None and target is not None and elapsed is not None and better(metric, target) == metric:
            self.hit = {"step": self.step, "elapsed": elapsed}
        return True

    def limits(self) -> list[str]:
        """What limits the mean step so far, as sentences; the largest first."""
        means = self.heat.means()
        spent = self.spent
        if spent is None and means:
            spent = 1, {"phases": {kind: seconds[0] for kind, seconds in means.items()}}
        if spent is None:
            return []
        measured = measure_step(self.config, spent[1], spent[0], means.get("compute", ()))
        return [] if measured is None else [limit.sentence for limit in measured_limits(measured)]

    def _add_speed(self, column: str, value: Any) -> None:
        row: Row = [None] * len(self.speeds.names)
        row[0], row[1] = self.step, rounded(self._elapsed)
        row[self.speeds.names.index(column)] = rounded(value)
        self.speeds.add(row)
