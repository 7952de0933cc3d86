"""Numbers, times and sizes as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable

from syncline.bench.report.analysis import Spread

__all__ = ["bytes_phrase", "interval_phrase", "number_phrase", "seconds_phrase", "time_unit"]


def number_phrase(value: float | None, digits: int = 4) -> str:
    """A number with few digits; a dash for None and NaN.

    >>> number_phrase(0.95), number_phrase(12345.678), number_phrase(None), number_phrase(float("inf"))
    ('0.95', '12350', '–', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and abs(value) >= 10 ** (digits - 1):
        return f"{round(value, digits - 1 - math.floor(math.log10(abs(value)))):.0f}"
    return f"{value:.{digits}g}"


def time_unit(seconds: Iterable[float]) -> tuple[float, str]:
    """A unit in which the smallest of these times has visible digits: units per second, and its name.

    >>> time_unit([0.012, 3.0])
    (1000.0, 'ms')
    """
    known = [value for value in seconds if math.isfinite(value) and value > 0]
    least = min(known, default=1.0)
    if least < 1e-3:
        return 1e6, "µs"
    return (1e3, "ms") if least < 0.5 else (1.0, "s")


def seconds_phrase(time: Spread) -> str:
    """A median with its interval, in a suitable unit.

    >>> from syncline.bench.report.analysis import spread
    >>> seconds_phrase(spread([12.0, 12.3, float("inf")]))
    '12.3 s [12, ∞]'
    """
    factor, unit = time_unit([time.median])
    scaled = time.scaled(factor)
    interval = "" if scaled.samples == 1 else interval_phrase(scaled)
    return f"{number_phrase(scaled.median, 3)} {unit}{interval}"


def interval_phrase(interval: Spread) -> str:
    """The interval in brackets; empty if all its digits are equal.

    >>> from syncline.bench.report.analysis import spread
    >>> interval_phrase(spread([1.0, 2.0])), interval_phrase(spread([2.0, 2.0, 2.0]))
    (' [1, 2]', '')
    """
    low, high = number_phrase(interval.low, 3), number_phrase(interval.high, 3)
    return "" if low == high == number_phrase(interval.median, 3) else f" [{low}, {high}]"


def bytes_phrase(count: float) -> str:
    """A number of bytes, with decimal prefixes.

    >>> bytes_phrase(12_300_000), bytes_phrase(700)
    ('12.3 MB', '700 B')
    """
    if not math.isfinite(count):
        return number_phrase(count)
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{number_phrase(count / size, 3)} {unit}"
    return f"{number_phrase(count, 3)} B"
