"""Rows of numbers over the steps of a run, thinned out so that a long run takes no more memory than a short one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["MOST", "Series", "number"]

MOST = 2000
"""Rows that are kept."""

Row = list[float | None]


def number(value: Any, digits: int = 6) -> float | None:
    """A finite number with so many digits, or None: JSON has no others, and a log writes NaN as a word.

    >>> number("0.1234567"), number("nan"), number(None), number(True)
    (0.123457, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return float(f"{found:.{digits}g}") if math.isfinite(found) else None


class Series:
    """Named columns; the first is the step. Of many rows every second, fourth, … is kept, and always the last.

    >>> series = Series("step", "loss", most=4)
    >>> for step in range(10):
    ...     series.add([step, step / 2])
    >>> series.columns()
    {'step': [0, 4, 8, 9], 'loss': [0.0, 2.0, 4.0, 4.5]}
    """

    def __init__(self, *names: str, most: int = MOST) -> None:
        self.names = names
        self._most = most
        self._rows: list[Row] = []
        self._every = 1
        self._count = 0
        self.last: Row | None = None

    def add(self, row: Row) -> None:
        """One more; of two with the same step the later one counts, column by column."""
        if self.last is not None and self.last[0] == row[0]:
            self.last[:] = [old if new is None else new for old, new in zip(self.last, row, strict=True)]
            return
        self.last = row
        if self._count % self._every == 0:
            self._rows.append(row)
            if len(self._rows) >= self._most:  # the last one may stand beside them
                self._rows, self._every = self._rows[::2], 2 * self._every
        self._count += 1

    def cut(self, step: float) -> None:
        """Forget what came after a step: the run went back to it."""
        self._rows = [row for row in self._rows if (row[0] or 0) <= step]
        self.last = self._rows[-1] if self._rows else None
        self._count = len(self._rows) * self._every

    def columns(self, most: int | None = None) -> dict[str, list[float | None]]:
        """All rows, or about so many, by column."""
        rows = self._rows
        if most is not None and len(rows) > most:
            rows = rows[:: -(-len(rows) // most)]
        if self.last is not None and (not rows or rows[-1] is not self.last):
            rows = [*rows, self.last]
        return {name: _column(rows, index) for index, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self._rows)


def _column(rows: Sequence[Row], index: int) -> list[float | None]:
    return [row[index] for row in rows]
