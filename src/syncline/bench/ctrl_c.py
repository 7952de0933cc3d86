"""Ctrl-C in a worker: a wish first, an order the second time."""

from __future__ import annotations

import signal
import time
from types import FrameType

__all__ = ["INTERRUPTED", "CtrlC"]

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of what Ctrl-C has ended."""

SAME_KEY = 0.5
"""A second Ctrl-C within so many seconds is the first one again: terminal and supervisor both send it."""


class CtrlC:
    """The first one asks the run to stop after a step; another one ends it at once."""

    def __init__(self) -> None:
        self._first: float | None = None
        signal.signal(signal.SIGINT, self._note)

    def __call__(self) -> bool:
        return self._first is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > SAME_KEY:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first
