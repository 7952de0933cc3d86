"""What all benchmarks share: medians with intervals, sizes as text, a quiet machine, and figures on disk.

The intervals need no assumption about the noise. The number of samples below the true median is binomial, so a pair
of order statistics is an interval for the median of any distribution (Hoefler and Belli 2015, rules 5 and 6).
"""

from __future__ import annotations

import gc
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from syncline.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    from syncline.collectives.channel import Channel

__all__ = [
    "Summary",
    "check_options",
    "describe_place",
    "format_size",
    "new_figure",
    "over_ranks",
    "parse_size",
    "parse_sizes",
    "quiet_machine",
    "ratios",
    "save_figure",
    "summarize",
]

CONFIDENCE = 0.95


def check_options(**options: int) -> None:
    """Refuse options of a benchmark that are below 1.

    >>> check_options(turns=0)
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: --turns 0: at least 1
    """
    for option, number in options.items():
        if number < 1:
            raise SpecError(f"--{option} {number}: at least 1")


@dataclass(frozen=True)
class Summary:
    """A median and its 95 % confidence interval; None if there are too few samples."""

    median: float
    low: float | None
    high: float | None
    samples: int

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        low, high = (None if edge is None else factor * edge for edge in (self.low, self.high))
        return Summary(factor * self.median, low, high, self.samples)

    def text(self, style: str) -> str:
        """Median and interval, each in a format such as ".3g"; the number of samples if there is no interval."""
        interval = self.interval(style)
        return f"{self.median:{style}} {interval if self.low is not None else f'({interval})'}"

    def interval(self, style: str) -> str:
        """Only the interval, or the number of samples."""
        return f"n={self.samples}" if self.low is None else f"[{self.low:{style}}, {self.high:{style}}]"

    def __str__(self) -> str:
        return self.text(".3g")


def summarize(samples: Sequence[float]) -> Summary:
    """The median of some samples, and its interval.

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
    """Samples to leave out on each side; None if even the extremes have less than 95 % confidence."""
    tail, trimmed = 0.0, None
    for left_out in range(count // 2):
        tail += math.comb(count, left_out) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        trimmed = left_out
    return trimmed


def ratios(samples: Sequence[float], baseline: Sequence[float]) -> Summary:
    """The median of ratios of paired samples. A disturbance of both samples of a pair cancels.

    >>> ratios([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]).median
    2.0
    """
    return summarize([a / b for a, b in zip(samples, baseline, strict=True)])


SIZE_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def parse_size(text: str) -> int:
    """The bytes of a size; KB, MB and GB are powers of two.

    >>> parse_size("4KB"), parse_size("1.5mb")
    (4096, 1572864)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?B?)", text.strip(), re.IGNORECASE)
    unit = match[2].upper() if match else "?"
    unit = unit if unit in SIZE_UNITS else f"{unit}B"
    if match is None or unit not in SIZE_UNITS or float(match[1]) <= 0:
        raise SpecError(f"{text!r} is not a size; write 4KB, 1MB or 1.5MB")
    return max(4, int(float(match[1]) * SIZE_UNITS[unit]) // 4 * 4)


def parse_sizes(text: str) -> list[int]:
    """The sizes of a list, or of a range in steps of four.

    >>> [format_size(size) for size in parse_sizes("4KB:1MB")]
    ['4KB', '16KB', '64KB', '256KB', '1MB']
    >>> parse_sizes("1MB,3MB")
    [1048576, 3145728]
    """
    if ":" not in text:
        return [parse_size(part) for part in text.split(",")]
    first, _, last = text.partition(":")
    size, end = parse_size(first), parse_size(last)
    if size > end:
        raise SpecError(f"the range {text!r} ends before it begins; write the smaller size first")
    sizes = []
    while size <= end:
        sizes.append(size)
        size *= 4
    return sizes


def format_size(size: int) -> str:
    """A size as text, in powers of two."""
    for unit in ("GB", "MB", "KB"):
        if size >= SIZE_UNITS[unit]:
            return f"{size / SIZE_UNITS[unit]:.4g}{unit}"
    return f"{size}B"


@contextmanager
def quiet_machine() -> Iterator[None]:
    """Measure with one thread of torch, and without garbage collection."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def over_ranks(channel: Channel, values: Sequence[Any], op: Literal["min", "max"]) -> list[Any]:
    """The minimum or maximum over the ranks of each number in a list or a table. A collective call."""
    import torch

    from syncline.collectives import build
    from syncline.collectives.channel import allreduce

    table = torch.tensor(values, dtype=torch.float64)
    allreduce(channel, table, op, build("allreduce", "recursive_doubling"))
    return table.tolist()


def describe_place(document: Mapping[str, Any]) -> str:
    """Where the ranks of a benchmark ran."""
    if document["lab"]:
        return f"emulated hosts, {document['lab']}"
    hosts = len(set(document.get("hosts", ("",))))
    return "one host" if hosts == 1 else f"{hosts} hosts"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("a plot needs matplotlib: pip install 'syncline[plot]'") from None
    return Figure(figsize=(width, height))


def save_figure(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as SVG and PNG."""
    figure.tight_layout()
    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    for path in paths:
        figure.savefig(path, dpi=130)
    return paths
