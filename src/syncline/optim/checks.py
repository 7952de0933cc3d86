"""Arguments that must be numbers of a certain kind: refused by name, with the value that came."""

from __future__ import annotations

import math

from syncline.errors import SpecError

__all__ = ["count", "fraction", "not_negative", "positive"]


def positive(name: str, value: float) -> float:
    """A finite number above zero.

    >>> positive("rate", 0.1)
    0.1
    """
    if not (_is_number(value) and value > 0):
        raise SpecError(f"{name} must be a finite number above 0, not {value!r}")
    return float(value)


def not_negative(name: str, value: float) -> float:
    """A finite number, zero or more.

    >>> not_negative("weight_decay", 0)
    0.0
    """
    if not (_is_number(value) and value >= 0):
        raise SpecError(f"{name} must be a finite number, 0 or more, not {value!r}")
    return float(value)


def fraction(name: str, value: float, *, below_one: bool = False) -> float:
    """A number from 0 to 1, or up to but not 1.

    >>> fraction("momentum", 0.9, below_one=True)
    0.9
    """
    if not (_is_number(value) and 0 <= value <= 1) or (below_one and value == 1):
        raise SpecError(f"{name} must lie between 0 and 1{' and be less than 1' * below_one}, not {value!r}")
    return float(value)


def count(name: str, value: int) -> int:
    """A whole number, one or more.

    >>> count("steps", 500)
    500
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{name} must be a whole number, 1 or more, not {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
