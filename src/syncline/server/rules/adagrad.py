"""Adagrad: a learning rate for each weight, which falls with its updates. The default rule of Downpour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.server.rules.base import UpdateRule

__all__ = ["Adagrad"]


@dataclass(frozen=True, repr=False)
class Adagrad(UpdateRule):
    """A learning rate for each weight, which falls with its updates.

        s ← s + g²        w ← w − lr · g / (√s + eps)

    Each server needs only its own weights, so that the rates adapt without communication between servers. Duchi,
    Hazan and Singer, *Adaptive subgradient methods*, 2011; at a server: Dean et al., *Large scale distributed deep
    networks*, 2012.

    >>> rule, weights = Adagrad(lr=1.0), torch.zeros(1)
    >>> state = rule.state(1)
    >>> for gradient in (3.0, 4.0):
    ...     rule.apply(weights, torch.tensor([gradient]), state, None)
    ...     print(weights)                                     # 3/√9, then 4/√25 more
    tensor([-1.])
    tensor([-1.8000])
    """

    lr: float = 0.01
    eps: float = 1e-10

    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        self.check("lr")
        self.check("eps")

    def state(self, numel: int) -> dict[str, Tensor]:
        return {"squares": torch.zeros(numel, dtype=torch.float32)}

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        chosen = self.pick(rate, self.lr)
        squares = state["squares"].addcmul_(update, update)
        weights.addcdiv_(update, squares.sqrt().add_(self.eps), value=-chosen)
