"""The state of an asynchronous run, read from the posts of its control channel.

| kind | posted by | values |
|---|---|---|
| `ready` | an evaluator process | none: it has the data and reads the channel |
| `start` | rank 0 | seconds before, rounds evaluated, seconds to the target (NaN), evaluations since it, seconds per sample (NaN) |
| `evaluator` | a worker | rank: it replaces a lost evaluator |
| `begins` | a worker | rank, the steps that it took before this attempt |
| `evaluation` | the evaluator | total rounds, samples, loss, metric, seconds since the start |
| `target`, `signal` | the evaluator, a worker | the reason why it called `request_stop()` |
| `arrived` | a worker | rank, its steps: it waits for a checkpoint |
| `decided` | the leader | these steps, 1 to save or 0 to continue |
| `staleness` | a worker | rank, then pairs: staleness, count |
| `finished` | a worker | rank, its last round |
| `over` | the leader | reason, whether to save, its last round |
| `test` | the evaluator | metric, loss, seconds: its last post; NaN if the run was stopped |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from syncline.control import ControlChannel
from syncline.training.run_state import StopReason

__all__ = ["REASONS", "ControlState", "EvaluationPost", "RoundCounter", "post_staleness"]

REASONS: tuple[StopReason, ...] = get_args(StopReason)
PAIRS_PER_POST = 11
"""Pairs of a staleness and its count in one post."""


@dataclass(frozen=True)
class RoundCounter:
    """Converts the steps of each worker to rounds and samples. A round is a step of all workers.

    ```text
    10 samples, 2 workers, 2 samples each     rank 0: ·· ·· ·      3 steps an epoch
                                              rank 1: ·· ·· ·      a worker without data in the last round has one less
    ```

    >>> counter = RoundCounter(train=9, batch=4, workers=2)
    >>> counter.rounds([3, 2]), counter.samples([3, 2]), counter.samples([4, 2])
    (6, 9, 11)
    """

    train: int
    batch: int
    """Samples of a round, of all workers together."""
    workers: int

    @property
    def epoch(self) -> int:
        """Rounds of an epoch."""
        return -(-self.train // self.batch)

    def rounds(self, steps: Sequence[int]) -> int:
        """Rounds that the workers have completed, summed over the workers."""
        total = 0
        for rank, count in enumerate(steps):
            epochs, rest = divmod(count, self._steps_per_epoch(rank))
            total += epochs * self.epoch + rest
        return total

    def samples(self, steps: Sequence[int]) -> int:
        """Samples that the workers have read in these steps."""
        total = 0
        for rank, count in enumerate(steps):
            epochs, rest = divmod(count, self._steps_per_epoch(rank))
            batch = self._share(self.batch, rank)
            total += epochs * self._samples_per_epoch(rank) + min(rest * batch, self._samples_per_epoch(rank))
        return total

    def _steps_per_epoch(self, rank: int) -> int:
        """Rounds of an epoch that have data for this worker."""
        full, rest = divmod(self.train, self.batch)
        return max(1, full + (rest > rank))

    def _samples_per_epoch(self, rank: int) -> int:
        full, rest = divmod(self.train, self.batch)
        return full * self._share(self.batch, rank) + self._share(rest, rank)

    def _share(self, samples: int, rank: int) -> int:
        return max(0, -(-(samples - rank) // self.workers))


class EvaluationPost(NamedTuple):
    """The result of an evaluation, as the evaluator posts it."""

    rounds: int
    """Summed over the workers."""
    samples: int
    loss: float
    metric: float
    elapsed: float


@dataclass
class ControlState:
    """What the posts of a channel have said so far. Each task that reads the channel has its own."""

    channel: ControlChannel
    since: int = 0
    """The number of the last post that was read."""
    ready: bool = False
    start: tuple[float, ...] | None = None
    evaluator: int | None = None
    """The worker that evaluates; None for the evaluator process, or rank 0."""
    evaluations: list[EvaluationPost] = field(default_factory=list)
    signal: bool = False
    target: bool = False
    begins: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, dict[int, int]] = field(default_factory=dict)
    over: tuple[StopReason, int | None] | None = None
    """The reason, and the step under which all save; None if no worker saves."""
    test: tuple[float, ...] | None = None

    def read(self) -> None:
        """Read the new posts. Unknown kinds are ignored: checkpoints and barriers use the channel too."""
        for post in self.channel.read_posts(self.since):
            self.since = max(self.since, post.number)
            self._apply(post.kind, post.values)

    def _apply(self, kind: str, values: Sequence[float]) -> None:
        if kind == "evaluation":
            rounds, samples, loss, metric, elapsed = values[:5]
            self.evaluations.append(EvaluationPost(int(rounds), int(samples), loss, metric, elapsed))
        elif kind == "start":
            self.start = tuple(values)
        elif kind == "evaluator":
            self.evaluator = int(values[0])
        elif kind in ("ready", "signal", "target"):
            setattr(self, kind, True)
        elif kind == "begins":
            self.begins[int(values[0])] = int(values[1])
        elif kind == "arrived":
            self.arrived.setdefault(int(values[1]), set()).add(int(values[0]))
        elif kind == "decided":
            self.decided.setdefault(int(values[0]), bool(values[1]))
        elif kind == "staleness":
            counts = self.staleness.setdefault(int(values[0]), {})
            counts |= {int(key): int(count) for key, count in zip(values[1::2], values[2::2], strict=True)}
        elif kind == "finished":
            self.finished[int(values[0])] = int(values[1])
        elif kind == "over" and self.over is None:
            self.over = (REASONS[int(values[0])], int(values[2]) if values[1] else None)
        elif kind == "test":
            self.test = tuple(values)


def post_staleness(channel: ControlChannel, rank: int, counts: Mapping[int, int]) -> None:
    """Post how often this worker's gradients had which staleness."""
    pairs = sorted(counts.items())
    for start in range(0, len(pairs), PAIRS_PER_POST):
        flat = [number for pair in pairs[start : start + PAIRS_PER_POST] for number in pair]
        channel.post("staleness", [rank, *flat])
