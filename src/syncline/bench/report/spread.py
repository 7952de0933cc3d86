"""A few seeds as one number with an interval, and how that interval was made.

```text
seeds                            interval                                                        `kind`
six or more                      two order statistics, 95 % for the median, whatever the noise   "order"
three to five, all finite        Student's t on the logarithms, 95 % for the median if the       "student"
                                 logarithms are normal
fewer, or one that never came    the smallest and the largest: no confidence can be named        "range"
```

A run that failed or did not reach the target takes infinitely long: it is kept, and moves the median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from syncline.bench.stats import summarize

__all__ = ["Kind", "Spread", "spread"]

Kind = Literal["order", "student", "range"]

QUANTILES = {3: 4.3027, 4: 3.1824, 5: 2.7764}
"""97.5 % of Student's t, by the number of samples."""


@dataclass(frozen=True)
class Spread:
    """A median, an interval, and of what kind it is. `least` and `most` are samples."""

    median: float
    low: float
    high: float
    kind: Kind
    samples: int
    least: float
    most: float

    @property
    def finite(self) -> bool:
        """Whether the median is a number to compare."""
        return math.isfinite(self.median)

    @property
    def confident(self) -> bool:
        """Whether the interval has a confidence to its name."""
        return self.kind != "range"

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        edges = {name: factor * getattr(self, name) for name in ("median", "low", "high", "least", "most")}
        return replace(self, **edges)

    def told(self) -> str:
        """What the interval is, in words."""
        seeds = f"{self.samples} seed{'s' if self.samples != 1 else ''}"
        if self.kind == "order":
            return f"95 % interval of the median, {seeds}"
        return f"95 % t interval of the logarithm, {seeds}" if self.kind == "student" else f"range of {seeds}"


def spread(samples: Sequence[float], logarithmic: bool = True) -> Spread | None:
    """The samples as one; None where there are none. What is not a time or a ratio (an accuracy) has a range alone.

    >>> found = spread([2.0, 4.0, 8.0])
    >>> found.median, found.kind, round(found.low, 2), round(found.high, 2)
    (4.0, 'student', 0.71, 22.38)
    >>> spread([2.0, float("inf"), 3.0]).kind
    'range'
    >>> spread([5.0, 1.0, 4.0, 2.0, 3.0, float("inf")]).high
    inf
    """
    if not samples:
        return None
    summary = summarize(samples)
    least, most = min(samples), max(samples)
    median = summary.median
    low, high, kind = least, most, _kind(samples, logarithmic)
    if kind == "order" and summary.low is not None and summary.high is not None:
        low, high = summary.low, summary.high
    elif kind == "student":
        logs = [math.log(sample) for sample in samples]
        centre = statistics.fmean(logs)
        reach = QUANTILES[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
        # The geometric mean is in the middle of it; the median of so few may lie outside.
        low, high = min(median, math.exp(centre - reach)), max(median, math.exp(centre + reach))
    return Spread(median, low, high, kind, len(samples), least, most)


def _kind(samples: Sequence[float], logarithmic: bool) -> Kind:
    if len(samples) > max(QUANTILES):
        return "order"
    all_there = all(math.isfinite(sample) and sample > 0 for sample in samples)
    return "student" if logarithmic and len(samples) in QUANTILES and all_there else "range"
