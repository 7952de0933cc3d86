"""Workers step alone, and average their weights every so many steps.

w_i ← w_i − η · g_i(w_i), and after every τ steps w_i ← (1/p) Σ w_j::

    step       1    2    3    4    5    6    …         period=2, after=2
    all        ●    ●                                  the first two average gradients: synchronous
    each                 ·    ●    ·    ●              then weights, every second step

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
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import Communicator, GradientReducer, ReductionPass
from syncline.strategies.base import Preset, RunSettings, Strategy, StrategyRun, mean_of_all, wide_dtype
from syncline.strategies.delta_reducer import coding_here, coding_of_all, load_coding_of_all
from syncline.strategies.local_weights import AveragingRun
from syncline.world import allreduce

__all__ = ["Local", "LocalRun"]

KEPT = ("keep", "average", "reset")
LOOKS = 8
"""Every so many rounds the workers tell how far apart they were: it takes a small message of its own."""


@dataclass(frozen=True, repr=False)
class Local(Strategy):
    """Local SGD with a fixed period.

    `after` steps are synchronous first. `state` says what a round does to the optimizer's memory of each parameter:
    "keep" leaves each worker its own, "average" averages it with the weights, "reset" forgets it. With `fraction` a
    random part of the workers counts in each round, drawn from `seed`; all take its mean over.

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
        check_count(self.name, "period", self.period, least=1)
        check_count(self.name, "after", self.after)
        check_count(self.name, "seed", self.seed)
        if self.state not in KEPT:
            raise SpecError(f"local(state={self.state!r}): one of {', '.join(KEPT)}")
        number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if not number or not 0.0 < self.fraction <= 1.0:
            raise SpecError(f"local(fraction={self.fraction!r}): a part of the workers, above 0 and at most 1")

    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        return LocalRun(self, model, optimizer, exchange, settings, period=self.period)


class LocalRun(AveragingRun):
    """Averages weights; `period` may change from round to round.

    With a codec or in half precision the workers average differences to the weights after the last round: the mean of
    the weights themselves would be rounded in every round.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Communicator,
        settings: RunSettings,
        *,
        period: int,
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self.period = period
        self._since = 0
        """Steps since the last round."""
        self._synchronous_for = int(getattr(strategy, "after", 0))
        self._state = str(getattr(strategy, "state", "keep"))
        self._fraction = float(getattr(strategy, "fraction", 1.0))
        self._seed = int(getattr(strategy, "seed", 0))
        self._agreed: list[Tensor] | None = None
        """The weights after the last round, if rounds average differences."""
        halves = any(wide_dtype(weight.dtype) != weight.dtype for weight in self.weights)
        if (exchange.codec is not None or halves) and exchange.size > 1:
            self._agreed = [weight.clone() for weight in self.weights]
        self._reducer: GradientReducer | None = None
        """Reduces the gradients of the first steps."""
        if self._synchronous_for and exchange.size > 1:
            self._reducer = self._make_gradients()
        self.deltas.prepare()

    def _make_gradients(self) -> GradientReducer:
        settings = self.settings
        return GradientReducer(
            dict(self.model.named_parameters()),
            self.exchange,
            self._reduced,
            bucket_bytes=settings.bucket_bytes,
            check_finite=settings.check_finite,
            codec=self.exchange.codec,
            seed=settings.seed,
            diagnose=settings.diagnose,
            find_unused_parameters=True,  # as the later steps, whose averages ask nobody what a worker has used
        )

    # Steps.

    @property
    def first_exchange(self) -> int | None:
        return 1 if self._synchronous_for else self.period

    @property
    def copies_weights(self) -> bool:
        return True

    @property
    def synchronous(self) -> bool:
        """Whether the step that begins averages gradients."""
        return self.stats.steps < self._synchronous_for

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """Has an effect in the first `after` steps only. Later each worker steps on its own batch of any size."""
        if self._reducer is not None:
            self._reducer.weight, self._reducer.careful = weight, uneven

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self._reducer is None else self._reducer.paused()

    def _reduced(self, found: ReductionPass) -> None:
        """A backward pass of the first `after` steps is over, and its gradients are the mean."""
        assert self._reducer is not None, "the reducer calls this"
        found.complete()
        self._reducer.done(found)

    def check_closure(self, closure: Any) -> None:
        if self.synchronous and closure is not None:
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
        if self._agreed is not None:
            self._agreed = [weight.clone() for weight in self.weights]

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
        chosen = self._takes_part()
        if self._agreed is None:
            means, alive = self._wait([weight.clone() for weight in self.weights], chosen, active)
        else:
            given = [weight - before for weight, before in zip(self.weights, self._agreed, strict=True)]
            moved, alive = self._wait(given, chosen, active)
            means = [before.add_(mean) for before, mean in zip(self._agreed, moved, strict=True)]
        if self.rounds % LOOKS == 0:
            self.note_consensus(means)
        self.take_over(means)
        self.sync_optimizer_state()
        self.rounds += 1
        self._since = 0
        self.stats.staleness = 0
        self.after_sync(means)
        return alive

    def after_sync(self, agreed: Sequence[Tensor]) -> None:
        """A round is over, and all have these weights."""

    def _wait(self, given: list[Tensor], chosen: bool = True, active: bool = True) -> tuple[list[Tensor], int]:
        begun = self.deltas.begin(given, 1.0 if chosen else 0.0, active)
        return self.deltas.finish(begun)

    def _takes_part(self) -> bool:
        """Whether this worker counts in the round: the same draw everywhere."""
        if self._fraction == 1.0:
            return True
        size = self.exchange.size
        count = max(1, math.ceil(self._fraction * size - 1e-9))
        return self.exchange.rank in random.Random(f"{self._seed}/{self.rounds}").sample(range(size), count)

    def sync_optimizer_state(self) -> None:
        if self._state == "keep":
            return
        remembered = [self.optimizer.state.get(parameter, {}) for parameter in self._names.values()]
        if self._state == "reset":
            for memory in remembered:
                memory.clear()
            return
        rows = [
            memory[key]
            for parameter, memory in zip(self._names.values(), remembered, strict=True)
            for key in sorted(memory)
            if _is_row(memory[key], parameter)
        ]
        counts = allreduce(torch.tensor([len(rows), -len(rows)]), op="max", group=self.exchange.team)
        if int(counts.sum()) != 0 or not rows:  # a worker that has had no data yet remembers nothing
            return
        nbytes = sum(row.nbytes for row in rows)
        self.stats.sent(nbytes, nbytes)
        for row, mean in zip(rows, mean_of_all(self.exchange, rows), strict=True):
            row.copy_(mean)

    def detach(self) -> None:
        super().detach()
        if self._reducer is not None:
            self._reducer.close()

    # State.

    def restart(self) -> None:
        super().restart()
        self._since = 0
        self._choose_phase()
        if self._agreed is not None:
            self._agreed = [weight.clone() for weight in self.weights]
        if self._reducer is not None and self._reducer.coding is not None:
            self._reducer.coding.load([])

    def _choose_phase(self) -> None:
        """After a load: the number of steps may be beyond the first `after` steps, or before their end again."""
        if not self.synchronous and self._reducer is not None:
            self._end_synchronous()
        elif self.synchronous and self._reducer is None and self.exchange.size > 1:
            self._reducer = self._make_gradients()

    def shared_state(self) -> dict[str, Any]:
        agreed = {} if self._agreed is None else dict(zip(self._names, self._agreed, strict=True))
        first = {} if self._reducer is None else {"first": coding_of_all(self._reducer)}
        return super().shared_state() | {"period": self.period, "since": self._since, "agreed": agreed, **first}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        self.period, self._since = int(state.get("period", self.period)), int(state.get("since", 0))
        self._choose_phase()
        if self._reducer is not None:
            load_coding_of_all(self._reducer, state.get("first", {}))
        if self._agreed is not None:
            saved = state.get("agreed") or dict(zip(self._names, self.weights, strict=True))
            for before, name in zip(self._agreed, self._names, strict=True):
                before.copy_(saved[name])

    def local_state(self) -> dict[str, Any]:
        return {**super().local_state(), **({} if self._reducer is None else {"first": coding_here(self._reducer)})}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        if self._reducer is not None and self._reducer.coding is not None:
            self._reducer.coding.load([state.get("first", {}) for state in states])
            if not all("first" in state for state in states):  # older: one residual for both phases
                self.deltas.forget()


def check_count(name: str, key: str, value: Any, least: int = 0) -> None:
    """Refuse what is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{name}({key}={value!r}): a whole number, at least {least}")


def _is_row(value: Any, parameter: Tensor) -> bool:
    """Whether it remembers one number for each of the parameter's."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
