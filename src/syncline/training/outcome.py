"""What came of a run, and where it is while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["At", "Outcome", "Reason"]

Reason = Literal["target", "epochs", "steps", "signal"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run; the same on every rank, but for the counts of a loose run.

    `seconds` is training alone; `time_to_target` is all that passed until an evaluation found the target reached,
    earlier evaluations and checkpoints too, and None where none did. `test` is None where the run was stopped. In a
    loose run `seconds`, `elapsed`, `epochs` and `steps` are this worker's own.
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
    stopped_by: Reason


@dataclass
class At:
    """Where a run is: what a checkpoint keeps of the loop. Counts are the same on every rank, unless it is loose.

    >>> at = At()
    >>> at.judge(0.5, elapsed=1.0, reached=False), at.judge(0.9, elapsed=2.0, reached=True)
    (None, None)
    >>> at.judge(0.8, elapsed=3.0, reached=False)
    >>> at.time_to_target, at.since_target
    (2.0, 1)
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    """Since the beginning, all ranks together."""
    position: int = 0
    """Samples of this epoch, all ranks together."""
    validation: float | None = None
    evaluated: int = -1
    """The step of the latest evaluation."""
    time_to_target: float | None = None
    since_target: int = 0
    """Evaluations after the one that found the target reached."""

    def judge(self, validation: float, elapsed: float, reached: bool) -> None:
        """Take note of what an evaluation found."""
        self.validation = validation
        if self.time_to_target is not None:
            self.since_target += 1
        elif reached:
            self.time_to_target = elapsed

    def satisfied(self, evaluations_after: int) -> bool:
        """Whether the target was reached, and as many evaluations have followed as were asked for."""
        return self.time_to_target is not None and self.since_target >= evaluations_after
