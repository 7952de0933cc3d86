"""Adam for sparse pushes: each weight counts its own updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.server.rules.base import UpdateRule

__all__ = ["Adam"]


@dataclass(frozen=True, repr=False)
class Adam(UpdateRule):
    """Adam: steps from running means of the gradient and of its square.

        t ← t + 1        m ← b1 · m + (1 − b1) · g        v ← b2 · v + (1 − b2) · g²
        w ← w − lr · m/(1 − b1ᵗ) / (√(v/(1 − b2ᵗ)) + eps)

    t counts the pushes of each weight. Kingma and Ba, *Adam*, 2014.

    >>> rule, weights = Adam(lr=0.1), torch.zeros(2)
    >>> state = rule.state(2)
    >>> for _ in range(5):                                     # the first weight alone
    ...     rule.apply(weights[:1], torch.ones(1), {name: each[:1] for name, each in state.items()}, None)
    >>> rule.apply(weights, torch.ones(2), state, None)
    >>> weights                                                # six steps, and a first one of full length
    tensor([-0.6000, -0.1000])
    """

    lr: float = 0.001
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        self.check("lr")
        self.check("b1", below=1.0)
        self.check("b2", below=1.0)
        self.check("eps")

    def state(self, numel: int) -> dict[str, Tensor]:
        return {
            "mean": torch.zeros(numel, dtype=torch.float32),
            "square": torch.zeros(numel, dtype=torch.float32),
            "steps": torch.zeros(numel, dtype=torch.float32),
        }

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        chosen = self.pick(rate, self.lr)
        if not update.numel():
            return
        mean = state["mean"].mul_(self.b1).add_(update, alpha=1 - self.b1)
        square = state["square"].mul_(self.b2).addcmul_(update, update, value=1 - self.b2)
        for_mean, for_square = _corrections(state["steps"].add_(1), (self.b1, self.b2))
        below = torch.div(square, for_square, out=update).sqrt_().add_(self.eps)
        weights.addcdiv_(mean / for_mean, below, value=-chosen)


def _corrections(steps: Tensor, betas: tuple[float, float]) -> list[Tensor]:
    """1 − βᵗ for each weight's t. If only few values of t occur, each is computed once; usually all are the same."""
    least, most = (int(each) for each in torch.aminmax(steps))
    if most == least:
        return [_correction(steps[:1], beta) for beta in betas]
    if 4 * (most - least) > steps.numel():
        return [_correction(steps, beta) for beta in betas]
    different, which = torch.arange(least, most + 1), (steps - least).int()
    return [_correction(different, beta).index_select(0, which) for beta in betas]


def _correction(steps: Tensor, beta: float) -> Tensor:
    """1 − βᵗ in float64: powers in float32 would lose the leading digits, four of them for 1 − 0.999."""
    if beta == 0.0:
        return torch.ones(steps.numel(), dtype=torch.float32)
    return torch.expm1(steps.double() * math.log(beta)).neg_().float()
