"""The time of a rank by phase. The sum is the wall-clock time, except for the time between phases.

```text
compute      forward, backward and update, without waiting and encoding inside them
exposed      communication that did not overlap with compute
codec        encoding and decoding that delayed this rank; work that overlapped with backward is not in it
data         waiting for the next batch
evaluation   with the wait for rank 0's result
checkpoint   saving
agreeing     asking the other ranks whether to stop
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncline.reduction import Stats

__all__ = ["AGREEING", "DATA", "EVALUATION", "PHASES", "phases"]

PHASES = ("compute", "exposed", "codec", "data", "evaluation", "checkpoint", "agreeing")

FORWARD, BACKWARD, UPDATE = "sl_forward_seconds", "sl_backward_seconds", "sl_update_seconds"
DATA = "sl_data_wait_seconds"
EVALUATION = "sl_evaluation_seconds"
CHECKPOINT = "sl_checkpoint_seconds"
AGREEING = "sl_agreeing_seconds"


def phases(totals: Mapping[str, float], stats: Stats) -> dict[str, float]:
    """Seconds of each phase so far, from a recorder's totals and the stats of a run.

    >>> from syncline.events import Recorder
    >>> from syncline.reduction import Stats
    >>> from contextlib import nullcontext
    >>> stats = Stats(Recorder(lambda: 0.0), nullcontext())
    >>> stats.waited(1.0, 1.5)
    >>> found = phases({"sl_forward_seconds": 1.0, "sl_backward_seconds": 2.0}, stats)
    >>> found["compute"], found["exposed"], found["data"]
    (2.5, 0.5, 0.0)
    """
    waited = stats.exposed_seconds
    codec = stats.codec_before_seconds + stats.codec_within_seconds
    inside = sum(totals.get(key, 0.0) for key in (FORWARD, BACKWARD, UPDATE))
    return {
        "compute": inside - waited - stats.codec_before_seconds,
        "exposed": waited - stats.codec_within_seconds,
        "codec": codec,
        "data": totals.get(DATA, 0.0),
        "evaluation": totals.get(EVALUATION, 0.0),
        "checkpoint": totals.get(CHECKPOINT, 0.0),
        "agreeing": totals.get(AGREEING, 0.0),
    }
