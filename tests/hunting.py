"""Hunts over many seeds: a sample with every run of the tests, all of them with SYNCLINE_HUNT=1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

from syncline.testing.hunting import hunt_cases

HUNTING = bool(os.environ.get("SYNCLINE_HUNT"))
T = TypeVar("T")

only_hunting = pytest.mark.skipif(not HUNTING, reason="a longer look at what others prove: SYNCLINE_HUNT=1 runs it")


def seeds(sample: int, every: int = 1000) -> range:
    """Those to try: a sample, or every one."""
    return range(every if HUNTING else sample)


def hunted(check: Callable[..., T], tried: Iterable[int], *drawn: str) -> list[T]:
    """What `check(*drawn, seed)` gave for each seed; the first that raises says how to replay it."""
    found: list[T] = []
    given = "".join(f"{each!r}, " for each in drawn)
    how = f"{check.__module__}.{check.__name__}({given}{{seed}})"
    hunt_cases(lambda seed: found.append(check(*drawn, seed)), tried, how)
    return found
