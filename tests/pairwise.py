"""Cases that cover every pair of values of different factors, instead of every combination."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Place = tuple[int, int]
"""A factor and one of its values, both by number."""


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each factor, such that any two values of different factors share a row.

    The rows are always the same. Two factors give their product; with more factors, the number of rows is near the
    product of the two longest. Most bugs in the handling of options show with one value, or with two of them together.

    >>> len(pairwise("abc", "xy", "+-", [True, False]))
    6
    """
    left = {
        frozenset(((one, i), (other, j)))
        for one, other in combinations(range(len(factors)), 2)
        for i, j in product(range(len(factors[one])), range(len(factors[other])))
    }
    rows: list[tuple[Any, ...]] = [(value,) for value in factors[0]] if len(factors) == 1 else []
    while left:
        chosen: dict[int, int] = dict(min(left, key=sorted))
        for factor in range(len(factors)):
            if factor not in chosen:
                values = range(len(factors[factor]))
                gains = [(_gain((factor, each), chosen, left), -_used(rows, factor, each)) for each in values]
                chosen[factor] = gains.index(max(gains))
        rows.append(tuple(chosen[factor] for factor in range(len(factors))))
        left -= {frozenset(pair) for pair in combinations(enumerate(rows[-1]), 2)}
    if len(factors) == 1:
        return rows
    return [tuple(values[number] for values, number in zip(factors, row, strict=True)) for row in rows]


def _gain(place: Place, chosen: dict[int, int], left: set[frozenset[Place]]) -> int:
    return sum(frozenset((place, each)) in left for each in chosen.items())


def _used(rows: list[tuple[Any, ...]], factor: int, value: int) -> int:
    return sum(row[factor] == value for row in rows)


def parametrize_pairwise(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over a pairwise selection of the values of the named arguments."""
    rows = pairwise(*factors.values())
    return pytest.mark.parametrize(tuple(factors), rows if len(factors) > 1 else [row[0] for row in rows])
