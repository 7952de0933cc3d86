"""The state of a run: how far the loop is, the clock, the time by phase, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from syncline.reduction import Stats

__all__ = [
    "AGREEING",
    "DATA",
    "EVALUATION",
    "PHASES",
    "PIPELINE_STEP",
    "UPDATE",
    "LoopState",
    "Outcome",
    "StopReason",
    "TrainingClock",
    "phases",
]

PHASES = ("compute", "exposed", "codec", "data", "evaluation", "checkpoint", "agreeing")

FORWARD, BACKWARD, UPDATE = "sl_forward_seconds", "sl_backward_seconds", "sl_update_seconds"
PIPELINE_STEP = "sl_pipeline_step_seconds"
DATA = "sl_data_wait_seconds"
EVALUATION = "sl_evaluation_seconds"
CHECKPOINT = "sl_checkpoint_seconds"
AGREEING = "sl_agreeing_seconds"

StopReason = Literal["target", "epochs", "steps", "signal"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run. It is the same on every rank, except for the counts of an asynchronous run.

    `seconds` is training alone. `time_to_target` is all the time until an evaluation reached the target, with earlier
    evaluations and checkpoints; None if none reached it. `test` is None if the run was stopped. In an asynchronous
    run `seconds`, `elapsed`, `epochs` and `steps` are those of this worker.
    """

    metric: str
    test: float | None
    validation: float | None
    seconds: float
    elapsed: float
    time_to_target: float | None
    epochs: int
    steps: int
    samples: int
    stopped_by: StopReason


@dataclass
class LoopState:
    """How far the training loop is. A checkpoint stores it. Counts of an asynchronous run are those of one worker.

    >>> state = LoopState()
    >>> state.record(0.5, elapsed=1.0, reached=False), state.record(0.9, elapsed=2.0, reached=True)
    (None, None)
    >>> state.record(0.8, elapsed=3.0, reached=False)
    >>> state.time_to_target, state.since_target
    (2.0, 1)
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    """Samples since the beginning, of all ranks together."""
    position: int = 0
    """Samples of this epoch, of all ranks together."""
    validation: float | None = None
    evaluated: int = -1
    """The step of the latest evaluation."""
    time_to_target: float | None = None
    since_target: int = 0
    """The number of evaluations after the one that reached the target."""

    def record(self, validation: float, elapsed: float, reached: bool) -> None:
        """Store the result of an evaluation."""
        self.validation = validation
        if self.time_to_target is not None:
            self.since_target += 1
        elif reached:
            self.time_to_target = elapsed

    def target_confirmed(self, evaluations_after: int) -> bool:
        """Whether the target was reached, and the requested number of evaluations has followed."""
        return self.time_to_target is not None and self.since_target >= evaluations_after


class TrainingClock:
    """Two times of one clock. Both continue from where an earlier attempt ended.

    ```text
    elapsed   ├──────────────────────────────┤       everything
    trained   ├────────┤  evaluate  ├────────┤       only between start() and pause()
    ```

    >>> seconds = iter([10.0, 11.0, 14.0, 20.0])
    >>> clock = TrainingClock(seconds.__next__)
    >>> clock.start()
    >>> clock.pause()
    >>> clock.trained, clock.elapsed
    (3.0, 10.0)
    """

    def __init__(self, now: Callable[[], float], trained: float = 0.0, elapsed: float = 0.0) -> None:
        self._now = now
        self._trained = trained
        self._since: float | None = None
        self._began = now() - elapsed
        self.elapsed_before = elapsed

    @property
    def elapsed(self) -> float:
        """Seconds of everything."""
        return self._now() - self._began

    @property
    def trained(self) -> float:
        """Seconds of training."""
        return self._trained if self._since is None else self._trained + self._now() - self._since

    @property
    def running(self) -> bool:
        """Whether training time is being counted."""
        return self._since is not None

    def begin(self) -> None:
        """Start to count `elapsed`: the preparation before this call does not count."""
        self._began = self._now() - self.elapsed_before

    def start(self) -> None:
        """Start or continue to count training time."""
        if self._since is None:
            self._since = self._now()

    def pause(self) -> None:
        """Stop counting training time."""
        self._trained, self._since = self.trained, None


def phases(totals: Mapping[str, float], stats: Stats) -> dict[str, float]:
    """Seconds of each phase of a rank so far, from a recorder's totals and the stats of a run.

    The sum is the wall-clock time, except for the time between phases.

    ```text
    compute      forward, backward and update, without waiting and encoding inside them
    exposed      communication that did not overlap with compute; in a pipeline also waiting for other stages
    codec        encoding and decoding that delayed this rank; work that overlapped with backward is not in it
    data         waiting for the next batch
    evaluation   with the wait for rank 0's result
    checkpoint   saving
    agreeing     asking the other ranks whether to stop
    ```

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
    inside = sum(totals.get(key, 0.0) for key in (FORWARD, BACKWARD, UPDATE, PIPELINE_STEP))
    return {
        "compute": inside - waited - stats.codec_before_seconds,
        "exposed": waited - stats.codec_within_seconds,
        "codec": codec,
        "data": totals.get(DATA, 0.0),
        "evaluation": totals.get(EVALUATION, 0.0),
        "checkpoint": totals.get(CHECKPOINT, 0.0),
        "agreeing": totals.get(AGREEING, 0.0),
    }
