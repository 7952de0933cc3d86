"""Signals that stop a worker: the first Ctrl-C after the current step, the second at once."""

from __future__ import annotations

import signal
import time
from types import FrameType

__all__ = ["INTERRUPTED_EXIT_CODE", "StopSignals"]

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""

SAME_CTRL_C_S = 0.5
"""A second SIGINT within this time is the same Ctrl-C: both the terminal and the supervisor send it."""


class StopSignals:
    """Calling it returns whether the run must stop after the current step. A second Ctrl-C raises at once.

    With `terminated`, SIGTERM also stops the run after a step, and may come several times: batch systems send it to
    every process.
    """

    def __init__(self, terminated: bool = False) -> None:
        self._first: float | None = None
        self._terminated = False
        signal.signal(signal.SIGINT, self._on_sigint)
        if terminated:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def __call__(self) -> bool:
        return self._terminated or self._first is not None

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > SAME_CTRL_C_S:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first
