"""Texts with units: rates, sizes, durations and prices. Nothing is guessed: a number without a unit is refused."""

from __future__ import annotations

import math
import re

from syncline.errors import SpecError

__all__ = ["format_duration", "format_size", "read_duration", "read_rate", "read_size"]

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
BINARY_PREFIXES = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
NUMBER = re.compile(r"\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*(.*?)\s*", re.IGNORECASE)
DURATIONS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "hour": 3600.0}


def read_rate(text: str, what: str = "the rate") -> float:
    """Bytes per second of a rate in bits, such as 100gbit, or in bytes, such as 12.5GB/s.

    >>> read_rate("100gbit"), read_rate("12.5 GB/s")
    (12500000000.0, 12500000000.0)
    >>> read_rate("100gb")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: the rate is '100gb': 100gbit counts bits, 100GB/s counts bytes; write one of them
    """
    amount, unit = _split(text, what, "write 100gbit or 12.5GB/s")
    plain = unit.lower().removesuffix("/s")
    for suffix, share in (("bits", 1 / 8), ("bit", 1 / 8), ("bps", 1 / 8)):
        if plain.endswith(suffix) and plain.removesuffix(suffix) in PREFIXES:
            return amount * PREFIXES[plain.removesuffix(suffix)] * share
    if unit.endswith("B/s") and (factor := _prefix(plain.removesuffix("b"))) is not None:
        return amount * factor
    if plain.endswith("b") and _prefix(plain.removesuffix("b")) is not None:
        number, prefix = text.strip()[: -len(unit)].strip(), unit.removesuffix("/s")[:-1]
        raise SpecError(
            f"{what} is {text!r}: {number}{prefix}bit counts bits, {number}{prefix.upper()}B/s counts bytes; "
            "write one of them"
        )
    raise SpecError(f"{what} is {text!r}, and {unit!r} is no unit of a rate: write 100gbit or 12.5GB/s")


def read_size(text: str, what: str = "the size") -> float:
    """Bytes of a size such as 80GB or 80GiB.

    >>> read_size("80GB"), read_size("1 GiB")
    (80000000000.0, 1073741824.0)
    """
    amount, unit = _split(text, what, "write 80GB or 80GiB")
    factor = _prefix(unit.lower().removesuffix("b")) if unit.endswith("B") else None
    if factor is None:
        raise SpecError(f"{what} is {text!r}, and {unit!r} is no unit of a size: write 80GB or 80GiB")
    return amount * factor


def read_duration(text: str, what: str = "the duration") -> float:
    """Seconds of a duration such as 5us, 20ms or 1.5h. 0s is allowed.

    >>> read_duration("20 ms")
    0.02
    """
    amount, unit = _split(text, what, "write 5us, 20ms or 2s", positive=False)
    if unit not in DURATIONS:
        raise SpecError(f"{what} is {text!r}, and {unit!r} is no unit of time: write 5us, 20ms or 2s")
    return amount * DURATIONS[unit]


def format_size(nbytes: float) -> str:
    """Bytes in GB, or in MB and kB if they are few.

    >>> format_size(12.34e9), format_size(3e12), format_size(5e5)
    ('12.3 GB', '3 TB', '500 kB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def format_duration(seconds: float) -> str:
    """Seconds with three digits, in a unit that suits them.

    >>> format_duration(0.0123), format_duration(7200.0), format_duration(3.2e6)
    ('12.3 ms', '2 h', '37 days')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit, factor, limit in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 72 * 3600.0)):
        if seconds < limit:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


def _prefix(text: str) -> float | None:
    return PREFIXES.get(text, BINARY_PREFIXES.get(text))


def _split(text: str, what: str, form: str, *, positive: bool = True) -> tuple[float, str]:
    """The number and the unit of a text."""
    match = NUMBER.fullmatch(text) if isinstance(text, str) else None
    try:
        amount = float(match[1]) if match else math.nan
    except ValueError:
        amount = math.nan
    if match is None or math.isnan(amount):
        raise SpecError(f"{what} is {text!r}, not a number with a unit: {form}")
    if not (0 < amount < math.inf or (amount == 0 and not positive)):
        raise SpecError(f"{what} is {text!r}; it must be {'above 0' if positive else 'at least 0'} and finite")
    if not match[2]:
        raise SpecError(f"{what} is {text!r}, without a unit: {form}")
    return amount, match[2]
