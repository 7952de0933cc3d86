"""Rules without state: add and assign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server.rules.base import UpdateRule

__all__ = ["Add", "Assign"]


@dataclass(frozen=True, repr=False)
class Add(UpdateRule):
    """w ← w + Δ; a push with a rate adds rate · Δ.

    >>> import torch
    >>> weights = torch.ones(2)
    >>> Add().apply(weights, torch.tensor([1.0, 2.0]), {}, None)
    >>> weights
    tensor([2., 3.])
    """

    name: ClassVar[str] = "add"

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        weights.add_(update, alpha=self.pick(rate, 1.0))


@dataclass(frozen=True, repr=False)
class Assign(UpdateRule):
    """w ← Δ: the latest push replaces the weights.

    >>> import torch
    >>> weights = torch.ones(2)
    >>> Assign().apply(weights, torch.tensor([1.0, 2.0]), {}, None)
    >>> weights
    tensor([1., 2.])
    """

    name: ClassVar[str] = "assign"

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        if rate is not None:
            raise ProtocolError(f"a push to {self!r} has the rate {rate}, which means nothing there: leave it out")
        weights.copy_(update)
