"""Horovod's timeline: what stands in the file, and that it can always be opened."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import syncline as sl
from syncline.compat.horovod.timeline import Timeline


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def spans(path: Path) -> list[tuple[str, str]]:
    """(tensor, what) of each span, by the names of their rows."""
    found = events(path)
    rows = {one["pid"]: one["args"]["name"] for one in found if one["name"] == "process_name"}
    return [(rows[one["pid"]], one["name"]) for one in found if one["ph"] == "X"]


def test_each_name_has_a_row_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, rank=0, now=lambda: 5.0)
    timeline.negotiating("a", "allreduce", 5.0, 5.1)
    timeline.negotiating("b", "broadcast", 5.0, 5.2)
    timeline.running("a", "allreduce", "SUM", 5.1, 5.3)
    timeline.running("b", "broadcast", "", 5.2, 5.3)
    timeline.close()
    assert spans(path) == [
        ("a", "NEGOTIATE_ALLREDUCE"),
        ("b", "NEGOTIATE_BROADCAST"),
        ("a", "ALLREDUCE"),
        ("a", "SUM"),
        ("b", "BROADCAST"),
    ]
    [negotiated] = [one for one in events(path) if one["name"] == "NEGOTIATE_BROADCAST"]
    assert (negotiated["ts"], negotiated["dur"]) == (0.0, 200000.0)


def test_names_are_escaped_and_an_empty_timeline_is_json(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    Timeline(path, rank=0, now=lambda: 0.0).close()
    assert [one["name"] for one in events(path)] == ["process_name"]
    timeline = Timeline(path, rank=0, now=lambda: 0.0)
    timeline.running('a "quoted"\nname', "allreduce", "", 0.0, 1.0)
    timeline.close()
    timeline.close()
    assert spans(path) == [('a "quoted"\nname', "ALLREDUCE")]


def test_what_a_killed_run_has_written_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    clock = iter(range(1000))
    timeline = Timeline(path, rank=0, now=lambda: 2.0 * next(clock))  # so slow that each event is flushed
    for number in range(5):
        timeline.running(f"grad.{number}", "allreduce", "", 0.0, 1.0)
    found = json.loads(path.read_text() + "]")  # never closed
    assert [one["name"] for one in found if one["ph"] == "X"] == ["ALLREDUCE"] * 5
    timeline.close()


def test_cycles_are_marked_where_asked_for(tmp_path: Path) -> None:
    for mark, count in ((False, 0), (True, 3)):
        path = tmp_path / f"{mark}.json"
        timeline = Timeline(path, rank=0, now=lambda: 0.0, mark_cycles=mark)
        for number in range(3):
            timeline.cycle(0.001 * number)
        timeline.close()
        assert [one["name"] for one in events(path)].count("CYCLE_START") == count


def test_it_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, rank=0, now=lambda: 0.0, limit=10)
    for number in range(20):
        timeline.running(f"noname.{number}", "allreduce", "", 0.0, 1.0)
    timeline.close()
    found = events(path)
    assert len(found) == 12  # its own name, ten, and how many are missing
    assert found[-1]["args"]["labels"] == "18 more events were dropped"


def test_only_rank_0_writes_unless_the_path_tells_ranks_apart(tmp_path: Path) -> None:
    def step(world: sl.World) -> bool:
        for name in ("one.json", "all-{rank}.json"):
            timeline = Timeline(tmp_path / name, rank=world.rank, now=world.runtime.now, lock=world.runtime.lock())
            timeline.running("grad", "allreduce", "", 0.0, 1.0)
            timeline.close()
        unused = Timeline(tmp_path / "unused.json", rank=world.rank, now=world.runtime.now)
        active = unused.active
        unused.close()
        return active

    assert sl.simulate(step, ranks=3).results == (True, False, False)
    assert sorted(path.name for path in tmp_path.glob("[ao]*")) == [
        "all-0.json",
        "all-1.json",
        "all-2.json",
        "one.json",
    ]
    assert spans(tmp_path / "all-2.json") == spans(tmp_path / "one.json") == [("grad", "ALLREDUCE")]


def test_unwritable_timeline_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="syncline"):
        timeline = Timeline(tmp_path / "nowhere" / "timeline.json", rank=0, now=lambda: 0.0)
    assert "No such file or directory; training continues without" in caplog.text
    assert not timeline.active
    timeline.negotiating("grad", "allreduce", 0.0, 1.0)
    timeline.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a disk that is always full, is Linux's")
def test_a_full_disk_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="syncline"):
        timeline = Timeline("/dev/full", rank=0, now=lambda: 0.0)
    assert "No space left on device" in caplog.text
    timeline.running("grad", "allreduce", "", 0.0, 1.0)
    timeline.close()
