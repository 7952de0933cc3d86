"""For how long each program has given no sign of life."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from syncline.transports.store import LEFT

__all__ = ["SilenceWatch", "State"]

State = Literal["stopped", "busy"]
"""What the kernel tells of a process: stopped by a signal, or running."""

MAX_GAP_S = 2.0
"""Seconds that count at most between two looks: while the launcher itself is held up, nobody is silent."""


class SilenceWatch:
    """Counts the seconds in which a program's sign of life stays the same.

    A program that has no world yet, or has left its world, gives none: it is taken for alive unless it is stopped. So
    is one that computes: compiled code that does not let other threads run keeps its signs back.

    >>> watch = SilenceWatch(lost_after=3.0)
    >>> [watch.look(now, {"rank 0": "7", "rank 1": str(now)}, dict) for now in (0.0, 2.0, 4.0)]
    [{}, {}, {'rank 0': 4.0}]
    """

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._looked: float | None = None
        self._signs: dict[str, str] = {}
        self._silent: dict[str, float] = {}

    def look(self, now: float, signs: Mapping[str, str], states: Callable[[], Mapping[str, State]]) -> dict[str, float]:
        """Take in the latest sign of each program that runs, "" for none; who was silent for too long, and how long.

        `states` is asked only where a sign is the same as before.
        """
        gap = 0.0 if self._looked is None else min(now - self._looked, MAX_GAP_S)
        self._looked = now
        same = [name for name, sign in signs.items() if self._signs.get(name) == sign]
        found = states() if same else {}
        for name, sign in signs.items():
            owes = sign not in ("", LEFT) or found.get(name) == "stopped"
            silent = name in same and owes and found.get(name) != "busy"
            self._silent[name] = self._silent.get(name, 0.0) + gap if silent else 0.0
            self._signs[name] = sign
        return {name: self._silent[name] for name in signs if self._silent[name] > self._lost_after}
