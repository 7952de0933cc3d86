"""What a run's own log proves, recomputed from its lines.

```text
 run_start                        eval_start  sl_evaluation                       run_stop
 ──┴───┬───────────┬─────────┬────────┴────────────┴────────┬──────── … ────────────┴──►  seconds of rank 0's clock
   epoch_start   step 1    step 2                       elapsed as told               time_ms of the wall clock
```
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from syncline.bench.race.reading import RanRun

__all__ = ["Course", "close", "events", "loose", "number", "simulated", "since_start", "slack", "step_of", "wall_ms"]


@dataclass(frozen=True)
class Course:
    """The steps that a run must have taken, from its configuration: nothing here is read from its log.

    >>> course = Course(train=100, batch=32, epochs=2, steps=None, every=3)
    >>> course.epoch_steps, course.total, course.samples(5)
    (4, 8, 132)
    >>> course.evaluations(8)
    [3, 6, 8]
    """

    train: int
    batch: int
    """Samples of a step, all workers together."""
    epochs: int
    steps: int | None
    every: int | None

    @staticmethod
    def of(run: RanRun) -> Course | None:
        """None where the configuration does not say enough."""
        config = run.config
        try:
            batch = config.get("global_batch") or int(config["batch"]) * int(config["workers"])
            course = Course(
                train=int(config["samples"]["train"]),
                batch=int(batch),
                epochs=int(config["epochs"]),
                steps=config.get("steps"),
                every=config.get("evaluate_every"),
            )
        except (KeyError, TypeError, ValueError):
            return None
        return course if min(course.train, course.batch, course.epochs, course.every or 1) > 0 else None

    @property
    def epoch_steps(self) -> int:
        return -(-self.train // self.batch)

    @property
    def total(self) -> int:
        steps = self.epoch_steps * self.epochs
        return steps if self.steps is None else min(steps, self.steps)

    def samples(self, step: int) -> int:
        """All that were taken in so many steps; the last step of an epoch takes what is left."""
        whole, rest = divmod(step, self.epoch_steps)
        return whole * self.train + min(rest * self.batch, self.train)

    def evaluations(self, last: int) -> list[int]:
        """The steps after which a run that ended with step `last` had to evaluate."""
        every = self.every or self.epoch_steps
        return [*range(every, last, every), last]


def events(run: RanRun, key: str) -> list[dict[str, Any]]:
    """Every line of the log with this key."""
    return [event for event in run.events if event.get("key") == key]


def step_of(event: dict[str, Any]) -> int | None:
    """The step that a line is about."""
    metadata = event.get("metadata")
    step = metadata.get("step") if isinstance(metadata, dict) else None
    return step if isinstance(step, int) else None


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def close(one: Any, other: Any, tolerance: float = 1e-9) -> bool:
    """Equal; numbers to rounding."""
    left, right = number(one), number(other)
    if left is None or right is None:
        return bool(one == other)
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=1e-12)


def since_start(run: RanRun, event: dict[str, Any]) -> float | None:
    """Seconds from `run_start` to a line, by the stamps that every line has."""
    start = next((number(line.get("seconds")) for line in events(run, "run_start")), None)
    stamp = number(event.get("seconds"))
    return None if start is None or stamp is None else stamp - start


def loose(run: RanRun) -> bool:
    """Whether its workers went at their own pace: its steps are the mean of theirs, and an evaluator has looked."""
    return run.config.get("loose") is True


def wall_ms(run: RanRun) -> list[float]:
    """The wall-clock stamps of all lines."""
    return [stamp for stamp in (number(event.get("time_ms")) for event in run.events) if stamp is not None]


def simulated(run: RanRun) -> bool:
    """Whether its seconds are a simulator's, which have nothing to do with the wall clock."""
    world = run.system.get("world")
    return isinstance(world, dict) and world.get("engine") == "simulated"


def slack(run: RanRun, seconds: float) -> float:
    """How far two readings of this run's clock may lie apart that should be one; a simulator's do not at all."""
    return 1e-6 + 1e-6 * seconds if simulated(run) else 0.05 + 0.01 * seconds
