"""Spans and counters, and the run log they end in. Knows nothing of what emits them."""

from syncline.events.base import Event, Sink
from syncline.events.log import RunLog, read_log
from syncline.events.recorder import Recorder

__all__ = ["Event", "Recorder", "RunLog", "Sink", "read_log"]
