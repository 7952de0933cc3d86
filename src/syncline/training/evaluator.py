"""The evaluator of an asynchronous run: evaluates the weights while the workers train, and stops them at the target.

```text
worker 0   step step step step step step step step step step │ finished
worker 1   step   step   step   step   step   step   step    │ finished      over
evaluator  ······ weights ── evaluates ── post ··· weights ──│─ target: stop ──┴── tests ── post
```

It is a separate process if the launcher started one, else a task of rank 0. If it is lost, the lowest worker that is
not lost replaces it by a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from typing import cast

from torch import nn
from torch.utils.data import Dataset

from syncline.control import ControlChannel
from syncline.errors import IncompatibleError, PeerLostError
from syncline.runtime import Runtime
from syncline.server.network import read_roles, server_network
from syncline.strategies import Strategy
from syncline.training.control_state import ControlState, EvaluationPost, RoundCounter
from syncline.training.run_state import LoopState
from syncline.training.settings import Settings
from syncline.training.stragglers import FORWARD_SHARE
from syncline.workloads.base import Batch, Workload
from syncline.world import init

__all__ = ["Evaluator", "is_evaluator", "observe", "wants_evaluator"]

MIN_POLL_S = 1e-3
"""Shortest interval between two reads of the channel."""
MAX_POLL_S = 0.25
"""Longest interval, unless a step takes longer."""


class Evaluator:
    """Evaluates each time the workers have taken, on average, another `evaluate_every` steps.

    `clock` returns the seconds since the start of the run, if this process shares rank 0's clock. Without it, rank 0
    waits until the evaluator is ready. The start is then the last read of the channel without the post "start", which
    is never too late. `start` has the values of that post, for an evaluator that replaces another.
    """

    def __init__(
        self,
        channel: ControlChannel,
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
        self._channel, self._workload, self._settings, self._model = channel, workload, settings, model
        self._runtime, self._timeout = runtime, timeout
        self._start = start
        self._clock = clock
        self._counter = RoundCounter(workload.splits().sizes()["train"], settings.samples_per_step(workers), workers)
        every = self._counter.epoch if settings.evaluate_every is None else settings.evaluate_every
        self._every = every * workers
        self._control = ControlState(channel)
        self._state = LoopState()
        self._evaluated = -1
        """Rounds of the weights that were evaluated last."""
        self._filled = False
        """Whether the model has weights of this run."""
        self._seconds_per_sample = 0.0
        self._rate = 0.0
        """Rounds per second, of all workers together, between the latest reads."""

    def run(self) -> None:
        """Evaluate until the run is over. The last post is "test"."""
        self._continue_from(self._await_start() if self._start is None else self._start)
        due = (max(0, self._evaluated) // self._every + 1) * self._every
        gap, seen, moved = MIN_POLL_S, -1, self._runtime.now()
        while self._control.over is None:
            steps = self._channel.steps()
            rounds, now = self._counter.rounds(steps), self._runtime.now()
            if rounds > seen:
                self._rate = (rounds - seen) / (now - moved) if seen >= 0 and now > moved else self._rate
                seen, moved = rounds, now
            elif now - moved > self._timeout:
                raise PeerLostError(
                    f"the evaluator has seen no step of any worker for {self._timeout:g} s (steps: {steps}), and "
                    "the run is not over",
                    pending="the next step",
                    seconds=now - moved,
                )
            if rounds >= due and not self._state.target_confirmed(self._settings.evaluations_after):
                self._evaluate()
                due = (self._evaluated // self._every + 1) * self._every
            else:
                gap = self._pause(due - rounds, gap)
            self._control.read()
        self._conclude()

    def _pause(self, left: int, gap: float) -> float:
        """Sleep for about half of the time until the next evaluation. Returns the seconds."""
        longest = max(MAX_POLL_S, 1 / self._rate) if self._rate else MAX_POLL_S
        wanted = left / self._rate / 2 if self._rate and left > 0 else 2 * gap
        gap = min(max(wanted, MIN_POLL_S), longest)
        self._runtime.sleep(gap)
        return gap

    def _await_start(self) -> Sequence[float]:
        """Wait for the post "start" and return its values. It also sets this process's clock to rank 0's."""
        began = before = self._runtime.now()
        self._workload.splits()
        if self._clock is None:
            before = self._runtime.now()  # rank 0 starts after it has read this
            self._channel.post("ready", [])
        while True:
            asked = self._runtime.now()
            self._control.read()
            if self._control.start is not None:
                break
            if asked - began > self._timeout:
                raise PeerLostError(
                    f"the evaluator has waited {self._timeout:g} s for rank 0 to start the run", peer=0,
                    pending="the post 'start'", seconds=asked - began,
                )  # fmt: skip
            before = asked
            self._runtime.sleep(MIN_POLL_S)
        if self._clock is None:
            zero, now = before - self._control.start[0], self._runtime.now
            self._clock = lambda: now() - zero
        return self._control.start

    def _continue_from(self, start: Sequence[float]) -> None:
        """Continue after the evaluations of an earlier run or of a lost evaluator."""
        _, evaluated, reached, since, seconds_per_sample = start
        self._evaluated = int(evaluated)
        self._state.time_to_target = None if math.isnan(reached) else reached
        self._state.since_target = int(since)
        self._seconds_per_sample = 0.0 if math.isnan(seconds_per_sample) else seconds_per_sample
        self._control.read()
        self._stop_if_satisfied(math.nan)

    def _evaluate(self) -> None:
        """Evaluate the current weights, and post the result."""
        # Counted before the weights are read, so these have at least as many steps.
        steps = self._channel.steps()
        self._fetch()
        self._evaluated = self._counter.rounds(steps)
        measures = self._measure(self._workload.splits().validation)
        assert self._clock is not None, "the run has started"
        metric, elapsed = measures[self._workload.metric], self._clock()
        post = EvaluationPost(
            self._evaluated, self._counter.samples(steps), measures.get("loss", math.nan), metric, elapsed
        )
        self._channel.post("evaluation", post)
        target = self._settings.target
        self._state.record(metric, elapsed, target is not None and self._workload.reached(metric, target))
        self._stop_if_satisfied(metric)

    def _stop_if_satisfied(self, metric: float) -> None:
        """Stop the run if its target is reached and it was not stopped yet."""
        if self._state.target_confirmed(self._settings.evaluations_after) and not self._channel.stop_requested():
            self._channel.post("target", [metric])
            self._channel.request_stop()

    def _conclude(self) -> None:
        """Test the final weights; if the target ended the run, the weights that reached it."""
        assert self._control.over is not None, "the loop in run() ends with it"
        assert self._clock is not None, "the run has started"
        measures: dict[str, float] = {}
        if self._control.over[0] != "signal":
            fresh = self._counter.rounds(self._channel.steps()) != self._evaluated
            if fresh and not self._state.target_confirmed(self._settings.evaluations_after):
                self._evaluate()
            if not self._filled:  # a run that is resumed after its end
                self._fetch()
            measures = self._measure(self._workload.splits().test)
        metric, loss = measures.get(self._workload.metric, math.nan), measures.get("loss", math.nan)
        self._channel.post("test", [metric, loss, self._clock()])

    def _fetch(self) -> None:
        self._channel.load_weights(self._model)
        self._filled = True

    def _measure(self, dataset: Dataset[Batch]) -> dict[str, float]:
        if self._seconds_per_sample:
            self._runtime.sleep(FORWARD_SHARE * self._seconds_per_sample * len(cast(Sized, dataset)))
        return self._workload.evaluate(self._model, dataset)


def wants_evaluator(strategy: Strategy) -> bool:
    """Whether the launcher should start a process that evaluates: another process can read this strategy's weights.

    >>> from syncline.strategies import AllReduce
    >>> wants_evaluator(AllReduce())
    False
    """
    return strategy.asynchronous and type(strategy).observe is not Strategy.observe


def is_evaluator() -> bool:
    """Whether the launcher has started this process to evaluate."""
    return read_roles().role == "evaluator"


def observe(workload: Workload, settings: Settings, strategy: Strategy) -> None:
    """The program of an evaluator process: join the servers' network, and evaluate until the run is over."""
    workers = read_roles().workers
    with init("single") as world:
        settings = settings.resolved(workload, workers)
        model = workload.model(settings.seed)
        channel = strategy.observe(model, server_network(world))
        if channel is None:
            raise IncompatibleError(
                f"{strategy!r} shows its weights to its own workers only: start no process to evaluate it"
            )
        timeout = world.transport.timeout
        try:
            Evaluator(channel, workload, settings, model, workers=workers, runtime=world.runtime, timeout=timeout).run()
        finally:
            channel.close()
