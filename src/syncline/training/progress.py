"""Progress on the terminal: one line that is rewritten, or a line every few seconds if the output is not a terminal."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

__all__ = ["NoProgress", "Progress", "ProgressReport", "SpeedMeter", "Speeds", "duration"]

SPEED_WINDOW_S = 5.0
"""Seconds of training over which speeds are averaged."""
TERMINAL_EVERY_S = 0.1
PLAIN_EVERY_S = 10.0
"""Interval between two lines if the output is not a terminal."""
ERASE_LINE = "\r\x1b[K"


@dataclass(frozen=True)
class Speeds:
    """Rates per second of training, of all ranks together."""

    samples: float = 0.0
    bytes: float = 0.0
    """Bytes that rank 0 sends."""
    exposed: float = 0.0
    """The share of training time in which rank 0 waits for communication."""


class SpeedMeter:
    """Speeds over the last seconds of training, from readings of counters that only grow.

    >>> meter = SpeedMeter()
    >>> meter.read(seconds=0.0, samples=0, sent=0, exposed=0.0)
    Speeds(samples=0.0, bytes=0.0, exposed=0.0)
    >>> meter.read(seconds=2.0, samples=640, sent=4_000_000, exposed=0.5)
    Speeds(samples=320.0, bytes=2000000.0, exposed=0.25)
    """

    def __init__(self, window: float = SPEED_WINDOW_S) -> None:
        self._window = window
        self._readings: deque[tuple[float, float, float, float]] = deque()

    def read(self, seconds: float, samples: float, sent: float, exposed: float) -> Speeds:
        """Add a reading. Returns the speeds since the oldest reading in the window."""
        self._readings.append((seconds, samples, sent, exposed))
        while len(self._readings) > 2 and seconds - self._readings[1][0] >= self._window:
            self._readings.popleft()
        oldest = self._readings[0]
        passed = seconds - oldest[0]
        if passed <= 0:
            return Speeds()
        return Speeds((samples - oldest[1]) / passed, (sent - oldest[2]) / passed, (exposed - oldest[3]) / passed)


@dataclass(frozen=True)
class ProgressReport:
    """How far a run is, and how fast."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    speeds: Speeds
    left: float
    """Estimated seconds until the end."""

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}/{self.epochs}  step {self.step}/{self.steps}  loss {self.loss:.4g}  "
            f"{_short(self.speeds.samples).rstrip()} samples/s  {_short(self.speeds.bytes)}B/s  "
            f"{100 * self.speeds.exposed:.0f} % exposed  {duration(self.left)} left"
        )


class Progress:
    """Shows reports at intervals, and lines that stay.

    >>> progress = Progress(sys.stdout, clock=lambda: 0.0, terminal=False)
    >>> progress.say("epoch 1: validation accuracy 0.91")
    epoch 1: validation accuracy 0.91
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float], terminal: bool, width: int = 0) -> None:
        self._stream = stream
        self._clock = clock
        self._terminal = terminal
        self._width = width
        self._shown = clock()
        self._open = False

    def due(self) -> bool:
        """Whether it is time to show another report."""
        return self._clock() - self._shown >= (TERMINAL_EVERY_S if self._terminal else PLAIN_EVERY_S)

    def show(self, report: ProgressReport) -> None:
        """Rewrite the line; write a new one if the output is not a terminal."""
        self._shown = self._clock()
        text = str(report)
        if self._terminal:
            # A line wider than the terminal would scroll.
            self._put(ERASE_LINE + (text[: self._width - 1] if self._width > 1 else text))
            self._open = True
        else:
            self._put(text + "\n")

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self._put(f"{ERASE_LINE if self._open else ''}{line}\n")
        self._open = False

    def close(self) -> None:
        """Remove the line that is being rewritten."""
        if self._open:
            self._put(ERASE_LINE)
            self._open = False

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class NoProgress(Progress):
    """Shows nothing: for ranks other than 0, and for simulations."""

    def __init__(self) -> None:
        super().__init__(sys.stdout, clock=lambda: 0.0, terminal=False)  # its time stands still, so no report is due

    def _put(self, text: str) -> None:
        pass


def duration(seconds: float) -> str:
    """Format seconds.

    >>> duration(9.25), duration(75), duration(3725)
    ('9.2 s', '1:15', '1:02:05')
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _short(number: float) -> str:
    """
    >>> _short(12.4), _short(12_400), _short(3_100_000)
    ('12.4 ', '12.4 k', '3.1 M')
    """
    for unit in ("", "k", "M"):
        if abs(number) < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} G"
