"""A trace of one rank that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show.

```text
rank 0   compute        ├ forward ┤├──── backward ────┤├ step ┤
         communication              ├ bucket 2 ┤├ bucket 1 ┤
         data           ├┤                                     ├┤
```

The file is the array form of the trace event format, whose closing bracket may be missing: what a killed run has
flushed can be opened.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

from syncline.events.recorder import RunEvent

__all__ = ["ChromeTrace"]

LANES = ("compute", "communication", "data")
"""In the order in which they are shown; others come after them."""
THREADS_PER_LANE = 1000
"""Thread numbers of one lane: overlapping spans get different threads, which a viewer shows as rows."""
MAX_COMPARED_SPANS = 32
"""Latest spans of a row that a new one is compared with. Older ones do not overlap it."""
FLUSH_EVERY_EVENTS = 64
MAX_TRACE_EVENTS = 400_000
"""About 60 MB: the viewers do not open much more."""


class ChromeTrace:
    """A sink that writes spans and points to `path`. The metadata `lane` and `what` are a span's lane and name.

    `zero` is the time of this rank's clock that is 0 in the trace; `error` is its uncertainty in seconds against the
    other ranks. After `limit` events the rest is only counted, and the trace ends with the count.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "trace.json"
    >>> trace = ChromeTrace(path, rank=0, zero=100.0)
    >>> metadata = {"lane": "communication", "what": "bucket 0"}
    >>> trace.write(RunEvent("sl_comm_seconds", 0.25, 101.0, "INTERVAL_END", metadata))
    >>> trace.close()
    >>> span = json.loads(path.read_text())[-1]
    >>> span["name"], span["ph"], span["ts"], span["dur"]
    ('bucket 0', 'X', 750000.0, 250000.0)
    """

    def __init__(
        self, path: str | Path, rank: int, *, zero: float = 0.0, error: float = 0.0, limit: int = MAX_TRACE_EVENTS
    ) -> None:
        self.path = Path(path)
        self._rank = rank
        self._zero = zero
        self._left = limit
        self._dropped = 0
        self._unwritten: list[str] = []
        self._first = True
        self._rows: dict[str, list[deque[tuple[float, float]]]] = {}
        self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (held open)
        self._file.write("[")
        self._describe("process_name", name=f"rank {rank}")
        self._describe("process_sort_index", sort_index=rank)
        if error:
            self._describe("process_labels", labels=f"clock ± {1e6 * error:.0f} µs")
        for lane in LANES:
            self._rows_of(lane)
        self._flush()

    def write(self, event: RunEvent) -> None:
        # The end of a span has its length too, so its beginning is not needed.
        if event.kind == "INTERVAL_START" or self._file.closed:
            return
        if self._left <= 0:
            self._dropped += 1
            return
        self._left -= 1
        seconds = float(event.value or 0.0) if event.kind == "INTERVAL_END" else 0.0
        stop = event.seconds - self._zero
        metadata = {key: value for key, value in event.metadata.items() if key not in ("lane", "what")}
        lane = str(event.metadata.get("lane") or _lane_of(event.key))
        line: dict[str, Any] = {
            "name": str(event.metadata.get("what") or event.metadata.get("call") or event.key),
            "cat": event.key,
            "pid": self._rank,
            "ts": round(1e6 * (stop - seconds), 3),
        }
        if event.kind == "INTERVAL_END":
            line |= {"ph": "X", "dur": round(1e6 * seconds, 3), "tid": self._row_of(lane, stop - seconds, stop)}
        else:
            self._rows_of(lane)
            line |= {"ph": "i", "s": "t", "tid": self._thread_number(lane, 0)}
            metadata["value"] = event.value
        if metadata:
            line["args"] = metadata
        self._add(line)

    def close(self) -> None:
        """Write what is left and the closing bracket. A second call does nothing."""
        if self._file.closed:
            return
        if self._dropped:
            self._describe("process_labels", labels=f"{self._dropped} more events were dropped")
        self._flush()
        self._file.write("\n]\n")
        self._file.close()

    def _row_of(self, lane: str, start: float, stop: float) -> int:
        """The thread number of a span: the first row of its lane where it partly overlaps no other span."""
        rows = self._rows_of(lane)
        fitting = (number for number, spans in enumerate(rows) if not any(_cut(start, stop, *one) for one in spans))
        number = next(fitting, len(rows))
        if number == len(rows):
            self._add_row(lane)
        rows[number].append((start, stop))
        return self._thread_number(lane, number)

    def _rows_of(self, lane: str) -> list[deque[tuple[float, float]]]:
        if lane not in self._rows:
            self._rows[lane] = []
            self._add_row(lane)
        return self._rows[lane]

    def _add_row(self, lane: str) -> None:
        rows = self._rows[lane]
        rows.append(deque(maxlen=MAX_COMPARED_SPANS))
        tid = self._thread_number(lane, len(rows) - 1)
        self._describe("thread_name", tid, name=lane if len(rows) == 1 else f"{lane} {len(rows)}")
        self._describe("thread_sort_index", tid, sort_index=tid)

    def _thread_number(self, lane: str, row: int) -> int:
        return THREADS_PER_LANE * (1 + list(self._rows).index(lane)) + row

    def _describe(self, what: str, tid: int = 0, **arguments: Any) -> None:
        self._add({"name": what, "ph": "M", "pid": self._rank, "tid": tid, "args": arguments})

    def _add(self, line: dict[str, Any]) -> None:
        # JSON has no NaN: a single one would make the whole file invalid.
        self._unwritten.append(json.dumps(_finite(line), default=str, allow_nan=False))
        if len(self._unwritten) >= FLUSH_EVERY_EVENTS:
            self._flush()

    def _flush(self) -> None:
        # The comma comes before each line, not after it: a file that is cut off stays valid up to the last line.
        for line in self._unwritten:
            self._file.write("\n" if self._first else ",\n")
            self._file.write(line)
            self._first = False
        self._unwritten.clear()
        self._file.flush()


def _cut(start: float, stop: float, other_start: float, other_stop: float) -> bool:
    """Whether two spans overlap and neither contains the other: viewers cannot draw that in one row."""
    return start < other_start < stop < other_stop or other_start < start < other_stop < stop


def _lane_of(key: str) -> str:
    """The lane of an event whose metadata names none."""
    if key.startswith("sl_comm"):
        return "communication"
    return "data" if key.startswith("sl_data") else "other"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not -1e308 <= value <= 1e308:
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value
