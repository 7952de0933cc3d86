"""Spans and counters, and the run log they end in. Knows nothing of what emits them."""

from syncline.events.recorder import Recorder, RunEvent, Sink
from syncline.events.sinks import RunLog, TensorBoardSink, read_log
from syncline.events.trace import ChromeTrace

__all__ = ["ChromeTrace", "Recorder", "RunEvent", "RunLog", "Sink", "TensorBoardSink", "read_log"]
