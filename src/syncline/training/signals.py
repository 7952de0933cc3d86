"""Signals that ask a worker to stop: the first Ctrl-C stops it after a step, the second at once."""

from __future__ import annotations

import signal
import time
from types import FrameType

__all__ = ["INTERRUPTED_EXIT_CODE", "StopSignals"]

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
"""The exit code of what Ctrl-C has ended."""

SAME_KEY = 0.5
"""A second Ctrl-C within so many seconds is the first one again: terminal and supervisor both send it."""


class StopSignals:
    """The first one asks the run to stop after a step; another one ends it at once.

    With `terminated` SIGTERM also asks it to stop after a step, however often it comes: batch systems send it to
    every process.
    """

    def __init__(self, terminated: bool = False) -> None:
        self._first: float | None = None
        self._terminated = False
        signal.signal(signal.SIGINT, self._note)
        if terminated:
            signal.signal(signal.SIGTERM, self._note_end)

    def __call__(self) -> bool:
        return self._terminated or self._first is not None

    def _note_end(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > SAME_KEY:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first
