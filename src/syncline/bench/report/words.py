"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from syncline.bench.report.spread import Spread

__all__ = ["bytes_told", "edges", "number", "seconds_told", "time_unit"]


def number(value: float | None, digits: int = 4) -> str:
    """As many digits as are worth reading; a dash for nothing.

    >>> number(0.95), number(12345.678), number(None), number(float("inf"))
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
    """How many of a unit a second has, and its name, so that the smallest of these still shows.

    >>> time_unit([0.012, 3.0])
    (1000.0, 'ms')
    """
    known = [value for value in seconds if math.isfinite(value) and value > 0]
    least = min(known, default=1.0)
    if least < 1e-3:
        return 1e6, "µs"
    return (1e3, "ms") if least < 0.5 else (1.0, "s")


def seconds_told(time: Spread) -> str:
    """A median with its interval, in a unit that suits it.

    >>> from syncline.bench.report.spread import spread
    >>> seconds_told(spread([12.0, 12.3, float("inf")]))
    '12.3 s [12, ∞]'
    """
    factor, unit = time_unit([time.median])
    told = time.scaled(factor)
    if told.samples == 1:
        return f"{number(told.median, 3)} {unit}"
    return f"{number(told.median, 3)} {unit}{edges(told)}"


def edges(told: Spread) -> str:
    """The interval in brackets; nothing where it is as narrow as the digits.

    >>> from syncline.bench.report.spread import spread
    >>> edges(spread([1.0, 2.0])), edges(spread([2.0, 2.0, 2.0]))
    (' [1, 2]', '')
    """
    low, high = number(told.low, 3), number(told.high, 3)
    return "" if low == high == number(told.median, 3) else f" [{low}, {high}]"


def bytes_told(count: float) -> str:
    """In powers of a thousand.

    >>> bytes_told(12_300_000), bytes_told(700)
    ('12.3 MB', '700 B')
    """
    if not math.isfinite(count):
        return number(count)
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{number(count / size, 3)} {unit}"
    return f"{number(count, 3)} B"
