"""Staleness from the log to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncline.bench.race.plan import RaceEntry
from syncline.bench.report import analyse, judge
from syncline.bench.report.facts import read_histogram, staleness_bins, staleness_rows
from syncline.bench.report.html import page
from syncline.bench.runlog import read_race
from tests.bench.racing import make_race, reseal

ONE = RaceEntry(name="allreduce", learning_rate=0.5, rate_from="given")


def with_histogram(folder: Path, histogram: object) -> None:
    """Two lines in the first seed's log, the second of which counts."""
    log = folder / "runs/allreduce/2w-seed1/log.jsonl"
    lines = log.read_text().splitlines()
    for told in ({"0": 1}, histogram):
        line = json.loads(lines[-2]) | {"key": "sl_staleness_histogram", "value": told}
        lines.insert(-1, json.dumps(line))
    log.write_text("\n".join(lines) + "\n")
    reseal(folder)


def test_the_page_has_a_table_where_anybody_was_stale(tmp_path: Path) -> None:
    make_race(tmp_path, entries=(ONE,), seeds=(1, 2))
    race = read_race(tmp_path)
    found = analyse(race)
    assert 'aria-label="staleness"' not in page(race, found, judge(found), None, [])
    with_histogram(tmp_path, {"0": 30, "1": 10, "6": 10})
    race = read_race(tmp_path)
    found = analyse(race)
    assert found.entry("allreduce").staleness_counts == {0: 30, 1: 10, 6: 10}
    text = page(race, found, judge(found), None, [])
    assert 'aria-label="staleness"' in text
    assert '<th scope="col" class="n">5–8</th>' in text
    assert '<td class="n" data-sort="50">50</td><td class="n" data-sort="1.4">1.4</td>' in text


@pytest.mark.parametrize("told", [{"-1": 3}, {"one": 1}, {"1": -2}, [1, 2], 7])
def test_a_histogram_that_is_none_makes_a_run_that_failed(tmp_path: Path, told: object) -> None:
    make_race(tmp_path, entries=(ONE,), seeds=(1,))
    with_histogram(tmp_path, told)
    found = analyse(read_race(tmp_path))
    (run,) = found.runs
    assert run.status == "failed"
    assert run.problem is not None
    assert "cannot be understood" in run.problem


def test_shares_add_up() -> None:
    heads, rows = staleness_rows({"a": {0: 1, 100: 3}, "b": {2: 7}, "c": {}})
    assert [row.entry for row in rows] == ["a", "b"]
    assert all(sum(row.shares) == pytest.approx(1.0) for row in rows)
    assert len(heads) == len(rows[0].shares) == len(staleness_bins(100))
    assert heads[-1] == "65–128"
    assert read_histogram(None) == {}
