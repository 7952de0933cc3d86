"""Counts and times what the layers above report, and passes it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from syncline.events.base import Event, Sink

__all__ = ["Recorder"]


class Recorder:
    """Counters that only grow, points and spans that go to the sinks. With no sink it only counts.

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

    def count(self, key: str, amount: float = 1) -> None:
        """Add to a running total. Nothing is written: a sum is read when somebody asks."""
        with self._lock:
            self.totals[key] = self.totals.get(key, 0) + amount

    def point(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Write one event to every sink."""
        self._write(Event(key, value, self.clock(), "POINT_IN_TIME", metadata))

    @contextmanager
    def span(self, key: str, **metadata: Any) -> Iterator[None]:
        """Time a block: its seconds are added to the total of `key`, its two ends go to the sinks."""
        start = self.clock()
        if self.sinks:
            self._write(Event(key, None, start, "INTERVAL_START", metadata))
        try:
            yield
        finally:
            stop = self.clock()
            self.count(key, stop - start)
            if self.sinks:
                self._write(Event(key, stop - start, stop, "INTERVAL_END", metadata))

    def close(self) -> None:
        """Close every sink."""
        for sink in self.sinks:
            sink.close()

    def _write(self, event: Event) -> None:
        for sink in self.sinks:
            sink.write(event)
