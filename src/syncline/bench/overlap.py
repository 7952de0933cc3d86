"""How much of the reductions lay inside backward, of what could have.

    backward        ├────────────────────────┤ end
    first bucket         ├── reduction ──┤
    second bucket                  ├────────── reduction ──┤
    could                ├───────────────────┤              from the first bucket on, as long as there was work
    did                  ├───────────────────┤              while a reduction was under way

The last bucket is ready only when backward is over; what lies behind the end could not lie inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from syncline.bench.stats import summarize
from syncline.events import Event
from syncline.world import World

__all__ = ["Overlap", "inside"]

Span = tuple[float, float]


class Overlap:
    """Watches steps by the events that the exchange reports."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        """Of each step: seconds that could lie inside backward, and those that did."""

    @contextmanager
    def watching(self, world: World) -> Iterator[None]:
        """Note one step."""
        sink = _Spans()
        world.events.add(sink)
        try:
            yield
        finally:
            world.events.remove(sink)
        if sink.waits and sink.reductions:
            self.steps.append(inside(sink.reductions, end=sink.waits[-1][0]))

    def summary(self) -> dict[str, Any]:
        """Medians over the steps; the share is that of all seconds together."""
        could = sum(step[0] for step in self.steps)
        did = sum(step[1] for step in self.steps)
        if not self.steps or could <= 0:
            return {"steps": len(self.steps), "share": None}
        return {
            "steps": len(self.steps),
            "could_seconds": summarize([step[0] for step in self.steps]).median,
            "did_seconds": summarize([step[1] for step in self.steps]).median,
            "share": did / could,
        }


def inside(reductions: Sequence[Span], end: float) -> tuple[float, float]:
    """Seconds of reduction that could lie before `end`, and those that did.

    >>> inside([(1.0, 2.0), (2.5, 6.0)], end=4.0)
    (3.0, 2.5)
    """
    early = [span for span in reductions if span[0] < end]
    if not early:
        return 0.0, 0.0
    window = end - min(span[0] for span in early)
    did = _covered([(start, min(stop, end)) for start, stop in early])
    return min(window, _covered(early)), did


def _covered(spans: Sequence[Span]) -> float:
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


class _Spans:
    """A sink that keeps the spans of one step."""

    def __init__(self) -> None:
        self.reductions: list[Span] = []
        self.waits: list[Span] = []

    def write(self, event: Event) -> None:
        if event.kind == "INTERVAL_END":
            span = (event.seconds - event.value, event.seconds)
            if event.key == "sl_comm_seconds":
                self.reductions.append(span)
            elif event.key == "sl_comm_exposed_seconds":
                self.waits.append(span)

    def close(self) -> None:
        return
