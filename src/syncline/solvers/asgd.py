"""`sl.solvers.asgd`: k-means, regressions and other objectives by one-sided asynchronous SGD.

    worker 0   Δ step put ·· Δ step put ·· Δ step put ·· ┐
    worker 1   Δ  step  put ·· Δ  step  put ············ ┤ the agreed state
    worker 2   Δ step put ·· Δ step put ·· Δ step put ·· ┘
                    ▲ reads its own receive buffers; no worker waits for another before the end

Keuper, Pfreundt: Asynchronous Parallel Stochastic Gradient Descent (2015); Balancing the Communication Load of
Asynchronously Parallelized Machine Learning Algorithms (2015) for the size of the mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from syncline.errors import DivergedError, SpecError
from syncline.solvers.base import Data, Effort, Objective, Solution, conclude, first_state, own_share
from syncline.specs import nearest
from syncline.strategies.onesided.mailslots import Mailslots, on_same_host
from syncline.strategies.onesided.update import Array, step
from syncline.world import World, allgather, allreduce, broadcast, current_world

__all__ = ["FINALS", "AsgdOptions", "Final", "agree", "asgd"]

Final = Literal["mean", "first", "best"]
FINALS = ("mean", "first", "best")
BATCH_GROWTH, BATCH_SHRINKAGE = 1.25, 0.9
"""Factors of the mini-batch size while an earlier put is in flight, and while none is."""
COMPARED_SAMPLES = 10_000
"""Samples of each worker on which `final="best"` compares the states."""


@dataclass(frozen=True, kw_only=True)
class AsgdOptions:
    """The options of `asgd`."""

    rate: float = 0.1
    rate_end: float | None = None
    batch: int = 500
    batch_most: int | None = None
    epochs: float = 1.0
    seconds: float | None = None
    buffers: int = 4
    part: float = 1.0
    every: int = 1
    final: Final = "mean"
    seed: int = 0
    cost: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "epochs", "part", "rate_end", "seconds"):
            value = getattr(self, name)
            if value is None and name in ("rate_end", "seconds"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise SpecError(f"asgd({name}={value!r}): a number above 0")
        if self.part > 1:
            raise SpecError(f"asgd(part={self.part!r}): a share of the state, at most 1")
        for name in ("batch", "buffers", "every", "batch_most"):
            value = getattr(self, name)
            if value is None and name == "batch_most":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"asgd({name}={value!r}): a whole number, at least 1")
        if self.batch_most is not None and self.batch_most < self.batch:
            raise SpecError(f"asgd(batch={self.batch}, batch_most={self.batch_most}): the most is less than the least")
        if self.final not in FINALS:
            raise SpecError(f"asgd: unknown final {self.final!r}; {nearest(str(self.final), list(FINALS))}")

    def rate_at(self, progress: float) -> float:
        """The step size when this share of the work is done: from `rate` to `rate_end` by equal factors.

        >>> AsgdOptions(rate=0.4, rate_end=0.1).rate_at(0.5)
        0.2
        """
        end = self.rate if self.rate_end is None else self.rate_end
        return float(self.rate * (end / self.rate) ** min(progress, 1.0))

    def next_batch(self, batch: int, in_flight: int) -> int:
        """The size of the next mini-batch: larger while puts are in flight, smaller while none is, within its bounds.

        >>> adaptive = AsgdOptions(batch=100, batch_most=400)
        >>> adaptive.next_batch(100, in_flight=1), adaptive.next_batch(400, in_flight=2), adaptive.next_batch(200, 0)
        (125, 400, 180)
        """
        if self.batch_most is None:
            return self.batch
        wanted = math.ceil(batch * BATCH_GROWTH) if in_flight else int(batch * BATCH_SHRINKAGE)
        return min(max(wanted, self.batch), self.batch_most)


def asgd(
    objective: Objective,
    data: Any,
    *,
    rate: float = 0.1,
    rate_end: float | None = None,
    batch: int = 500,
    batch_most: int | None = None,
    epochs: float = 1.0,
    seconds: float | None = None,
    buffers: int = 4,
    part: float = 1.0,
    every: int = 1,
    final: Final = "mean",
    start: Any = None,
    split: bool = True,
    seed: int = 0,
    cost: Callable[[int], float] | None = None,
) -> Solution:
    """Minimise `objective` over the data of all workers, each at its own pace. All return the same solution.

    Every worker calls it, on MPI, on the simulator or alone. Other backends have no one-sided memory
    (`UnsupportedError`). All workers pass the same data, of which each uses its share, or with `split=False` their own.

    A worker reads its samples `epochs` times, or until `seconds` have passed, in mini-batches of `batch`. The step size
    goes from `rate` to `rate_end`, if that is given. After every `every` mini-batches it puts its state, or a random
    contiguous `part` of it, into one of the `buffers` of a random other worker. With `batch_most` the mini-batch grows
    by a quarter while an earlier put is in flight, and shrinks by a tenth while none is. At the end the workers agree
    on the `final` "mean" of the states, on that of the "first" worker (as in the paper), or on the "best" one.
    `cost` gives the seconds of a mini-batch of so many samples in simulated time. Without it no time passes there, and
    nothing arrives before the end.

    >>> import numpy as np, syncline as sl
    >>> from syncline.solvers import KMeans
    >>> points = np.random.default_rng(0).normal(size=(4000, 2)) + np.repeat([[0, 0], [9, 9]], 2000, axis=0)
    >>> def solve(world):
    ...     return asgd(KMeans(2), points, batch=50, cost=lambda samples: 1e-6 * samples)
    >>> found = sl.simulate(solve, ranks=4).results[0]
    >>> round(found.value, 1), [effort.steps for effort in found.efforts], found.total("accepted") > 0
    (2.0, [20, 20, 20, 20], True)
    """
    options = AsgdOptions(
        rate=rate,
        rate_end=rate_end,
        batch=batch,
        batch_most=batch_most,
        epochs=epochs,
        seconds=seconds,
        buffers=buffers,
        part=part,
        every=every,
        final=final,
        seed=seed,
        cost=cost,
    )
    world = current_world()
    own = own_share(data, world, split)
    state = first_state(objective, own, start, seed, world)
    slots = Mailslots(world.transport, len(state), np.float64, buffers, same_host=on_same_host(world))
    worker = _Worker(world, objective, own, options, slots)
    state = worker.run(state)
    slots.close()
    agreed = agree(objective, own, state, final, world)
    return conclude(objective, agreed, own, worker.effort())


class _Worker:
    """The loop of one worker."""

    def __init__(self, world: World, objective: Objective, own: Data, options: AsgdOptions, slots: Mailslots) -> None:
        self._world, self._objective, self._own, self._options, self._slots = world, objective, own, options, slots
        self._random = np.random.default_rng([options.seed, world.rank])
        self._order = np.empty(0, np.int64)
        self._place = 0
        self._batch = options.batch
        self._steps = self._samples = self._accepted = self._rejected = 0
        self._seconds = 0.0
        self._budget = max(1, round(options.epochs * len(own[0])))

    def run(self, state: Array) -> Array:
        """Step until the work is done. Returns the last state."""
        options, slots, now = self._options, self._slots, self._world.runtime.now
        begun = now()
        while (progress := self._progress(now() - begun)) < 1.0:
            batch = self._take()
            self._pass_time(len(batch[0]))
            rate = options.rate_at(progress)
            with np.errstate(over="ignore", invalid="ignore"):  # a state that is not finite raises below
                move = rate * self._objective.delta(state, batch)
                state, accepted = step(state, move, rate, slots.collect())
            self._accepted += sum(accepted)
            self._rejected += len(accepted) - sum(accepted)
            self._steps += 1
            if not np.isfinite(state).all():
                rank = self._world.rank
                raise DivergedError(
                    f"the state of rank {rank} is not finite",
                    rank=rank,
                    step=self._steps,
                    remedy=f"lower the rate, which is {rate:g}",
                )
            if self._steps % options.every == 0 and self._world.size > 1:
                self._batch = options.next_batch(self._batch, slots.in_flight)
                self._send(state)
        self._seconds = now() - begun
        return state

    def effort(self) -> Effort:
        """The counts of this worker."""
        counts = self._slots.counts
        return Effort(
            steps=self._steps,
            samples=self._samples,
            accepted=self._accepted,
            rejected=self._rejected,
            torn=counts.torn,
            sent=counts.sent,
            dropped=counts.dropped,
            sent_bytes=counts.sent_bytes,
            batch=self._batch,
            seconds=self._seconds,
        )

    def _progress(self, elapsed: float) -> float:
        done = self._samples / self._budget
        return done if self._options.seconds is None else max(done, elapsed / self._options.seconds)

    def _take(self) -> Data:
        """The next mini-batch. The order is drawn again for each pass over the samples."""
        if self._place >= len(self._order):
            self._order, self._place = self._random.permutation(len(self._own[0])), 0
        size = min(self._batch, self._budget - self._samples)
        chosen = self._order[self._place : self._place + size]
        self._place += len(chosen)
        self._samples += len(chosen)
        return tuple(each[chosen] for each in self._own)

    def _pass_time(self, samples: int) -> None:
        cost, simulated = self._options.cost, self._world.transport.timing.virtual
        if cost is not None:
            self._world.compute(cost(samples))
        elif simulated:
            self._world.compute(0.0)  # let other simulated ranks run

    def _send(self, state: Array) -> None:
        """Put the state, or a part of it, into a buffer of one other worker."""
        rank, size = self._world.rank, self._world.size
        to = (rank + int(self._random.integers(1, size))) % size
        count = max(1, round(self._options.part * len(state)))
        first = int(self._random.integers(len(state) - count + 1))
        self._slots.post(state, to, first, count)


def agree(objective: Objective, own: Data, state: Array, final: Final, world: World) -> Array:
    """One state from those of all workers."""
    mine = torch.from_numpy(state)
    if world.size == 1:
        return state
    if final == "mean":
        return np.asarray(allreduce(mine, op="mean").numpy())
    if final == "first":
        return np.asarray(broadcast(mine.clone()).numpy())
    states = allgather(mine.view(1, -1)).numpy()
    sample = tuple(each[:: max(1, len(each) // COMPARED_SAMPLES)] for each in own)
    count = len(sample[0])
    values = torch.tensor([count * objective.value(each, sample) for each in states], dtype=torch.float64)
    return np.asarray(states[int(allreduce(values, op="sum").argmin())])
