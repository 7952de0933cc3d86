"""Medians with intervals that assume nothing about the noise.

The k-th smallest of n samples lies below the true median with a probability that only counts coin flips, so a pair of
order statistics is an interval for the median whatever the distribution (Hoefler and Belli 2015, rule 5 and 6).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Summary", "ratios", "summarize"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """A median and the interval that holds the true one with 95 % confidence; None where samples are too few."""

    median: float
    low: float | None
    high: float | None
    samples: int

    @property
    def worse_than_equal(self) -> bool:
        """Of a ratio: whether it is above 1 beyond doubt."""
        return self.low is not None and self.low > 1

    def scaled(self, factor: float) -> Summary:
        """In another unit."""
        low, high = (None if edge is None else factor * edge for edge in (self.low, self.high))
        return Summary(factor * self.median, low, high, self.samples)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.median:.3g} (n={self.samples})"
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def summarize(samples: Sequence[float]) -> Summary:
    """The median and its interval.

    >>> summarize([5, 1, 4, 2, 3, 7, 6, 9, 8])
    Summary(median=5, low=2, high=8, samples=9)
    >>> summarize([1, 2, 3]).low is None
    True
    """
    ordered = sorted(samples)
    count = len(ordered)
    if not count:
        raise ValueError("there is no median of no samples")
    below = _trimmed(count)
    low, high = (ordered[below], ordered[count - 1 - below]) if below is not None else (None, None)
    return Summary(statistics.median(ordered), low, high, count)


def _trimmed(count: int) -> int | None:
    """How many samples to leave out on each side; None when even the extremes do not make 95 %."""
    tail, found = 0.0, None
    for left_out in range(count // 2):
        tail += math.comb(count, left_out) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        found = left_out
    return found


def ratios(samples: Sequence[float], baseline: Sequence[float]) -> Summary:
    """The median of the ratios of samples taken side by side: what shook both is shared and cancels.

    >>> ratios([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]).median
    2.0
    """
    return summarize([a / b for a, b in zip(samples, baseline, strict=True)])
