"""The trace: valid whatever happens, in lanes that viewers can draw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from syncline.events import ChromeTrace, Recorder, RunEvent


def span(start: float, stop: float, lane: str = "communication", what: str = "", **more: Any) -> RunEvent:
    return RunEvent("sl_comm_seconds", stop - start, stop, "INTERVAL_END", {"lane": lane, "what": what, **more})


def read(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    assert isinstance(found, list)
    return found


def threads(lines: list[dict[str, Any]]) -> dict[int, str]:
    return {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}


def placed(lines: list[dict[str, Any]]) -> dict[str, str]:
    """The lane of each span."""
    return {line["name"]: threads(lines)[line["tid"]] for line in lines if line["ph"] == "X"}


def test_spans_of_a_recorder(tmp_path: Path) -> None:
    """Times are microseconds since the shared zero, the process is the rank, the thread the lane."""
    trace = ChromeTrace(tmp_path / "trace.json", rank=3, zero=100.0, error=25e-6)
    recorder = Recorder(iter([101.0, 101.5, 102.0]).__next__, (trace,))
    with recorder.span("sl_forward_seconds", lane="compute", what="forward"):
        pass
    recorder.interval("sl_comm_seconds", 101.25, 101.75, lane="communication", what="bucket 0", bytes=12)
    recorder.point("seed", 7)
    recorder.close()
    lines = read(tmp_path / "trace.json")
    forward, bucket, seed = [line for line in lines if line["ph"] != "M"]
    assert (forward["name"], forward["ts"], forward["dur"]) == ("forward", 1e6, 5e5)
    assert (bucket["name"], bucket["ts"], bucket["dur"]) == ("bucket 0", 1.25e6, 5e5)
    assert bucket["args"] == {"bytes": 12}
    assert (seed["ph"], seed["ts"], seed["args"]) == ("i", 2e6, {"value": 7})
    assert placed(lines) == {"forward": "compute", "bucket 0": "communication"}
    assert {line["pid"] for line in lines} == {3}
    assert threads(lines)[seed["tid"]] == "other"
    described = {line["name"]: line["args"] for line in lines if line["ph"] == "M"}
    assert described["process_name"] == {"name": "rank 3"}
    assert "25 µs" in described["process_labels"]["labels"]


def test_lanes_are_there_in_order_without_any_span(tmp_path: Path) -> None:
    ChromeTrace(tmp_path / "trace.json", rank=0).close()
    names = threads(read(tmp_path / "trace.json"))
    assert [names[tid] for tid in sorted(names)] == ["compute", "communication", "data"]


@pytest.mark.parametrize(("key", "lane"), [("sl_comm_seconds", "communication"), ("sl_data_wait_seconds", "data")])
def test_a_span_without_a_lane_goes_by_its_key(tmp_path: Path, key: str, lane: str) -> None:
    trace = ChromeTrace(tmp_path / "trace.json", rank=0)
    trace.write(RunEvent(key, 1.0, 2.0, "INTERVAL_END", {"call": "allreduce"}))
    trace.close()
    assert placed(read(tmp_path / "trace.json")) == {"allreduce": lane}


def test_spans_that_cut_each_other_lie_beside_each_other(tmp_path: Path) -> None:
    """One inside another, or one after another, stays on a line; two that overlap by half do not."""
    trace = ChromeTrace(tmp_path / "trace.json", rank=0)
    trace.write(span(0.0, 2.0, what="a"))
    trace.write(span(1.0, 3.0, what="cuts a"))
    trace.write(span(1.5, 3.5, what="cuts both"))
    trace.write(span(4.0, 5.0, what="inner"))
    trace.write(span(3.0, 6.0, what="outer"))
    trace.write(span(6.0, 7.0, what="after"))
    trace.close()
    assert placed(read(tmp_path / "trace.json")) == {
        "a": "communication",
        "cuts a": "communication 2",
        "cuts both": "communication 3",
        "inner": "communication",
        "outer": "communication",
        "after": "communication",
    }


def test_no_more_than_its_limit(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "trace.json", rank=0, limit=5)
    for number in range(12):
        trace.write(span(number, number + 0.5))
    trace.close()
    trace.close()
    trace.write(span(20, 21))  # after the end: nothing happens
    lines = read(tmp_path / "trace.json")
    assert sum(line["ph"] == "X" for line in lines) == 5
    assert "7 more events were dropped" in str(lines[-1])


def test_odd_values_do_not_spoil_the_file(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "trace.json", rank=0)
    trace.write(
        RunEvent("loss", float("nan"), 1.0, metadata={"text": 'a"b\nc', "list": [float("inf")], "own": Path("x")})
    )
    trace.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads((tmp_path / "trace.json").read_text(), parse_constant=refuse)[-1]
    assert line["args"] == {"value": "nan", "text": 'a"b\nc', "list": ["inf"], "own": "x"}


KILLED = """
import sys, time
from pathlib import Path
from syncline.events import ChromeTrace, RunEvent
trace = ChromeTrace(sys.argv[1], rank=0)
for number in range(1000):
    trace.write(RunEvent("sl_comm_seconds", 0.5, number + 1.0, "INTERVAL_END", {"what": f"span {number}"}))
print("written", flush=True)
time.sleep(600)
"""


def test_a_killed_run_leaves_a_trace(tmp_path: Path) -> None:
    """All that is missing is the bracket at the end, which the format leaves optional, and the latest few events."""
    path = tmp_path / "trace.json"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    text = path.read_text()
    assert not text.rstrip().endswith("]")
    lines = json.loads(text + "]")
    spans = [line["name"] for line in lines if line["ph"] == "X"]
    assert spans == [f"span {number}" for number in range(len(spans))]
    assert len(spans) > 900
