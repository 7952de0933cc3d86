"""Medians and their intervals; sizes as people write them."""

from __future__ import annotations

import random

import pytest

from syncline.bench.measuring import format_size, parse_size, parse_sizes, ratios, summarize
from syncline.errors import SpecError


@pytest.mark.parametrize(("count", "left_out"), [(5, None), (6, 0), (8, 0), (9, 1), (15, 3), (25, 7), (100, 39)])
def test_the_interval_is_that_of_the_binomial_tables(count: int, left_out: int | None) -> None:
    found = summarize(range(count))
    expected = (None, None) if left_out is None else (left_out, count - 1 - left_out)
    assert (found.low, found.high) == expected


def test_the_interval_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="needs scipy, which comes with scikit-learn")
    for count in (6, 7, 12, 31, 64):
        found = summarize(range(count))
        assert (found.low, found.high) == tuple(stats.quantile_test(range(count), p=0.5).confidence_interval(0.95))


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(5)
    hits = 0
    for _ in range(1000):
        found = summarize([draw.expovariate(1.0) for _ in range(15)])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.6931 <= found.high
    assert 945 <= hits <= 990  # 96.5 % by the tables


def test_pairs_cancel_what_shook_both() -> None:
    draw = random.Random(6)
    load = [draw.uniform(1, 10) for _ in range(21)]
    found = ratios([1.2 * each for each in load], load)
    assert found.median == pytest.approx(1.2)
    assert found.low is not None
    assert found.low > 1
    assert ratios(load, load).low == 1


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4KB:64KB", ["4KB", "16KB", "64KB"]),
        ("4kb:20kb", ["4KB", "16KB"]),
        ("1MB", ["1MB"]),
        ("1.5MB,3m", ["1.5MB", "3MB"]),
        ("100", ["100B"]),
        ("1GB", ["1GB"]),
    ],
)
def test_sizes(text: str, sizes: list[str]) -> None:
    assert [format_size(size) for size in parse_sizes(text)] == sizes


@pytest.mark.parametrize("text", ["", "4XB", "-1KB", "0", "1MB:4KB", "1MB,", "much"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SpecError):
        parse_sizes(text)


def test_a_size_is_whole_floats() -> None:
    assert parse_size("5") == 4
    assert parse_size("1KB") % 4 == 0
