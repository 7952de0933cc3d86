"""Arguments of workloads, checked when they are built."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from syncline.errors import SpecError
from syncline.specs import nearest

__all__ = ["check_choice", "check_number", "check_whole"]


def check_choice(workload: str, argument: str, value: Any, known: Iterable[str]) -> str:
    """One of the known words.

    >>> check_choice("digits", "model", "cn", ["mlp", "cnn"])
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: digits: unknown model 'cn'; did you mean 'cnn'? available: 'cnn', 'mlp'
    """
    names = list(known)
    if value not in names:
        raise SpecError(f"{workload}: unknown {argument} {value!r}; {nearest(str(value), names)}")
    return str(value)


def check_whole(workload: str, argument: str, value: Any, least: int, most: int) -> int:
    """A whole number in a range, both ends included."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SpecError(f"{workload}: {argument} is a whole number from {least:,} to {most:,} ({argument}: {value!r})")
    return value


def check_number(workload: str, argument: str, value: Any, least: float, most: float) -> float:
    """A finite number in a range, both ends included."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not least <= value <= most:
        raise SpecError(f"{workload}: {argument} is a number from {least:g} to {most:g} ({argument}: {value!r})")
    return float(value)
