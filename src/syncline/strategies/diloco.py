"""Workers step alone for long, and an outer optimizer steps on what they have moved by.

Every H steps, with w the weights that all had after the last round: Δ = (1/p) Σ (w − w_i); v ← μ·v + Δ;
w ← w − η·(Δ + μ·v), Nesterov's; w_i ← w. With `overlap` the mean is under way while the workers go on, for D steps::

    step            H                H+D                2H
    worker i   ── Δ_i = w − w_i ──── Δ is there: ────── Δ_i = w − w_i ─     D = `delay`; 0: a whole period
                     └ on its way ┘  w steps, and w_i ← w + what worker i has moved by since H

Each inner step is in exactly one Δ_i, with `overlap` too. Douillard et al., DiLoCo: distributed low-communication
training of language models (2023); with overlap as in Douillard et al., Streaming DiLoCo (2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import SpecError
from syncline.reduction import Communicator, ReductionPass
from syncline.strategies.base import Preset, RunSettings, Strategy, StrategyRun, mean_of_all, wide_dtype
from syncline.strategies.local import CONSENSUS_EVERY_ROUNDS
from syncline.strategies.local_weights import AveragingRun, check_count

__all__ = ["DiLoCo", "nesterov"]


@dataclass(frozen=True, repr=False)
class DiLoCo(Strategy):
    """Local steps, and an outer Nesterov step on their mean every `period`.

    The inner optimizer's state stays with its worker. With `overlap` an outer step takes effect `delay` steps after its
    mean was asked for, by default a whole period.

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
        check_count(self.name, "period", self.period, least=1)
        check_count(self.name, "delay", self.delay)
        if not _is_number(self.outer_lr) or not 0.0 < self.outer_lr < float("inf"):
            raise SpecError(
                f"diloco(outer_lr={self.outer_lr!r}): a rate above 0; 0.7 is the paper's, 1 with no momentum"
            )
        if not _is_number(self.outer_momentum) or not 0.0 <= self.outer_momentum < 1.0:
            raise SpecError(f"diloco(outer_momentum={self.outer_momentum!r}): at least 0, and below 1")
        if not isinstance(self.overlap, bool):
            raise SpecError(f"diloco(overlap={self.overlap!r}): True or False")
        if self.delay and not self.overlap:
            raise SpecError(f"{self!r}: a delay of {self.delay} steps needs overlap=True; leave it out")
        if self.delay > self.period:
            raise SpecError(
                f"{self!r}: the next mean is asked for after {self.period} steps, and this one takes effect after "
                f"{self.delay}: a delay of at most {self.period}"
            )

    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        return _DiLoCoRun(self, model, optimizer, exchange, settings)


def nesterov(weight: Tensor, velocity: Tensor, moved: Tensor, rate: float, momentum: float) -> tuple[Tensor, Tensor]:
    """A weight and its velocity after an outer step on what the workers have moved down by.

    >>> one = torch.ones(1)
    >>> nesterov(one, one, one, rate=0.5, momentum=0.5)      # v = 0.5 + 1; w = 1 − 0.5 · (1 + 0.75)
    (tensor([0.1250]), tensor([1.5000]))
    """
    velocity = momentum * velocity + moved
    return weight - rate * (moved + momentum * velocity), velocity


class _DiLoCoRun(AveragingRun):
    def __init__(
        self, strategy: DiLoCo, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self._rule = strategy
        self._delay = (strategy.delay or strategy.period) if strategy.overlap else 0
        self._since = 0
        """Steps since the last mean was asked for."""
        self._outer = [_precise(weight) for weight in self.weights] if exchange.size > 1 else []
        """What all had after the latest outer step."""
        self._velocity = [torch.zeros_like(weight) for weight in self._outer]
        self._sent: list[Tensor] = []
        """This worker's weights when it asked for the mean that is under way."""
        self._flight: ReductionPass | None = None
        self._moved: list[Tensor] | None = None
        """The mean, once it was waited for: an evaluation or a checkpoint may do so before it is due."""
        self._alive = 0
        self.deltas.prepare()

    @property
    def first_exchange(self) -> int | None:
        return self._rule.period

    @property
    def copies_weights(self) -> bool:
        return True

    # Steps and rounds.

    def after_step(self) -> None:
        self._since += 1
        if self._under_way and self._since >= self._delay:
            self._land()
        if self._since >= self._rule.period:
            self._leave(active=True)
            if not self._rule.overlap:
                self._land()

    def sync(self, active: bool = True) -> int:
        if self._under_way:
            self._land()
        self._leave(active)
        return self._land()

    @property
    def _under_way(self) -> bool:
        return self._flight is not None or self._moved is not None

    def _leave(self, active: bool) -> None:
        """Ask for the mean of what the workers have moved by."""
        self._since = 0
        self._sent = [weight.clone() for weight in self.weights]
        given = [(outer - own).to(own.dtype) for outer, own in zip(self._outer, self._sent, strict=True)]
        self._flight = self.deltas.begin(given, active=active)

    def _arrive(self) -> list[Tensor]:
        """Wait for the mean; what becomes of it is another matter."""
        if self._flight is not None:
            means, self._alive = self.deltas.finish(self._flight)
            self._moved = [mean.clone() for mean in means]
            self._flight = None
        assert self._moved is not None, "asked for before"
        return self._moved

    def _land(self) -> int:
        """Take the outer step; how many workers had data when its mean was asked for."""
        moved = self._arrive()
        if self.rounds % CONSENSUS_EVERY_ROUNDS == 0:
            mean = [outer - each for outer, each in zip(self._outer, moved, strict=True)]
            apart = sum(float((a - b).double().square().sum()) for a, b in zip(self._sent, mean, strict=True))
            self.stats.consensus = self.exchange.mean(apart) ** 0.5
        stepped = self._stepped(moved)
        self.set_weights(self._with_own_steps([outer for outer, _ in stepped]))
        self._outer, self._velocity = [outer for outer, _ in stepped], [velocity for _, velocity in stepped]
        self._sent, self._moved = [], None
        self.rounds += 1
        self.stats.staleness = self._delay
        return self._alive

    def _stepped(self, moved: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The outer weights and velocities after a step."""
        rate, momentum = self._rule.outer_lr, self._rule.outer_momentum
        rows = zip(self._outer, self._velocity, moved, strict=True)
        return [nesterov(outer, velocity, each.to(outer.dtype), rate, momentum) for outer, velocity, each in rows]

    def _with_own_steps(self, outer: Sequence[Tensor]) -> list[Tensor]:
        """The outer weights, and what this worker has moved by since it asked for the mean."""
        if self._since == 0:
            return list(outer)
        return [new + (own - sent) for new, own, sent in zip(outer, self.weights, self._sent, strict=True)]

    # The model.

    def model_of_all(self) -> list[Tensor]:
        """The mean of the workers' weights, as they would be with the outer step that is under way."""
        if not self._under_way:
            return mean_of_all(self.exchange, self.weights)
        stepped = [outer for outer, _ in self._stepped(self._arrive())]
        own = self._with_own_steps(stepped)
        return mean_of_all(self.exchange, own)

    # State.

    def restart(self) -> None:
        super().restart()
        if self._flight is not None:
            self._arrive()
        self._since, self._sent, self._moved = 0, [], None
        self._outer = [_precise(weight) for weight in self.weights] if self.exchange.size > 1 else []
        self._velocity = [torch.zeros_like(weight) for weight in self._outer]

    def shared_state(self) -> dict[str, Any]:
        moved = self._arrive() if self._under_way else []
        return super().shared_state() | {
            "since": self._since,
            "outer": dict(zip(self._names, self._outer, strict=False)),
            "velocity": dict(zip(self._names, self._velocity, strict=False)),
            "moved": dict(zip(self._names, moved, strict=False)),
        }

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        self._since = int(state.get("since", 0))
        if self.exchange.size == 1:
            return
        outer, velocity = state.get("outer"), state.get("velocity")
        if not outer or not velocity:  # saved by a world of one: the model was loaded before
            self._outer = [_precise(weight) for weight in self.weights]
            self._velocity, self._since = [torch.zeros_like(weight) for weight in self._outer], 0
            return
        self._outer, self._velocity = self._taken(outer, self._outer), self._taken(velocity, self._outer)
        moved = state.get("moved")
        self._flight, self._moved = None, self._taken(moved, self.weights) if moved else None
        if self._moved is not None and not self.same_size:
            # All begin with the model of all then, and that has this outer step in it.
            stepped = self._stepped(self._moved)
            self._outer, self._velocity = [outer for outer, _ in stepped], [velocity for _, velocity in stepped]
            self._moved, self.rounds = None, self.rounds + 1

    def own_state(self) -> dict[str, Any]:
        return {"sent": dict(zip(self._names, self._sent, strict=False))}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._sent = self._taken(state["sent"], self.weights) if state["sent"] else []

    def _taken(self, saved: Mapping[str, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        return [
            saved[name].to(device=each.device, dtype=each.dtype, copy=True)
            for name, each in zip(self._names, like, strict=True)
        ]


def _precise(weight: Tensor) -> Tensor:
    """A copy in which small steps are not lost to rounding."""
    return weight.to(wide_dtype(weight.dtype), copy=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
