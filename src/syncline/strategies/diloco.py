"""DiLoCo: workers train alone for many steps, and an outer optimizer steps on the mean of their changes.

Every H steps, with w the weights of all workers after the last round: Δ = (1/p) Σ (w − w_i); v ← μ·v + Δ;
w ← w − η·(Δ + μ·v), Nesterov's; w_i ← w. With `overlap` the mean is reduced during the next D steps::

    step            H                H+D                2H
    worker i   ── Δ_i = w − w_i ──── Δ is complete: ─── Δ_i = w − w_i ─     D = `delay`; 0: a whole period
                     └ in flight ─┘  w steps, and w_i ← w + the change of worker i since H

Each inner step is in exactly one Δ_i, with `overlap` too. Douillard et al., DiLoCo: distributed low-communication
training of language models (2023); with overlap as in Douillard et al., Streaming DiLoCo (2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.errors import SpecError
from syncline.reduction import ReductionPass
from syncline.strategies.base import (
    Preset,
    Strategy,
    StrategyRun,
    check_counts,
    check_flags,
    check_number,
    mean_of_all,
    wide_dtype,
)
from syncline.strategies.local import CONSENSUS_EVERY_ROUNDS
from syncline.strategies.local_weights import AveragingRun
from syncline.world import TeamChange

__all__ = ["DiLoCo", "nesterov"]


@dataclass(frozen=True, repr=False)
class DiLoCo(Strategy):
    """Local steps, and an outer Nesterov step on their mean change every `period` steps.

    The inner optimizer's state stays with its worker. With `overlap` an outer step takes effect `delay` steps
    after its reduction began, by default a whole period.

    >>> DiLoCo(period=50, overlap=True)
    diloco(period=50, overlap=True)
    """

    period: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    overlap: bool = False
    delay: int = 0

    name: ClassVar[str] = "diloco"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="diloco(period=16, outer_momentum=0.5)"),)

    def __post_init__(self) -> None:
        check_counts(self, period=1, delay=0)
        check_number(self, "outer_lr", "a rate above 0, such as the paper's 0.7", lambda rate: 0 < rate < math.inf)
        check_number(self, "outer_momentum", "at least 0, and below 1", lambda momentum: 0 <= momentum < 1)
        check_flags(self, "overlap")
        if self.delay and not self.overlap:
            raise SpecError(f"{self!r}: a delay of {self.delay} steps needs overlap=True; leave it out")
        if self.delay > self.period:
            raise SpecError(
                f"{self!r}: the next reduction begins after {self.period} steps, and this one takes effect after "
                f"{self.delay}: a delay of at most {self.period}"
            )

    def run_type(self) -> type[StrategyRun]:
        return DiLoCoRun


def nesterov(weight: Tensor, velocity: Tensor, moved: Tensor, rate: float, momentum: float) -> tuple[Tensor, Tensor]:
    """A weight and its velocity after an outer step on the mean decrease of the workers' weights.

    >>> one = torch.ones(1)
    >>> nesterov(one, one, one, rate=0.5, momentum=0.5)      # v = 0.5 + 1; w = 1 − 0.5 · (1 + 0.75)
    (tensor([0.1250]), tensor([1.5000]))
    """
    velocity = momentum * velocity + moved
    return weight - rate * (moved + momentum * velocity), velocity


class DiLoCoRun(AveragingRun):
    strategy: DiLoCo
    copies_weights = True

    def setup(self) -> None:
        super().setup()
        self._delay = (self.strategy.delay or self.strategy.period) if self.strategy.overlap else 0
        self._since = 0
        """Steps since the last reduction began."""
        self.outer: list[Tensor] = []
        """The weights of all workers after the latest outer step, at least in float32: its steps are small."""
        self._velocity: list[Tensor] = []
        self._reset_outer()
        self._sent: list[Tensor] = []
        """This worker's weights when the reduction in flight began."""
        self._reduction: ReductionPass | None = None
        self._moved: list[Tensor] | None = None
        """The completed mean. An evaluation or a checkpoint may wait for it before it is due."""
        self._alive = 0
        """How many workers had data when that reduction began."""
        self.deltas.prepare()

    def _reset_outer(self) -> None:
        """Begin with the model's weights and no velocity."""
        weights = [] if self.alone else self.weights
        self.outer = [weight.to(wide_dtype(weight.dtype), copy=True) for weight in weights]
        self._velocity = [torch.zeros_like(weight) for weight in self.outer]

    @property
    def first_exchange(self) -> int | None:
        return self.strategy.period

    @property
    def elastic_refusal(self) -> str:
        return ""

    def complete_in_flight(self) -> None:
        if self._in_progress:
            self._wait()

    def apply_change_of_data(self, change: TeamChange) -> None:
        # The round in flight is not that of the current batch. What was counted since that batch was read counts on all
        # workers: those without data could not tell.
        super().apply_change_of_data(replace(change, trained=change.trained or self.strategy.overlap))

    def share_steps(self, missed: int) -> None:
        self.complete_in_flight()  # a team that changes later sends all messages in the same order
        super().share_steps(missed)

    # Steps and rounds.

    def after_step(self) -> None:
        self._since += 1
        if self._in_progress and self._since >= self._delay:
            self._finish_round()
        if self._since >= self.strategy.period:
            self._begin_round(active=True)
            if not self.strategy.overlap:
                self._finish_round()

    def sync(self, active: bool = True) -> int:
        if not self._in_progress:
            self._begin_round(active)
        alive = self._finish_round()
        if alive and self._delay == self.strategy.period:  # workers with data begin the next one at once
            self._begin_round(active or self.epoch_continues)
        return alive

    @property
    def _in_progress(self) -> bool:
        return self._reduction is not None or self._moved is not None

    def _begin_round(self, active: bool) -> None:
        """Begin the reduction of the workers' changes."""
        self._since = 0
        self._sent = [weight.clone() for weight in self.weights]
        changes = [(outer - own).to(own.dtype) for outer, own in zip(self.outer, self._sent, strict=True)]
        self._reduction = self.deltas.reduce(changes, active=active)

    def _wait(self) -> list[Tensor]:
        """Wait for the mean, without applying it."""
        if self._reduction is not None:
            means, self._alive = self.deltas.finish(self._reduction)
            self._moved = [mean.clone() for mean in means]
            self._reduction = None
        assert self._moved is not None, "a reduction has begun"
        return self._moved

    def _finish_round(self) -> int:
        """Take the outer step. Returns how many workers had data when its reduction began."""
        moved = self._wait()
        if self.rounds % CONSENSUS_EVERY_ROUNDS == 0:
            mean = [outer - each for outer, each in zip(self.outer, moved, strict=True)]
            self.note_consensus(mean, self._sent)
        self.outer, self._velocity = self._stepped(moved)
        self.set_weights(self._with_own_steps(self.outer))
        self._sent, self._moved = [], None
        self.rounds += 1
        self.stats.staleness = self._delay
        return self._alive

    def _stepped(self, moved: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The outer weights and velocities after a step."""
        rate, momentum = self.strategy.outer_lr, self.strategy.outer_momentum
        rows = zip(self.outer, self._velocity, moved, strict=True)
        pairs = [nesterov(outer, velocity, each.to(outer.dtype), rate, momentum) for outer, velocity, each in rows]
        return [outer for outer, _ in pairs], [velocity for _, velocity in pairs]

    def _with_own_steps(self, outer: Sequence[Tensor]) -> list[Tensor]:
        """The outer weights plus this worker's change since the reduction began."""
        if self._since == 0:
            return list(outer)
        return [new + (own - sent) for new, own, sent in zip(outer, self.weights, self._sent, strict=True)]

    # The model.

    def model_of_all(self) -> list[Tensor]:
        """The mean of the workers' weights, including the outer step in flight."""
        if not self._in_progress:
            return mean_of_all(self.communicator, self.weights)
        outer, _ = self._stepped(self._wait())
        return mean_of_all(self.communicator, self._with_own_steps(outer))

    # State.

    def restart(self) -> None:
        self.complete_in_flight()
        super().restart()
        self._since, self._sent, self._moved = 0, [], None
        self._reset_outer()

    def shared_state(self) -> dict[str, Any]:
        moved = self._wait() if self._in_progress else []
        return super().shared_state() | {
            "since": self._since,
            "outer": dict(zip(self._names, self.outer, strict=False)),
            "velocity": dict(zip(self._names, self._velocity, strict=False)),
            "moved": dict(zip(self._names, moved, strict=False)),
            "alive": self._alive,
        }

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        self._since, self._alive = int(state.get("since", 0)), int(state.get("alive", 0))
        if self.alone:
            return
        outer, velocity = state.get("outer"), state.get("velocity")
        if not outer or not velocity:  # saved by a world of one; the model is loaded already
            self._since = 0
            self._reset_outer()
            return
        self.outer, self._velocity = self._taken(outer, self.outer), self._taken(velocity, self.outer)
        moved = state.get("moved")
        self._reduction, self._moved = None, self._taken(moved, self.weights) if moved else None
        if self._moved is not None and not self.same_size:
            # All workers begin with the model of all, which includes this outer step.
            self.outer, self._velocity = self._stepped(self._moved)
            self._moved, self.rounds = None, self.rounds + 1
        # A worker that joins in a round of the others has no part in it: its own steps begin now.
        self._sent = [] if self._moved is None else [weight.clone() for weight in self.weights]

    def own_state(self) -> dict[str, Any]:
        return {"sent": dict(zip(self._names, self._sent, strict=False))}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._sent = self._taken(state["sent"], self.weights) if state["sent"] else []

    def _taken(self, saved: Mapping[str, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        return [
            saved[name].to(device=each.device, dtype=each.dtype, copy=True)
            for name, each in zip(self._names, like, strict=True)
        ]
