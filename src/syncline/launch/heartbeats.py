"""Measures for how long each program has sent no heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from syncline.environment.heartbeats import LEFT

__all__ = ["HeartbeatMonitor", "State"]

State = Literal["stopped", "busy"]
"""The state of a process in the kernel: stopped by a signal, or running."""

MAX_GAP_S = 2.0
"""Largest time in seconds that counts between two checks: the launcher itself may have been suspended."""


class HeartbeatMonitor:
    """Counts the seconds in which a program's heartbeat number stays the same.

    A program that has no world yet, or has left its world, sends none. It counts as alive unless a signal has stopped
    it. So does one that computes: compiled code may keep the thread that sends the heartbeats from running.

    >>> watch = HeartbeatMonitor(lost_after=3.0)
    >>> [watch.look(now, {"rank 0": "7", "rank 1": str(now)}, dict) for now in (0.0, 2.0, 4.0)]
    [{}, {}, {'rank 0': 4.0}]
    """

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._looked: float | None = None
        self._signs: dict[str, str] = {}
        self._silent: dict[str, float] = {}

    def look(self, now: float, signs: Mapping[str, str], states: Callable[[], Mapping[str, State]]) -> dict[str, float]:
        """Check the latest heartbeat of each running program, "" for none. Returns the programs that were silent for
        too long, with the seconds.

        `states` is called only if a heartbeat is the same as before.
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
