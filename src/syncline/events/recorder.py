"""Events of a run: a recorder counts and times what the layers above report, and passes it to sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Recorder"]

Kind = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
"""The event types of MLPerf's mllog."""


@dataclass(frozen=True)
class RunEvent:
    """One event at `seconds` of the recorder's clock."""

    key: str
    value: Any
    seconds: float
    kind: Kind = "POINT_IN_TIME"
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """Receives events: the run log, a TensorBoard writer, a list in a test."""

    def write(self, event: RunEvent) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Counters that only grow, points and spans that go to the sinks. With no sink it only counts.

    Events may come from any thread: totals and sinks are guarded by `lock`, so a sink sees one event at a time. A
    sink must not report to the recorder that feeds it.

    >>> recorder = Recorder(clock=iter(range(100)).__next__)
    >>> recorder.count("sl_comm_bytes_wire", 512)
    >>> recorder.count("sl_comm_bytes_wire", 512)
    >>> with recorder.span("sl_comm_seconds"):
    ...     pass
    >>> recorder.totals
    {'sl_comm_bytes_wire': 1024, 'sl_comm_seconds': 1}
    """

    def __init__(
        self,
        clock: Callable[[], float],
        sinks: tuple[Sink, ...] = (),
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.clock = clock
        self.sinks = sinks
        self._lock = lock if lock is not None else nullcontext()
        self.totals: dict[str, float] = {}

    def add(self, sink: Sink) -> None:
        """Give this sink every event from now on."""
        with self._lock:
            self.sinks = (*self.sinks, sink)

    def remove(self, sink: Sink) -> None:
        """Give this sink no more events; it is left open. One that was never added is no error."""
        with self._lock:
            self.sinks = tuple(one for one in self.sinks if one is not sink)

    def count(self, key: str, amount: float = 1) -> None:
        """Add to a running total. Nothing is written to the sinks."""
        with self._lock:
            self._count(key, amount)

    def point(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Write one event to every sink."""
        self._record(key, value, "POINT_IN_TIME", metadata)

    def begin(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Write the start of an interval whose end has another key, such as `run_start` and `run_stop`."""
        self._record(key, value, "INTERVAL_START", metadata)

    def end(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Write the end of an interval that `begin` has started."""
        self._record(key, value, "INTERVAL_END", metadata)

    def interval(self, key: str, start: float, stop: float, **metadata: Any) -> None:
        """Record an interval after its end; both times are readings of this recorder's clock.

        >>> recorder = Recorder(clock=lambda: 0.0)
        >>> recorder.interval("sl_comm_seconds", 2.0, 2.5, lane="communication")
        >>> recorder.totals
        {'sl_comm_seconds': 0.5}
        """
        with self._lock:
            self._count(key, stop - start)
            if self.sinks:
                self._write(RunEvent(key, None, start, "INTERVAL_START", metadata))
                self._write(RunEvent(key, stop - start, stop, "INTERVAL_END", metadata))

    def span(self, key: str, **metadata: Any) -> AbstractContextManager[None]:
        """Measure a block: its seconds are added to the total of `key`, and both ends go to the sinks."""
        return _Span(self, key, metadata)

    def close(self) -> None:
        """Close every sink. Later events are only counted."""
        with self._lock:
            sinks, self.sinks = self.sinks, ()
        for sink in sinks:
            sink.close()

    def _record(self, key: str, value: Any, kind: Kind, metadata: dict[str, Any]) -> None:
        event = RunEvent(key, value, self.clock(), kind, metadata)
        with self._lock:
            self._write(event)

    def _count(self, key: str, amount: float) -> None:
        self.totals[key] = self.totals.get(key, 0) + amount

    def _write(self, event: RunEvent) -> None:
        for sink in self.sinks:
            sink.write(event)


class _Span:
    """A block that is measured. A class, because every step has several and generators take twice as long."""

    __slots__ = ("_key", "_metadata", "_recorder", "_start")

    def __init__(self, recorder: Recorder, key: str, metadata: dict[str, Any]) -> None:
        self._recorder = recorder
        self._key = key
        self._metadata = metadata

    def __enter__(self) -> None:
        recorder = self._recorder
        self._start = recorder.clock()
        if recorder.sinks:
            with recorder._lock:
                recorder._write(RunEvent(self._key, None, self._start, "INTERVAL_START", self._metadata))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recorder = self._recorder
        stop = recorder.clock()
        spent = stop - self._start
        with recorder._lock:
            recorder._count(self._key, spent)
            if recorder.sinks:
                recorder._write(RunEvent(self._key, spent, stop, "INTERVAL_END", self._metadata))
