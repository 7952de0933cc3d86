"""What the board of a loose run has said so far, sorted by what it is about.

| kind | who posts it | values |
|---|---|---|
| `ready` | an evaluator of its own process | nothing: it has the data and looks at the board |
| `start` | rank 0 | seconds before, total steps evaluated, seconds to the target (NaN), evaluations since it, seconds a sample (NaN) |
| `evaluator` | a worker | rank: it evaluates in place of a lost evaluator |
| `begins` | a worker | rank, the steps that it has taken before this attempt |
| `evaluation` | the evaluator | total rounds, samples, loss, metric, seconds since the start |
| `target`, `signal` | the evaluator, a worker | that it has called `stop()`, and why |
| `arrived` | a worker | rank, its steps: it waits for a checkpoint |
| `decided` | the leader | these steps, 1 to save or 0 to go on |
| `staleness` | a worker | rank, then pairs: staleness, how often |
| `finished` | a worker | rank, its last round |
| `over` | the leader | reason, whether to save, its last round |
| `test` | the evaluator | metric, loss, seconds: its last word; NaN where the run was stopped |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from syncline.strategies.control import ControlChannel
from syncline.training.outcome import Reason

__all__ = ["REASONS", "Evaluation", "Notes", "Tally", "post_staleness"]

REASONS: tuple[Reason, ...] = get_args(Reason)
PAIRS = 11
"""Of a staleness and its count in one post."""


@dataclass(frozen=True)
class Tally:
    """How far workers are, from the steps that each has taken; a round is a step of all.

    ```text
    10 samples, 2 workers, 2 samples each     rank 0: ·· ·· ·      3 steps an epoch
                                              rank 1: ·· ·· ·      a worker with nothing in the last round has one less
    ```

    >>> tally = Tally(train=9, batch=4, workers=2)
    >>> tally.rounds([3, 2]), tally.samples([3, 2]), tally.samples([4, 2])
    (6, 9, 11)
    """

    train: int
    batch: int
    """Samples of a round, all workers together."""
    workers: int

    @property
    def epoch(self) -> int:
        """Rounds of an epoch."""
        return -(-self.train // self.batch)

    def rounds(self, steps: Sequence[int]) -> int:
        """Rounds that the workers have behind them, summed up."""
        found = 0
        for rank, taken in enumerate(steps):
            whole, rest = divmod(taken, self._own(rank))
            found += whole * self.epoch + rest
        return found

    def samples(self, steps: Sequence[int]) -> int:
        """Samples that went into so many steps of each."""
        found = 0
        for rank, taken in enumerate(steps):
            whole, rest = divmod(taken, self._own(rank))
            full = self._share(self.batch, rank)
            found += whole * self._in_epoch(rank) + min(rest * full, self._in_epoch(rank))
        return found

    def _own(self, rank: int) -> int:
        """Steps of an epoch that have something for this worker."""
        full, rest = divmod(self.train, self.batch)
        return max(1, full + (rest > rank))

    def _in_epoch(self, rank: int) -> int:
        full, rest = divmod(self.train, self.batch)
        return full * self._share(self.batch, rank) + self._share(rest, rank)

    def _share(self, samples: int, rank: int) -> int:
        return max(0, -(-(samples - rank) // self.workers))


@dataclass(frozen=True)
class Evaluation:
    """What the evaluator has found, as it posts it."""

    rounds: int
    """Summed up over the workers."""
    samples: int
    loss: float
    metric: float
    elapsed: float

    def values(self) -> tuple[float, ...]:
        return (self.rounds, self.samples, self.loss, self.metric, self.elapsed)


@dataclass
class Notes:
    """Reads a board on, and keeps what matters. One reader for each task that wants to know."""

    board: ControlChannel
    since: int = 0
    ready: bool = False
    start: tuple[float, ...] | None = None
    evaluator: int | None = None
    """The worker that evaluates; None for the evaluator's process, or rank 0."""
    evaluations: list[Evaluation] = field(default_factory=list)
    signal: bool = False
    target: bool = False
    begins: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, dict[int, int]] = field(default_factory=dict)
    over: tuple[Reason, int | None] | None = None
    """The reason, and the step under which all save; None if no worker saves."""
    test: tuple[float, ...] | None = None

    def read(self) -> None:
        """Take in what is new. Kinds that nobody here knows pass by."""
        for post in self.board.read_posts(self.since):
            self.since = max(self.since, post.number)
            self._take(post.kind, post.values)

    def _take(self, kind: str, values: Sequence[float]) -> None:
        if kind == "evaluation":
            rounds, samples, loss, metric, elapsed = values[:5]
            self.evaluations.append(Evaluation(int(rounds), int(samples), loss, metric, elapsed))
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


def post_staleness(board: ControlChannel, rank: int, counts: Mapping[int, int]) -> None:
    """Tell all how often this worker met which staleness."""
    pairs = sorted(counts.items())
    for place in range(0, len(pairs), PAIRS):
        flat = [number for pair in pairs[place : place + PAIRS] for number in pair]
        board.post("staleness", [rank, *flat])
