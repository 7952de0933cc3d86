"""Horovod's timeline: a Chrome trace with one row for each tensor's name.

```text
grad.weight   ├ NEGOTIATE_ALLREDUCE ┤├──────── ALLREDUCE ────────┤
                                     ├─ torch.distributed ─┤
grad.bias     ├─ NEGOTIATE_ALLREDUCE ─┤├─── ALLREDUCE ───┤
```

The file is the array form of the trace event format. Its closing bracket is optional, so the file of a killed run can
be opened.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from syncline.events.trace import FLUSH_EVERY_EVENTS, MAX_TRACE_EVENTS
from syncline.runtime import Lock

logger = logging.getLogger("syncline")

RANK = "{rank}"
FLUSH_EVERY_S = 1.0
"""Seconds after which events are flushed, so that the file can be read during the run."""


class TimelineObserver(Protocol):
    """Receives the times at which operations are negotiated and executed."""

    def negotiating(self, name: str, kind: str, start: float, stop: float) -> None: ...
    def running(self, name: str, kind: str, activity: str, start: float, stop: float) -> None: ...
    def cycle(self, at: float) -> None: ...
    def close(self) -> None: ...


class Timeline:
    """Spans of negotiation and of operations, by name. Rank 0 writes, or every rank where the path holds `{rank}`.

    `now` is the clock of the spans; its first value is 0 in the trace. After `limit` events, the rest is only counted.
    If the file cannot be written, there is a warning, and training continues.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "timeline.json"
    >>> timeline = Timeline(path, rank=0, now=lambda: 10.0)
    >>> timeline.negotiating("grad", "allreduce", 10.0, 10.5)
    >>> timeline.running("grad", "allreduce", "SUM", 10.5, 10.75)
    >>> timeline.close()
    >>> [(span["name"], span["ts"], span["dur"]) for span in json.loads(path.read_text()) if span["ph"] == "X"]
    [('NEGOTIATE_ALLREDUCE', 0.0, 500000.0), ('ALLREDUCE', 500000.0, 250000.0), ('SUM', 500000.0, 250000.0)]
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int,
        now: Callable[[], float],
        lock: Lock | None = None,
        mark_cycles: bool = False,
        limit: int = MAX_TRACE_EVENTS,
    ) -> None:
        self.path = Path(str(path).replace(RANK, str(rank)))
        self.mark_cycles = mark_cycles
        self._now = now
        self._lock: Lock = nullcontext() if lock is None else lock
        self._zero = self._flushed = now()
        self._left = limit
        self._dropped = 0
        self._rows: dict[str, int] = {}
        self._waiting: list[str] = []
        self._file: TextIO | None = None
        if rank == 0 or RANK in str(path):
            self._open(rank)

    @property
    def active(self) -> bool:
        """Whether this rank writes."""
        return self._file is not None

    def negotiating(self, name: str, kind: str, start: float, stop: float) -> None:
        """Write the time from this rank's request for an operation to its execution."""
        with self._lock:
            self._span(name, f"NEGOTIATE_{kind.upper()}", start, stop)

    def running(self, name: str, kind: str, activity: str, start: float, stop: float) -> None:
        """Write the execution of an operation; `activity` is the name of an inner span, or ""."""
        with self._lock:
            self._span(name, kind.upper(), start, stop)
            if activity:
                self._span(name, activity, start, stop)

    def cycle(self, at: float) -> None:
        """Write the start of a cycle, if `mark_cycles` is set."""
        if self.mark_cycles:
            with self._lock:
                self._add({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": self._micros(at)})

    def close(self) -> None:
        """Write the remaining events and the closing bracket. A second call does nothing."""
        with self._lock:
            if self._file is None:
                return
            if self._dropped:
                # Written beyond the limit, because it reports the limit.
                labels = {"labels": f"{self._dropped} more events were dropped"}
                line = {"name": "process_labels", "ph": "M", "pid": 0, "args": labels}
                self._waiting.append(f",\n{json.dumps(line)}")
            self._flush("\n]\n")
            if self._file is not None:
                self._file.close()
            self._file = None

    def _open(self, rank: int) -> None:
        try:
            self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (held open)
        except OSError as error:
            self._give_up(error)
            return
        began = {"name": f"rank {rank}", "start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._waiting.append("[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": began}))
        self._flush()

    def _span(self, name: str, what: str, start: float, stop: float) -> None:
        if self._file is None:
            return
        row = self._rows.get(name)
        if row is None and self._left > 0:
            row = self._rows[name] = 1 + len(self._rows)
            self._add({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
            self._add({"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}})
        length = round(1e6 * (stop - start), 3)
        self._add({"name": what, "ph": "X", "pid": row, "tid": 0, "ts": self._micros(start), "dur": length})

    def _micros(self, at: float) -> float:
        return round(1e6 * (at - self._zero), 3)

    def _add(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        if self._left <= 0:
            self._dropped += 1
            return
        self._left -= 1
        self._waiting.append(f",\n{json.dumps(line)}")
        if len(self._waiting) >= FLUSH_EVERY_EVENTS or self._now() - self._flushed > FLUSH_EVERY_S:
            self._flush()

    def _flush(self, end: str = "") -> None:
        # The comma is before each line: if the file is cut off, the earlier lines are complete.
        assert self._file is not None
        self._flushed = self._now()
        text = "".join(self._waiting) + end
        self._waiting.clear()
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "the timeline %s cannot be written: %s; training continues without it", self.path, error.strerror
        )
        if self._file is not None:
            with suppress(OSError):  # the remaining buffer cannot be written either
                self._file.close()
        self._file = None
