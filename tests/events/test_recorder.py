"""The recorder while it runs: spans recorded afterwards, sinks added and removed, many threads."""

from __future__ import annotations

import threading

from syncline.events import Recorder, RunEvent


class ListSink:
    """Keeps what it is given, and notices if two threads are in it at once."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.closed = 0
        self.crowded = False
        self._inside = 0

    def write(self, event: RunEvent) -> None:
        self._inside += 1
        for _ in range(20):  # give another thread time to come in
            self.crowded = self.crowded or self._inside > 1
        self.events.append(event)
        self._inside -= 1

    def close(self) -> None:
        self.closed += 1


def test_an_interval_is_counted_and_written_as_a_pair() -> None:
    sink = ListSink()
    recorder = Recorder(lambda: 99.0, (sink,))
    recorder.interval("sl_comm_seconds", 2.0, 2.5, lane="communication")
    recorder.interval("sl_comm_seconds", 2.25, 3.0, lane="communication")
    assert recorder.totals == {"sl_comm_seconds": 1.25}
    assert sink.events[:2] == [
        RunEvent("sl_comm_seconds", None, 2.0, "INTERVAL_START", {"lane": "communication"}),
        RunEvent("sl_comm_seconds", 0.5, 2.5, "INTERVAL_END", {"lane": "communication"}),
    ]
    assert len(sink.events) == 4


def test_begin_and_end_are_not_timed() -> None:
    sink = ListSink()
    recorder = Recorder(lambda: 1.0, (sink,))
    recorder.begin("run_start")
    recorder.end("run_stop", status="success")
    assert sink.events == [
        RunEvent("run_start", None, 1.0, "INTERVAL_START"),
        RunEvent("run_stop", None, 1.0, "INTERVAL_END", {"status": "success"}),
    ]
    assert recorder.totals == {}


def test_sinks_come_and_go() -> None:
    early, late = ListSink(), ListSink()
    recorder = Recorder(lambda: 0.0)
    recorder.point("nobody hears it")
    recorder.add(early)
    recorder.point("one")
    recorder.add(late)
    recorder.point("two")
    recorder.remove(early)
    recorder.remove(early)  # a second time is no error
    recorder.point("three")
    recorder.close()
    recorder.point("after the end")
    assert [event.key for event in early.events] == ["one", "two"]
    assert [event.key for event in late.events] == ["two", "three"]
    assert (early.closed, late.closed) == (0, 1), "who was removed is left open"


def test_a_sink_that_comes_within_a_span_sees_its_end() -> None:
    sink = ListSink()
    recorder = Recorder(lambda: 0.0)
    with recorder.span("sl_comm_seconds"):
        recorder.add(sink)
    assert [event.kind for event in sink.events] == ["INTERVAL_END"]


def test_many_threads_at_once() -> None:
    sink = ListSink()
    recorder = Recorder(lambda: 0.0, (sink,), threading.Lock())
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait(timeout=30)
        for _ in range(300):
            recorder.interval("seconds", 1.0, 2.0)
            recorder.count("calls")
            recorder.point("point")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert recorder.totals == {"seconds": 1200.0, "calls": 1200}
    assert len(sink.events) == 3 * 1200
    assert not sink.crowded, "a sink was called by two threads at once"
    starts = [number for number, event in enumerate(sink.events) if event.kind == "INTERVAL_START"]
    assert all(sink.events[number + 1].kind == "INTERVAL_END" for number in starts), "a pair was torn apart"
