"""Local SGD: workers train alone, and average their weights every `period` steps.

w_i ← w_i − η · g_i(w_i), and after every τ steps w_i ← (1/p) Σ w_j::

    step       1    2    3    4    5    6    …         period=2, after=2
    gradients  ●    ●                                  the first two steps average gradients: synchronous
    weights              ·    ●    ·    ●              then every second step averages weights

Local SGD: Stich, Local SGD converges fast and communicates little (2019); post-local: Lin et al., Don't use large
mini-batches, use local SGD (2020); with a random part of the workers in each round: McMahan et al., Communication-
efficient learning of deep networks from decentralized data (2017).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import ReductionPass, ReductionPolicy
from syncline.strategies.base import (
    Preset,
    RunReducer,
    Strategy,
    StrategyRun,
    check_counts,
    check_number,
    wide_dtype,
)
from syncline.strategies.local_weights import AveragingRun
from syncline.world import allreduce

__all__ = ["Local", "LocalRun"]

STATE_MODES = ("keep", "average", "reset")
CONSENSUS_EVERY_ROUNDS = 8
"""Interval in rounds at which the workers' distance from their mean is measured. It takes a small message."""


@dataclass(frozen=True, repr=False)
class Local(Strategy):
    """Local SGD with a fixed period.

    The first `after` steps are synchronous. `state` defines what a round does to the optimizer's state of each
    parameter: "keep" leaves each worker its own, "average" averages it with the weights, "reset" clears it. With
    `fraction` a random part of the workers counts in each round, drawn from `seed`; all workers load its mean.

    >>> Local(period=16)
    local(period=16)
    """

    period: int = 8
    after: int = 0
    state: Literal["keep", "average", "reset"] = "keep"
    fraction: float = 1.0
    seed: int = 0

    name: ClassVar[str] = "local"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="local(period=8)"),)

    def __post_init__(self) -> None:
        check_counts(self, period=1, after=0, seed=0)
        if self.state not in STATE_MODES:
            raise SpecError(f"local(state={self.state!r}): one of {', '.join(STATE_MODES)}")
        check_number(self, "fraction", "a part of the workers, above 0 and at most 1", lambda part: 0 < part <= 1)

    def run_type(self) -> type[StrategyRun]:
        return LocalRun


class LocalRun(AveragingRun):
    """Averages weights; `period` may change from round to round.

    With a codec or in half precision the workers average differences from the weights after the last round, because the
    mean of the weights themselves would be rounded in every round.
    """

    copies_weights = True

    @property
    def rule(self) -> Local:
        """The options of the rounds."""
        assert isinstance(self.strategy, Local), self.strategy
        return self.strategy

    def setup(self) -> None:
        super().setup()
        self.period = self.rule.period
        self._since = 0
        """Steps since the last round."""
        self._synchronous_for = self.rule.after
        self._base: list[Tensor] | None = None
        """The weights after the last round, if rounds average differences."""
        halves = any(wide_dtype(weight.dtype) != weight.dtype for weight in self.weights)
        if (self.communicator.codec is not None or halves) and not self.alone:
            self._base = [weight.clone() for weight in self.weights]
        self._reducer: RunReducer | None = None
        """Reduces the gradients of the synchronous steps."""
        if self._synchronous_for and not self.alone:
            self._reducer = self._make_reducer()
        self.deltas.prepare()

    def _make_reducer(self) -> RunReducer:
        return RunReducer(
            dict(self.model.named_parameters()),
            self.communicator,
            self.settings,
            ReductionPolicy(after_backward=self._reduced),
            codec=self.communicator.codec,
            find_unused_parameters=True,  # like the later rounds, which do not compare which parameters were used
        )

    # Steps.

    @property
    def first_exchange(self) -> int | None:
        return 1 if self._synchronous_for else self.period

    @property
    def synchronous(self) -> bool:
        """Whether the next step averages gradients."""
        return self.stats.steps < self._synchronous_for

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """Has an effect in the first `after` steps only. Later each worker steps on its own batch of any size."""
        if self._reducer is not None:
            self._reducer.weight, self._reducer.uneven = weight, uneven

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self._reducer is None else self._reducer.paused()

    def _reduced(self, reduction: ReductionPass) -> None:
        """A backward pass of the first `after` steps has ended, and its gradients are the mean."""
        assert self._reducer is not None, "the reducer calls this"
        reduction.complete()
        self._reducer.release(reduction)

    def check_closure(self, closure: Any) -> None:
        if closure is not None and self.synchronous:
            raise IncompatibleError(
                f"{self.strategy!r} averages gradients in its first {self._synchronous_for} steps, and there a "
                "closure's loss would be this worker's alone: call backward() and then step(), or leave `after` out"
            )

    def before_step(self) -> None:
        if self._reducer is not None:
            self._reducer.check_attached()

    def after_step(self) -> None:
        if self.stats.steps <= self._synchronous_for:
            if self.stats.steps == self._synchronous_for:
                self._end_synchronous()
            return
        self._since += 1
        if self._since >= self.period:
            self.sync()

    def _end_synchronous(self) -> None:
        """From now on each worker steps on its own gradients."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        if self._base is not None:
            self._base = [weight.clone() for weight in self.weights]

    def check_uneven(self) -> None:
        if self.synchronous:
            raise IncompatibleError(
                f"{self.strategy!r} averages gradients in its first {self._synchronous_for} steps, and this data may "
                "end earlier on some workers than on others: give the loader drop_last=True, or a length that the "
                "workers divide"
            )
        super().check_uneven()

    # Rounds.

    def sync(self, active: bool = True) -> int:
        if self._base is None:
            means, alive = self._mean(self.weights, active)
        else:
            changes = [each - before for each, before in zip(self.weights, self._base, strict=True)]
            mean_changes, alive = self._mean(changes, active)
            means = [before.add_(change) for before, change in zip(self._base, mean_changes, strict=True)]
        if self.rounds % CONSENSUS_EVERY_ROUNDS == 0:
            self.note_consensus(means)
        self.set_weights(means)
        if self.rule.state != "keep":
            self.sync_optimizer_state()
        self.rounds += 1
        self._since = 0
        self.stats.staleness = 0
        self.after_sync()
        return alive

    def _mean(self, values: Sequence[Tensor], active: bool) -> tuple[list[Tensor], int]:
        """The mean over the workers that count in this round, and how many workers have data."""
        weight = 1.0 if self.rule.fraction == 1.0 or self._counts() else 0.0
        while True:
            reduction = self.deltas.reduce([each.clone() for each in values], weight, active)
            counted = reduction.complete().weight
            found = self.deltas.finish(reduction)
            if counted > 0:
                return found
            weight = 1.0  # all workers that count are lost (elastic jobs): the others count instead

    def after_sync(self) -> None:
        """Called at the end of a round, when all workers have the same weights."""

    def _counts(self) -> bool:
        """Whether this worker counts in the round. Every worker makes the same draw."""
        size = self.communicator.size
        count = max(1, math.ceil(self.rule.fraction * size - 1e-9))
        return self.communicator.rank in random.Random(f"{self.rule.seed}/{self.rounds}").sample(range(size), count)

    def sync_optimizer_state(self) -> None:
        """Average or clear the optimizer's state of each parameter."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self._names.values()]
        if self.rule.state == "reset":
            for state in states:
                state.clear()
            return
        tensors = [
            state[key]
            for parameter, state in zip(self._names.values(), states, strict=True)
            for key in sorted(state)
            if _has_shape_of(state[key], parameter)
        ]
        counts = allreduce(torch.tensor([len(tensors), -len(tensors)]), op="max", group=self.communicator.group)
        if int(counts.sum()) != 0 or not tensors:  # a worker that has had no data yet has no state
            return
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self.stats.sent(nbytes, nbytes)
        self.average(tensors)

    @property
    def elastic_refusal(self) -> str:
        if not self.rule.after:
            return ""
        return f"{self.strategy!r} needs even data in its first steps, and a loss makes it uneven: leave `after` out"

    def use_team(self) -> None:
        super().use_team()
        if self._reducer is not None:
            self._reducer.rebind()

    def detach(self) -> None:
        super().detach()
        if self._reducer is not None:
            self._reducer.close()

    # State.

    def restart(self) -> None:
        super().restart()
        self._since = 0
        self._choose_phase()
        if self._base is not None:
            self._base = [weight.clone() for weight in self.weights]
        if self._reducer is not None:
            self._reducer.load_local_states([])

    def _choose_phase(self) -> None:
        """After a load: the number of steps may be beyond the synchronous steps, or before their end again."""
        if not self.synchronous and self._reducer is not None:
            self._end_synchronous()
        elif self.synchronous and self._reducer is None and not self.alone:
            self._reducer = self._make_reducer()

    def shared_state(self) -> dict[str, Any]:
        base = {} if self._base is None else dict(zip(self._names, self._base, strict=True))
        first = {} if self._reducer is None else {"first": self._reducer.shared_state()}
        return super().shared_state() | {"period": self.period, "since": self._since, "agreed": base, **first}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        self.period, self._since = int(state.get("period", self.period)), int(state.get("since", 0))
        self._choose_phase()
        if self._reducer is not None:
            self._reducer.load_shared_state(state.get("first", {}))
        if self._base is not None:
            saved = state.get("agreed") or dict(zip(self._names, self.weights, strict=True))
            for before, name in zip(self._base, self._names, strict=True):
                before.copy_(saved[name])

    def local_state(self) -> dict[str, Any]:
        first = {} if self._reducer is None else {"first": self._reducer.local_state()}
        return {**super().local_state(), **first}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        if self._reducer is not None and self._reducer.codec_state is not None:
            self._reducer.load_local_states([state.get("first", {}) for state in states])
            if not all("first" in state for state in states):  # older: one residual for both phases
                self.deltas.forget()


def _has_shape_of(value: Any, parameter: Tensor) -> bool:
    """Whether a state value has one number for each element of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
