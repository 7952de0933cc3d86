"""The evaluator: looks at the weights of a loose run while the workers go on, and says when the target is reached.

```text
worker 0   step step step step step step step step step step │ finished
worker 1   step   step   step   step   step   step   step    │ finished      over
evaluator  ······ weights ── evaluates ── post ··· weights ──│─ target: stop ──┴── tests ── post
```

It is a separate process if the launcher started one, else a task of rank 0. If it is lost, the lowest worker that is
not lost runs another as a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from typing import cast

from torch import nn
from torch.utils.data import Dataset

from syncline.errors import IncompatibleError, PeerLostError
from syncline.runtime import Runtime
from syncline.server.network import read_roles, server_network
from syncline.strategies import Strategy
from syncline.strategies.control import ControlChannel
from syncline.training.notes import Evaluation, Notes, Tally
from syncline.training.outcome import At
from syncline.training.pace import FORWARD
from syncline.training.settings import Settings
from syncline.workloads.base import Batch, Workload
from syncline.world import init

__all__ = ["Evaluator", "is_evaluator", "observe", "wants_evaluator"]

SHORTEST = 1e-3
"""Seconds between two looks at the board, at least."""
LONGEST = 0.25
"""And at most, unless a step takes longer."""


class Evaluator:
    """Evaluates whenever the workers together have passed the next multiple of `evaluate_every` steps each.

    `clock` gives the seconds since the run began, where this process has the same clock as rank 0. Without it rank 0
    waits until the evaluator is ready, and the beginning is taken to be the last look at the board that did not find it
    yet: never later than it was. `start` are the values of the post "start", for one that takes the place of another.
    """

    def __init__(
        self,
        board: ControlChannel,
        workload: Workload,
        settings: Settings,
        model: nn.Module,
        *,
        workers: int,
        runtime: Runtime,
        timeout: float,
        clock: Callable[[], float] | None = None,
        start: Sequence[float] | None = None,
    ) -> None:
        self._board, self._workload, self._settings, self._model = board, workload, settings, model
        self._runtime, self._timeout = runtime, timeout
        self._start = start
        self._clock = clock
        self._tally = Tally(workload.splits().sizes()["train"], settings.a_step(workers), workers)
        every = self._tally.epoch if settings.evaluate_every is None else settings.evaluate_every
        self._every = every * workers
        self._notes = Notes(board)
        self._at = At()
        self._evaluated = -1
        """Rounds that the weights had behind them when they were last evaluated."""
        self._filled = False
        """Whether the model holds weights of this run."""
        self._a_sample = 0.0
        self._rate = 0.0
        """Rounds a second, of all workers together, between the latest looks."""

    def run(self) -> None:
        """Go on until the run is over; the last word is the post "test"."""
        self._take_up(self._await_start() if self._start is None else self._start)
        due = (max(0, self._evaluated) // self._every + 1) * self._every
        gap, seen, moved = SHORTEST, -1, self._runtime.now()
        while self._notes.over is None:
            steps = self._board.steps()
            rounds, now = self._tally.rounds(steps), self._runtime.now()
            if rounds > seen:
                self._rate = (rounds - seen) / (now - moved) if seen >= 0 and now > moved else self._rate
                seen, moved = rounds, now
            elif now - moved > self._timeout:
                raise PeerLostError(
                    f"the evaluator has seen no step of any worker for {self._timeout:g} s (steps: {steps}), and "
                    "nobody has said that the run is over",
                    pending="the next step",
                    seconds=now - moved,
                )
            if rounds >= due and not self._at.satisfied(self._settings.evaluations_after):
                self._evaluate()
                due = (self._evaluated // self._every + 1) * self._every
            else:
                gap = self._pause(due - rounds, gap)
            self._notes.read()
        self._conclude()

    def _pause(self, left: int, gap: float) -> float:
        """Sleep for about half of the time that is left; how long it was."""
        longest = max(LONGEST, 1 / self._rate) if self._rate else LONGEST
        wanted = left / self._rate / 2 if self._rate and left > 0 else 2 * gap
        gap = min(max(wanted, SHORTEST), longest)
        self._runtime.sleep(gap)
        return gap

    def _await_start(self) -> Sequence[float]:
        """Wait for the post "start" and return its values. It also sets this process's clock to rank 0's."""
        begun = before = self._runtime.now()
        self._workload.splits()
        if self._clock is None:
            before = self._runtime.now()  # rank 0 begins after it has read this
            self._board.post("ready", [])
        while True:
            asked = self._runtime.now()
            self._notes.read()
            if self._notes.start is not None:
                break
            if asked - begun > self._timeout:
                raise PeerLostError(
                    f"the evaluator has waited {self._timeout:g} s for rank 0 to begin the run", peer=0,
                    pending="the post 'start'", seconds=asked - begun,
                )  # fmt: skip
            before = asked
            self._runtime.sleep(SHORTEST)
        if self._clock is None:
            zero, now = before - self._notes.start[0], self._runtime.now
            self._clock = lambda: now() - zero
        return self._notes.start

    def _take_up(self, start: Sequence[float]) -> None:
        """Continue after the evaluations of an earlier run or of a lost evaluator."""
        _, evaluated, reached, since, a_sample = start
        self._evaluated = int(evaluated)
        self._at.time_to_target = None if math.isnan(reached) else reached
        self._at.since_target = int(since)
        self._a_sample = 0.0 if math.isnan(a_sample) else a_sample
        self._notes.read()
        self._stop_if_satisfied(math.nan)

    def _evaluate(self) -> None:
        """Look at the weights as they are now, and tell what is found."""
        # Counted before the weights are fetched: these have at least so many steps behind them.
        steps = self._board.steps()
        self._fetch()
        self._evaluated = self._tally.rounds(steps)
        found = self._measure(self._workload.splits().validation)
        assert self._clock is not None, "the run has begun"
        metric, elapsed = found[self._workload.metric], self._clock()
        told = Evaluation(self._evaluated, self._tally.samples(steps), found.get("loss", math.nan), metric, elapsed)
        self._board.post("evaluation", told.values())
        target = self._settings.target
        self._at.judge(metric, elapsed, target is not None and self._workload.reached(metric, target))
        self._stop_if_satisfied(metric)

    def _stop_if_satisfied(self, metric: float) -> None:
        """End the run if its target was reached and the run was not ended yet."""
        if self._at.satisfied(self._settings.evaluations_after) and not self._board.stop_requested():
            self._board.post("target", [metric])
            self._board.request_stop()

    def _conclude(self) -> None:
        """The weights that the workers ended with; where the target ended the run, those that reached it."""
        assert self._notes.over is not None, "the loop ends with it"
        assert self._clock is not None, "the run has begun"
        found: dict[str, float] = {}
        if self._notes.over[0] != "signal":
            fresh = self._tally.rounds(self._board.steps()) != self._evaluated
            if fresh and not self._at.satisfied(self._settings.evaluations_after):
                self._evaluate()
            if not self._filled:  # a run that goes on after its end
                self._fetch()
            found = self._measure(self._workload.splits().test)
        metric, loss = found.get(self._workload.metric, math.nan), found.get("loss", math.nan)
        self._board.post("test", [metric, loss, self._clock()])

    def _fetch(self) -> None:
        self._board.load_weights(self._model)
        self._filled = True

    def _measure(self, dataset: Dataset[Batch]) -> dict[str, float]:
        if self._a_sample:
            self._runtime.sleep(FORWARD * self._a_sample * len(cast(Sized, dataset)))
        return self._workload.evaluate(self._model, dataset)


def wants_evaluator(strategy: Strategy) -> bool:
    """Whether a launcher should start a process that evaluates: others see this strategy's weights too.

    >>> from syncline.strategies import AllReduce
    >>> wants_evaluator(AllReduce())
    False
    """
    return strategy.asynchronous and type(strategy).observe is not Strategy.observe


def is_evaluator() -> bool:
    """Whether the launcher has started this process to evaluate."""
    return read_roles().role == "evaluator"


def observe(workload: Workload, settings: Settings, strategy: Strategy) -> None:
    """What an evaluator's process does: join the servers' network, and evaluate until the run is over."""
    workers = read_roles().workers
    with init("single") as world:
        settings = settings.resolved(workload, workers)
        model = workload.model(settings.seed)
        board = strategy.observe(model, server_network(world))
        if board is None:
            raise IncompatibleError(
                f"{strategy!r} shows its weights to its own workers alone: start no process to evaluate it"
            )
        timeout = world.transport.timeout
        try:
            Evaluator(board, workload, settings, model, workers=workers, runtime=world.runtime, timeout=timeout).run()
        finally:
            board.close()
