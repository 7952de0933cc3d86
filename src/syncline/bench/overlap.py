"""How much of the reductions lay inside backward, of what could have.

What a bucket's reduction takes alone is measured first, in steps that only reduce. From the moment at which each bucket
was ready follows what could lie inside backward, if the network did one after the other with nothing in between; what
did is the part of each reduction that was over by the end of backward::

    backward      ├──────────────────────────────┤ end
    ready              0              1          2            the last bucket is ready at the end: it cannot
    ideal              ├─ 0 ─┤        ├──── 1 ───┼───┤        could: all of 0, most of 1
    measured           ├── 0 ──┤      ├───── 1 ──┼──────┤     did:   all of 0, less of 1
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from syncline.bench.stats import summarize
from syncline.events import RunEvent
from syncline.strategies import Run, strategy_run
from syncline.world import World

__all__ = ["Overlap", "inside"]

Spans = Mapping[str, tuple[float, float]]
ALONE = 10


class Overlap:
    """Watches steps by the events that the exchange reports."""

    def __init__(self) -> None:
        self.alone: dict[str, float] = {}
        """Seconds that each bucket's reduction takes where nothing else happens."""
        self.steps: list[tuple[float, float]] = []
        """Of each step: seconds of reduction that could lie inside backward, and those that did."""

    def measure_alone(self, world: World, run: Run) -> None:
        """Reduce without computing. Every rank calls it."""
        found: dict[str, list[float]] = {}
        for _ in range(ALONE):
            with _spans(world) as sink:
                strategy_run(run).join_idle()
            until = float("-inf")
            for what, (start, stop) in sorted(sink.reductions.items(), key=lambda item: item[1]):
                found.setdefault(what, []).append(max(0.0, stop - max(start, until)))
                until = max(until, stop)
        self.alone = {what: statistics.median(seconds) for what, seconds in found.items()}

    @contextmanager
    def watching(self, world: World) -> Iterator[None]:
        """Note one step."""
        with _spans(world) as sink:
            yield
        if sink.end is not None and sink.reductions:
            self.steps.append(inside(sink.reductions, self.alone, sink.end))

    def summary(self) -> dict[str, Any]:
        """Medians over the steps; the share is that of all seconds together."""
        could = sum(step[0] for step in self.steps)
        did = sum(step[1] for step in self.steps)
        if not self.steps or could <= 0:
            return {"steps": len(self.steps), "share": None}
        return {
            "steps": len(self.steps),
            "alone_seconds": sum(self.alone.values()),
            "could_seconds": summarize([step[0] for step in self.steps]).median,
            "did_seconds": summarize([step[1] for step in self.steps]).median,
            "share": did / could,
        }


def inside(reductions: Spans, alone: Mapping[str, float], end: float) -> tuple[float, float]:
    """Seconds of reduction that could lie before `end`, and those that did.

    >>> inside({"a": (1.0, 2.5), "b": (3.0, 7.0)}, {"a": 1.0, "b": 2.0}, end=4.0)
    (2.0, 1.5)
    """
    could = did = 0.0
    free = float("-inf")
    for what, (start, stop) in sorted(reductions.items(), key=lambda item: item[1]):
        seconds = alone.get(what, stop - start)
        begin = max(start, free)
        free = begin + seconds
        could += max(0.0, min(free, end) - min(begin, end))
        over = (min(stop, end) - min(start, end)) / (stop - start) if stop > start else float(stop <= end)
        did += seconds * over
    return could, min(did, could)


class _Spans:
    """A sink that keeps the spans of one step."""

    def __init__(self) -> None:
        self.reductions: dict[str, tuple[float, float]] = {}
        self.end: float | None = None
        """When backward was over, and the rank began to wait."""

    def write(self, event: RunEvent) -> None:
        if event.kind == "INTERVAL_END":
            if event.key == "sl_comm_seconds":
                self.reductions[str(event.metadata.get("what"))] = (event.seconds - event.value, event.seconds)
            elif event.key == "sl_comm_exposed_seconds":
                self.end = event.seconds - event.value

    def close(self) -> None:
        return


@contextmanager
def _spans(world: World) -> Iterator[_Spans]:
    sink = _Spans()
    world.events.add(sink)
    try:
        yield sink
    finally:
        world.events.remove(sink)
