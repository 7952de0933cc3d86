"""The centre that workers are tied to, where no server holds it: every worker has a copy, and all copies are alike.

Each worker tells how far it is from the centre, and what all of them tell is reduced. A copy moves by the reduced sum
alone, so that every worker's has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, ReductionPass
from syncline.strategies.base import wide_dtype
from syncline.strategies.delta_reducer import DeltaReducer

__all__ = ["SHARE", "Centre", "pull_of"]

SHARE = 0.9
"""What all workers together pull at a centre with, where no alpha is told."""


def pull_of(spec: object, alpha: float | None, count: int, unstable: bool) -> float:
    """What one of `count` moves towards a centre, of the way: α, checked.

    >>> round(pull_of("easgd", None, 4, False), 3)
    0.225
    """
    if alpha is None:
        return SHARE / count
    if alpha * count > 1.0 + 1e-9 and not unstable:
        raise IncompatibleError(
            f"{spec} with {count} workers at a centre: alpha · {count} = {alpha * count:g}, and above 1 the centre "
            f"jumps beyond them; give alpha of at most {1.0 / count:.4g}, none for {SHARE}/{count}, or unstable=True"
        )
    return alpha


class Centre:
    """One centre for all workers of an exchange.

    x̃ ← x̃ + α Σ (x_i − x̃)
    """

    def __init__(
        self, weights: Mapping[str, Tensor], exchange: Communicator, deltas: DeltaReducer, alpha: float
    ) -> None:
        self.values = [weight.detach().to(wide_dtype(weight.dtype), copy=True) for weight in weights.values()]
        """The centre of this worker, at least in float32: its changes are too small for half precision."""
        self.alpha = alpha
        self._names = list(weights)
        self._exchange = exchange
        self._deltas = deltas
        self._away: list[Tensor] = []
        self._begun: ReductionPass | None = None

    @property
    def root(self) -> list[Tensor]:
        """The centre of all."""
        return self.values

    def start(self, weights: Sequence[Tensor]) -> None:
        """Begin anew, here."""
        for value, weight in zip(self.values, weights, strict=True):
            value.copy_(weight)

    @property
    def under_way(self) -> bool:
        """Whether a round has begun."""
        return self._begun is not None

    def begin(self, own: Sequence[Tensor], active: bool) -> None:
        """Tell how far this worker's weights are away."""
        self._away = [(weight - value).to(weight.dtype) for weight, value in zip(own, self.values, strict=True)]
        self._begun = self._deltas.begin([each.clone() for each in self._away], 1.0, active)

    def finish(self, number: int) -> tuple[list[Tensor], int]:
        """Move the centre in the round of that number; what this worker is to move back by, and how many have data."""
        assert self._begun is not None, "a round has begun"
        means, alive = self._deltas.finish(self._begun)
        self._begun = None
        return self._settle(means), alive

    def apart(self, own: Sequence[Tensor]) -> float:
        """The square of how far a worker is from the centre of all."""
        return sum(
            float((weight - value).double().square().sum()) for weight, value in zip(own, self.root, strict=True)
        )

    # State.

    def shared_state(self) -> dict[str, Any]:
        """What all workers have alike."""
        return {"centre": self._named(self.root)}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._fill(self.root, state["centre"])

    def own_state(self) -> dict[str, Any]:
        """What this worker has, or its group."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""

    def close(self) -> None:
        """Let go of it."""

    # Within.

    def _settle(self, means: list[Tensor]) -> list[Tensor]:
        """Move the centre by what was reduced; what this worker gave. What a codec has kept back comes to it later."""
        moves = [mean.to(value.dtype) for mean, value in zip(means, self.values, strict=True)]
        torch._foreach_add_(self.values, moves, alpha=self.alpha * self._exchange.size)
        given, self._away = self._away, []
        torch._foreach_mul_(given, self.alpha)
        return given

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in zip(self._names, tensors, strict=True)}

    def _fill(self, tensors: Sequence[Tensor], saved: Mapping[str, Tensor]) -> None:
        for name, tensor in zip(self._names, tensors, strict=True):
            tensor.copy_(saved[name])
