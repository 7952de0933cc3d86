"""Ranks × steps: what each rank did, in a table that stays small however long the run is."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncline.bench.live.series import number

__all__ = ["KINDS", "HeatMap"]

KINDS = ("compute", "exposed", "codec", "data", "seconds")
"""What the log has of each rank: seconds a step; the last is the whole step."""
COLUMNS = 400
ROWS = 256
CELLS = 40_000
"""What a browser draws every second or two without effort."""
SLOW = 1.3
"""A rank that computes so many times as long as the median one is worth a sentence."""


@dataclass
class _Column:
    start: int
    stop: int
    lines: int
    kinds: dict[str, array[float]]

    def merged(self, other: _Column) -> _Column:
        """One column for the steps of both; seconds a step are weighted with the steps."""
        mine, theirs = max(1, self.stop - self.start), max(1, other.stop - other.start)
        share = theirs / (mine + theirs)
        kinds = {
            kind: array("f", (a + (b - a) * share for a, b in zip(self.kinds[kind], other.kinds[kind], strict=True)))
            for kind in KINDS
        }
        return _Column(self.start, other.stop, self.lines + other.lines, kinds)


class HeatMap:
    """Rows are ranks; columns are steps, as many together as it takes to have no more than 400.

    With many ranks there are fewer columns. Beyond 256 a row is that of the slowest of several neighbours, so that a
    straggler is still seen.

    >>> heat = HeatMap()
    >>> one = {"compute": [1, 4], "exposed": [3, 0], "codec": [0, 0], "data": [0, 0], "seconds": [4, 4]}
    >>> heat.add({"step": 10, "steps": 10, **one})
    True
    >>> heat.document("compute")["rows"], heat.straggler()
    ([[1.0], [4.0]], {'rank': 1, 'times': 4.0})
    """

    def __init__(self) -> None:
        self._columns: list[_Column] = []
        self._together = 1
        self.ranks = 0

    def add(self, told: Mapping[str, Any]) -> bool:
        """One line of the log; False where it cannot be read."""
        try:
            step, steps = int(told["step"]), int(told["steps"])
            kinds = {kind: array("f", (float(value) for value in told[kind])) for kind in KINDS}
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        sizes = {len(values) for values in kinds.values()}
        if len(sizes) != 1 or not min(sizes) or steps < 1 or step < steps:
            return False
        if sizes != {self.ranks}:  # another number of workers: the run was resumed with more or fewer
            self._columns, self._together, self.ranks = [], 1, sizes.pop()
        column = _Column(step - steps, step, 1, kinds)
        if self._columns and self._columns[-1].lines < self._together:
            self._columns[-1] = self._columns[-1].merged(column)
        else:
            self._columns.append(column)
        if len(self._columns) > max(100, min(COLUMNS, CELLS // min(self.ranks, ROWS))):
            self._halve()
        return True

    def _halve(self) -> None:
        columns, self._together = self._columns, 2 * self._together
        pairs = [first.merged(second) for first, second in zip(columns[::2], columns[1::2], strict=False)]
        self._columns = pairs + columns[2 * len(pairs) :]

    def cut(self, step: float) -> None:
        """Forget what came after a step."""
        self._columns = [column for column in self._columns if column.stop <= step]

    def document(self, kind: str) -> dict[str, Any]:
        """For the page: the steps at which columns begin and end, names of the rows, and seconds a step."""
        together = max(1, -(-self.ranks // ROWS))
        rows = []
        for first in range(0, self.ranks, together):
            rows.append([number(max(column.kinds[kind][first : first + together]), 4) for column in self._columns])
        edges = [self._columns[0].start, *(column.stop for column in self._columns)] if self._columns else []
        return {"kind": kind, "edges": edges, "ranks": self.ranks, "together": together, "rows": rows}

    def straggler(self) -> dict[str, float] | None:
        """The rank that computed longest over all steps, where it is well above the others."""
        if self.ranks < 2 or not self._columns:
            return None
        weights = [max(1, column.stop - column.start) for column in self._columns]
        spent = [
            sum(column.kinds["compute"][rank] * weight for column, weight in zip(self._columns, weights, strict=True))
            for rank in range(self.ranks)
        ]
        slowest = max(range(self.ranks), key=lambda rank: spent[rank])
        usual = statistics.median_low(spent)
        if usual <= 0 or spent[slowest] < SLOW * usual:
            return None
        return {"rank": slowest, "times": number(spent[slowest] / usual, 3) or 0.0}
