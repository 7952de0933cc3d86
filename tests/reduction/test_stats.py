"""What `run.stats` counts."""

from __future__ import annotations

from contextlib import nullcontext

from syncline.events import Recorder
from syncline.reduction.stats import Stats


def test_overlapping_reductions_count_once() -> None:
    stats = Stats(Recorder(lambda: 0.0), nullcontext())
    stats.next_round()
    for start, stop in ((0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)):
        stats.reduced(start, stop, "a bucket")
    assert stats.comm_seconds == 4.0
