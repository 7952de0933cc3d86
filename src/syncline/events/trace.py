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
"""Thread numbers of one lane: spans that overlap lie on places of their own."""
MAX_COMPARED_SPANS = 32
"""Spans of a place that a new one is compared with: what ended long ago does not overlap it."""
FLUSH_EVERY_EVENTS = 64
"""Events between flushes."""
MAX_TRACE_EVENTS = 400_000
"""Events that a trace holds, about 60 MB: the viewers do not open much more."""


class ChromeTrace:
    """A sink that writes spans and points to `path`. Spans tell their lane and name as metadata `lane` and `what`.

    `zero` is the reading of this rank's clock that is 0 in the trace, and `error` how many seconds it may be off
    from the other ranks'. After `limit` events the rest is only counted, and the count stands at the end.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "trace.json"
    >>> trace = ChromeTrace(path, rank=0, zero=100.0)
    >>> told = {"lane": "communication", "what": "bucket 0"}
    >>> trace.write(RunEvent("sl_comm_seconds", 0.25, 101.0, "INTERVAL_END", told))
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
        self._waiting: list[str] = []
        self._first = True
        self._places: dict[str, list[deque[tuple[float, float]]]] = {}
        self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (held open)
        self._file.write("[")
        self._describe("process_name", name=f"rank {rank}")
        self._describe("process_sort_index", sort_index=rank)
        if error:
            self._describe("process_labels", labels=f"clock ± {1e6 * error:.0f} µs")
        for lane in LANES:
            self._places_of(lane)
        self._flush()

    def write(self, event: RunEvent) -> None:
        # The end of a span tells its length too: nothing has to be kept from its beginning.
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
            line |= {"ph": "X", "dur": round(1e6 * seconds, 3), "tid": self._place(lane, stop - seconds, stop)}
        else:
            self._places_of(lane)
            line |= {"ph": "i", "s": "t", "tid": self._number(lane, 0)}
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

    def _place(self, lane: str, start: float, stop: float) -> int:
        """The thread number for a span: the first place of its lane where it cuts no other one in two."""
        places = self._places_of(lane)
        fitting = (number for number, spans in enumerate(places) if not any(_cut(start, stop, *one) for one in spans))
        number = next(fitting, len(places))
        if number == len(places):
            self._add_place(lane)
        places[number].append((start, stop))
        return self._number(lane, number)

    def _places_of(self, lane: str) -> list[deque[tuple[float, float]]]:
        if lane not in self._places:
            self._places[lane] = []
            self._add_place(lane)
        return self._places[lane]

    def _add_place(self, lane: str) -> None:
        places = self._places[lane]
        places.append(deque(maxlen=MAX_COMPARED_SPANS))
        tid = self._number(lane, len(places) - 1)
        self._describe("thread_name", tid, name=lane if len(places) == 1 else f"{lane} {len(places)}")
        self._describe("thread_sort_index", tid, sort_index=tid)

    def _number(self, lane: str, place: int) -> int:
        return THREADS_PER_LANE * (1 + list(self._places).index(lane)) + place

    def _describe(self, what: str, tid: int = 0, **told: Any) -> None:
        self._add({"name": what, "ph": "M", "pid": self._rank, "tid": tid, "args": told})

    def _add(self, line: dict[str, Any]) -> None:
        # A bare NaN would spoil the whole file, and an object of somebody's own is worth its name at most.
        self._waiting.append(json.dumps(_finite(line), default=str, allow_nan=False))
        if len(self._waiting) >= FLUSH_EVERY_EVENTS:
            self._flush()

    def _flush(self) -> None:
        # A comma before each line but the first, not after: whatever is cut off, the lines before it are whole.
        for line in self._waiting:
            self._file.write("\n" if self._first else ",\n")
            self._file.write(line)
            self._first = False
        self._waiting.clear()
        self._file.flush()


def _cut(start: float, stop: float, other_start: float, other_stop: float) -> bool:
    """Whether two spans overlap and neither holds the other: viewers cannot draw that on one line."""
    return start < other_start < stop < other_stop or other_start < start < other_stop < stop


def _lane_of(key: str) -> str:
    """Where an event goes that names no lane."""
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
