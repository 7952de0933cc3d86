"""How stale the weights were that workers read, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["StalenessRow", "bins", "counts_of", "staleness_rows", "summed"]


@dataclass(frozen=True)
class StalenessRow:
    """One entry's reads: which share of them was how stale."""

    entry: str
    reads: int
    mean: float
    most: int
    shares: tuple[float, ...]
    """By the bins of the whole table."""


def counts_of(histogram: Any) -> dict[int, int]:
    """What a log's `sl_staleness_histogram` says; nothing where there is none.

    >>> counts_of({"0": 3, "2": 1})
    {0: 3, 2: 1}
    """
    if histogram is None:
        return {}
    found = {int(key): int(count) for key, count in histogram.items()}
    if any(key < 0 or count < 0 for key, count in found.items()):
        raise ValueError(f"a staleness or a count below 0: {histogram}")
    return found


def summed(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """All of them taken together.

    >>> summed([{0: 1}, {0: 2, 5: 1}])
    {0: 3, 5: 1}
    """
    found: dict[int, int] = {}
    for histogram in histograms:
        for staleness, count in histogram.items():
            found[staleness] = found.get(staleness, 0) + count
    return {staleness: found[staleness] for staleness in sorted(found)}


def bins(most: int) -> list[tuple[int, int]]:
    """First and last staleness of each column: single ones, then twice as many each time.

    >>> bins(11)
    [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]
    """
    found, high = [(0, 0)], 1
    while found[-1][1] < most:
        found.append((found[-1][1] + 1, high))
        high *= 2
    return found


def staleness_rows(histograms: Mapping[str, Mapping[int, int]]) -> tuple[list[str], list[StalenessRow]]:
    """The heads of the columns, and a row for each entry that has met any staleness.

    >>> heads, (row,) = staleness_rows({"ssp": {0: 1, 3: 3}, "allreduce": {}})
    >>> heads, row.shares, row.mean
    (['0', '1', '2', '3–4'], (0.25, 0.0, 0.0, 0.75), 2.25)
    """
    known = {name: counts for name, counts in histograms.items() if sum(counts.values())}
    columns = bins(max((max(counts) for counts in known.values()), default=0))
    heads = [str(low) if low == high else f"{low}–{high}" for low, high in columns]
    return heads if known else [], [_row(name, counts, columns) for name, counts in known.items()]


def _row(name: str, counts: Mapping[int, int], columns: Sequence[tuple[int, int]]) -> StalenessRow:
    reads = sum(counts.values())
    shares = [sum(count for key, count in counts.items() if low <= key <= high) / reads for low, high in columns]
    mean = sum(key * count for key, count in counts.items()) / reads
    return StalenessRow(name, reads, mean, max(key for key, count in counts.items() if count), tuple(shares))
