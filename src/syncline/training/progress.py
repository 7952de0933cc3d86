"""How a run is getting on, for people: one line that rewrites itself on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

__all__ = ["Moment", "Progress", "Silent", "Speedometer", "Speeds", "duration"]

WINDOW = 5.0
"""Seconds of training over which speeds are taken."""
TERMINAL = 0.1
PLAIN = 10.0
"""Seconds between lines."""
ERASE = "\r\x1b[K"


@dataclass(frozen=True)
class Speeds:
    """What the run does in a second of training, all ranks together."""

    samples: float = 0.0
    bytes: float = 0.0
    """On the wire, sent by rank 0."""
    exposed: float = 0.0
    """The share of training time in which rank 0 waits for communication."""


class Speedometer:
    """Speeds over the last seconds of training, from readings of counters that only grow.

    >>> meter = Speedometer()
    >>> meter.read(seconds=0.0, samples=0, sent=0, exposed=0.0)
    Speeds(samples=0.0, bytes=0.0, exposed=0.0)
    >>> meter.read(seconds=2.0, samples=640, sent=4_000_000, exposed=0.5)
    Speeds(samples=320.0, bytes=2000000.0, exposed=0.25)
    """

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._readings: deque[tuple[float, float, float, float]] = deque()

    def read(self, seconds: float, samples: float, sent: float, exposed: float) -> Speeds:
        """Take a reading; the speeds since the oldest one in the window."""
        self._readings.append((seconds, samples, sent, exposed))
        while len(self._readings) > 2 and seconds - self._readings[1][0] >= self._window:
            self._readings.popleft()
        oldest = self._readings[0]
        passed = seconds - oldest[0]
        if passed <= 0:
            return Speeds()
        return Speeds((samples - oldest[1]) / passed, (sent - oldest[2]) / passed, (exposed - oldest[3]) / passed)


@dataclass(frozen=True)
class Moment:
    """Where a run stands."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    speeds: Speeds
    left: float
    """Seconds, as far as can be told."""

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}/{self.epochs}  step {self.step}/{self.steps}  loss {self.loss:.4g}  "
            f"{_short(self.speeds.samples).rstrip()} samples/s  {_short(self.speeds.bytes)}B/s  "
            f"{100 * self.speeds.exposed:.0f} % exposed  {duration(self.left)} left"
        )


class Progress:
    """Shows moments, not too many of them, and lines that stay.

    >>> import sys
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
        """Whether it is time to show another moment."""
        return self._clock() - self._shown >= (TERMINAL if self._terminal else PLAIN)

    def show(self, moment: Moment) -> None:
        """Rewrite the line, or write one more where lines cannot be rewritten."""
        self._shown = self._clock()
        text = str(moment)
        if self._terminal:
            # A line that is wider than the terminal is not rewritten but scrolls.
            self._put(ERASE + (text[: self._width - 1] if self._width > 1 else text))
            self._open = True
        else:
            self._put(text + "\n")

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self._put(f"{ERASE if self._open else ''}{line}\n")
        self._open = False

    def close(self) -> None:
        """Leave no half line behind."""
        if self._open:
            self._put(ERASE)
            self._open = False

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Silent(Progress):
    """Shows nothing: every rank but the first, and simulations."""

    def __init__(self) -> None:
        pass

    def due(self) -> bool:
        return False

    def show(self, moment: Moment) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


def duration(seconds: float) -> str:
    """Seconds for people.

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
