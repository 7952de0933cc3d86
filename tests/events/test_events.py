"""Recorder and run log: what is counted, what is written, what is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import ProtocolError
from syncline.events import Recorder, RunEvent, RunLog, read_log


class ListSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.closed = 0

    def write(self, event: RunEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


class Clock:
    """Moves on by one second each time it is read."""

    def __init__(self) -> None:
        self.seconds = -1.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def test_counters_grow_and_write_nothing() -> None:
    """Counts are summed by key; the sinks and the clock are left alone."""
    sink, clock = ListSink(), Clock()
    recorder = Recorder(clock, (sink,))
    recorder.count("calls")
    recorder.count("calls")
    recorder.count("bytes", 512)
    assert recorder.totals == {"calls": 2, "bytes": 512}
    assert sink.events == []
    assert clock.seconds == -1


def test_points_go_to_every_sink() -> None:
    """A point is one event with its value, time and metadata, the same for all sinks."""
    sinks = ListSink(), ListSink()
    recorder = Recorder(Clock(), sinks)
    recorder.point("seed", 7, rank=3)
    recorder.point("run_start")
    expected = [RunEvent("seed", 7, 0.0, "POINT_IN_TIME", {"rank": 3}), RunEvent("run_start", None, 1.0)]
    assert [sink.events for sink in sinks] == [expected, expected]
    assert recorder.totals == {}


def test_spans_are_timed_and_written() -> None:
    """A span adds its seconds to the total and writes its two ends."""
    sink = ListSink()
    recorder = Recorder(Clock(), (sink,))
    for _ in range(2):
        with recorder.span("sl_comm_seconds", call="allreduce"):
            pass
    assert recorder.totals == {"sl_comm_seconds": 2.0}
    assert [(event.kind, event.seconds, event.value) for event in sink.events] == [
        ("INTERVAL_START", 0.0, None),
        ("INTERVAL_END", 1.0, 1.0),
        ("INTERVAL_START", 2.0, None),
        ("INTERVAL_END", 3.0, 1.0),
    ]
    assert {event.key for event in sink.events} == {"sl_comm_seconds"}
    assert all(event.metadata == {"call": "allreduce"} for event in sink.events)


def test_spans_nest() -> None:
    """An outer span holds the time of an inner one."""
    recorder = Recorder(Clock())
    with recorder.span("outer"), recorder.span("inner"):
        pass
    assert recorder.totals == {"inner": 1.0, "outer": 3.0}


def test_a_span_that_raises_is_counted() -> None:
    """An error goes on its way; the span is closed all the same."""
    sink = ListSink()
    recorder = Recorder(Clock(), (sink,))
    with pytest.raises(KeyError), recorder.span("sl_comm_seconds"):
        raise KeyError
    assert recorder.totals == {"sl_comm_seconds": 1.0}
    assert [event.kind for event in sink.events] == ["INTERVAL_START", "INTERVAL_END"]


def test_close_closes_every_sink() -> None:
    """Each sink is closed once."""
    sinks = ListSink(), ListSink()
    Recorder(Clock(), sinks).close()
    assert [sink.closed for sink in sinks] == [1, 1]


def test_run_log_lines(tmp_path: Path) -> None:
    """One JSON object a line, with these keys in this order, on disk before the log is closed."""
    log = RunLog(tmp_path / "runs" / "a")
    recorder = Recorder(Clock(), (log,))
    recorder.point("seed", 7, rank=3)
    with recorder.span("sl_comm_seconds"):
        pass
    text = (tmp_path / "runs" / "a" / "log.jsonl").read_text(encoding="utf-8")
    recorder.close()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [list(line) for line in lines] == [["time_ms", "seconds", "event_type", "key", "value", "metadata"]] * 3
    assert [without_time(line) for line in lines] == [
        {"seconds": 0.0, "event_type": "POINT_IN_TIME", "key": "seed", "value": 7, "metadata": {"rank": 3}},
        {"seconds": 1.0, "event_type": "INTERVAL_START", "key": "sl_comm_seconds", "value": None, "metadata": {}},
        {"seconds": 2.0, "event_type": "INTERVAL_END", "key": "sl_comm_seconds", "value": 1.0, "metadata": {}},
    ]
    times = [line["time_ms"] for line in lines]
    assert all(type(time) is int for time in times)
    assert min(times) > 1_600_000_000_000  # milliseconds since 1970, not seconds
    assert read_log(tmp_path / "runs" / "a") == lines


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "time_ms"}


def write(folder: Path, *values: Any) -> None:
    """A run that logs these values."""
    log = RunLog(folder)
    for value in values:
        log.write(RunEvent("value", value, seconds=0.0))
    log.close()


def values(folder: Path) -> list[Any]:
    return [line["value"] for line in read_log(folder)]


def test_a_second_log_is_appended(tmp_path: Path) -> None:
    """A resumed run keeps what the first one wrote, byte for byte."""
    write(tmp_path, 1, 2)
    before = (tmp_path / "log.jsonl").read_bytes()
    write(tmp_path, 3)
    assert (tmp_path / "log.jsonl").read_bytes().startswith(before)
    assert values(tmp_path) == [1, 2, 3]


def test_any_text_stays_on_its_line(tmp_path: Path) -> None:
    """Line breaks of every kind inside a value do not break the line."""
    awkward = ["a\nb", "a\r\nb", "a\u2028b\x85c", "gr\u00fc\u00dfe", "\x00"]
    write(tmp_path, *awkward)
    assert values(tmp_path) == awkward


def test_a_value_that_is_not_json_leaves_no_trace(tmp_path: Path) -> None:
    """An object that JSON cannot hold is refused before a byte is written."""
    log = RunLog(tmp_path)
    log.write(RunEvent("value", 1, seconds=0.0))
    with pytest.raises(TypeError, match="not JSON serializable"):
        log.write(RunEvent("value", object(), seconds=0.0))
    log.write(RunEvent("value", 2, seconds=0.0))
    log.close()
    assert values(tmp_path) == [1, 2]


def test_an_empty_log(tmp_path: Path) -> None:
    """A run that wrote nothing has a log of no lines."""
    RunLog(tmp_path).close()
    assert read_log(tmp_path) == []


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    """Wherever a crash cuts the last line, the others are read; cut only its newline, and it counts."""
    write(tmp_path, 1, 2)
    path = tmp_path / "log.jsonl"
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert values(tmp_path) == [1], f"cut at {end}"
    path.write_bytes(whole[:-1])
    assert values(tmp_path) == [1, 2]


def test_a_run_resumed_after_a_crash_can_be_read(tmp_path: Path) -> None:
    """What is appended after a cut line does not grow together with it: only the cut line is lost."""
    write(tmp_path, 1, 2)
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    write(tmp_path, 3, 4)
    assert values(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b'{"key": ', id="cut"),
        pytest.param(b"not json", id="text"),
        pytest.param(b"\x00\x00\x00", id="zeros"),
        pytest.param(b'{"key": "\xff"}', id="not UTF-8"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"[" + b"9" * 5000 + b"]", id="a number too long to read"),
        pytest.param(b"7", id="a number"),
        pytest.param(b"[1, 2]", id="a list"),
        pytest.param(b"null", id="null"),
    ],
)
def test_damage_in_the_middle_names_the_line(tmp_path: Path, damage: bytes) -> None:
    """A line that is not a JSON object, with a newline after it, is an error that says where."""
    write(tmp_path, 1, 2, 3)
    path = tmp_path / "log.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ProtocolError, match="line 2 is not") as caught:
        read_log(tmp_path)
    assert str(path) in str(caught.value)


def test_a_last_line_that_is_whole_but_no_object(tmp_path: Path) -> None:
    """A number with its newline was not cut off: it is damage even at the end."""
    write(tmp_path, 1)
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write("7\n")
    with pytest.raises(ProtocolError, match="line 2 is not a JSON object"):
        read_log(tmp_path)
