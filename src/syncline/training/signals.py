"""Signals that stop a worker: the first Ctrl-C after the current step, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

from syncline.environment.base import LEFT_CODE

if TYPE_CHECKING:
    from syncline.world import World  # it imports torch, and the help of commands must not

__all__ = ["INTERRUPTED_EXIT_CODE", "StopSignals", "leave_on_signals"]

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What batch systems send before they end a process: SIGTERM, or with Slurm's `--signal=USR1@60` SIGUSR1."""

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""

SAME_PREEMPTION_S = 1.0
"""A second signal within this time is the same preemption: the batch system and the launcher both send it."""
SAME_CTRL_C_S = 0.5
"""A second SIGINT within this time is the same Ctrl-C: both the terminal and the supervisor send it."""


class StopSignals:
    """Calling it returns whether the run must stop after the current step. A second Ctrl-C raises at once.

    With `terminated`, SIGTERM and SIGUSR1 also stop the run after a step, and may come several times: batch systems
    send them to every process.
    """

    def __init__(self, terminated: bool = False) -> None:
        self._first: float | None = None
        self._terminated = False
        signal.signal(signal.SIGINT, self._on_sigint)
        if terminated:
            for number in PREEMPTION_SIGNALS:
                signal.signal(number, self._on_sigterm)

    def __call__(self) -> bool:
        return self._terminated or self._first is not None

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > SAME_CTRL_C_S:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first


def leave_on_signals(world: World) -> None:
    """In an elastic job: the first SIGTERM or SIGUSR1 makes this worker leave after a step, a later one ends it.

    A handler of the script stays in place. Outside of the main thread nothing changes.
    """
    elastic = world.elastic
    if elastic is None or world.transport.timing.virtual:
        return

    first: float | None = None

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is not None and now - first > SAME_PREEMPTION_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first = now if first is None else first
        elastic.leave_reason = f"it received {signal.Signals(number).name}"
        if elastic.joining:  # no step follows
            raise SystemExit(LEFT_CODE)

    for number in PREEMPTION_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # another thread than the main one
                signal.signal(number, leave)
