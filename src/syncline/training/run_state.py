"""The state of a run: how far the loop is, the clock, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["LoopState", "Outcome", "StopReason", "TrainingClock"]

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
