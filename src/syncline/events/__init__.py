"""Spans and counters, and the run log they end in. Knows nothing of what emits them."""

from syncline.events.base import Event, Sink
from syncline.events.log import RunLog, read_log
from syncline.events.recorder import Recorder
from syncline.events.tensorboard import TensorBoardSink
from syncline.events.trace import ChromeTrace

__all__ = ["ChromeTrace", "Event", "Recorder", "RunLog", "Sink", "TensorBoardSink", "read_log"]
