"""Hunts over many seeds: every run of the tests tries a sample; with SYNCLINE_HUNT=1 it tries all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest

from syncline.testing.hunting import hunt_cases

HUNTING = bool(os.environ.get("SYNCLINE_HUNT"))
T = TypeVar("T")

only_hunting = pytest.mark.skipif(not HUNTING, reason="a long search, which SYNCLINE_HUNT=1 runs")


def seeds(sample: int, every: int = 1000) -> range:
    """The seeds to try: a sample, or all."""
    return range(every if HUNTING else sample)


def spread(cases: Sequence[T], sample: int) -> Sequence[T]:
    """All cases of an ordered table, or a sample of about this size with equal distances."""
    return cases if HUNTING else cases[:: -(-len(cases) // sample)]


def hunted(check: Callable[..., T], tried: Iterable[int], *drawn: str) -> list[T]:
    """The results of `check(*drawn, seed)` for each seed. The error of the first failure says how to replay it."""
    found: list[T] = []
    given = "".join(f"{each!r}, " for each in drawn)
    how = f"{check.__module__}.{check.__name__}({given}{{seed}})"
    hunt_cases(lambda seed: found.append(check(*drawn, seed)), tried, how)
    return found
