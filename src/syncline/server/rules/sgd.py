"""Gradient descent, plain and with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.errors import SpecError
from syncline.server.rules.base import UpdateRule

__all__ = ["Momentum", "Sgd"]


@dataclass(frozen=True, repr=False)
class Sgd(UpdateRule):
    """w ← w − lr · g

    >>> weights = torch.zeros(2)
    >>> Sgd(lr=0.5).apply(weights, torch.tensor([1.0, 2.0]), {}, None)
    >>> weights
    tensor([-0.5000, -1.0000])
    """

    lr: float = 0.01

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        self.check("lr")

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        weights.add_(update, alpha=-self.pick(rate, self.lr))


@dataclass(frozen=True, repr=False)
class Momentum(UpdateRule):
    """Gradient descent with a velocity.

        v ← mu · v + g        w ← w − lr · v        nesterov: w − lr · (g + mu · v)

    The learning rate is not part of v, as in torch's SGD. The velocity of an element decays only with pushes to that
    element.

    >>> rule, weights = Momentum(lr=1.0, mu=0.5), torch.zeros(1)
    >>> state = rule.state(1)
    >>> for _ in range(2):
    ...     rule.apply(weights, torch.ones(1), state, None)
    >>> weights                                                # −1, then −1.5 more
    tensor([-2.5000])
    """

    lr: float = 0.01
    mu: float = 0.9
    nesterov: bool = False

    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        self.check("lr")
        self.check("mu", below=1.0)
        if not isinstance(self.nesterov, bool):
            raise SpecError(f"momentum's nesterov is True or False, not {self.nesterov!r}")

    def state(self, numel: int) -> dict[str, Tensor]:
        return {"velocity": torch.zeros(numel, dtype=torch.float32)}

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        chosen = self.pick(rate, self.lr)
        velocity = state["velocity"].mul_(self.mu).add_(update)
        step = update.add_(velocity, alpha=self.mu) if self.nesterov else velocity
        weights.add_(step, alpha=-chosen)
