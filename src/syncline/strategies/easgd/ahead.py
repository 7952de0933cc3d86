"""Nesterov's momentum around an optimizer that has none: the gradient is taken where the momentum leads.

v ← δ v − η g(x + δ v),  x ← x + v::

    between steps the parameters hold      x + δ v                what the next forward must see
    the optimizer's step makes of it       x + δ v − η g = x + v  the new x, with the new v in it
    so                                     v = new x − old x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.errors import IncompatibleError

__all__ = ["Ahead", "check_momentum"]


class Ahead:
    """Holds x of parameters that stand at x + δ v."""

    def __init__(self, weights: Mapping[str, Tensor], momentum: float) -> None:
        self._momentum = momentum
        self._names = list(weights)
        self.own = [weight.detach().clone() for weight in weights.values()]
        """x."""

    def look(self, weights: Sequence[Tensor], back: Sequence[Tensor] | None = None) -> None:
        """The optimizer has stepped: take x over, moved back by `back`, and have the parameters look ahead again."""
        velocity = [weight - before for weight, before in zip(weights, self.own, strict=True)]
        for own, weight in zip(self.own, weights, strict=True):
            own.copy_(weight)
        self.move(self.own, back)
        for weight, own, speed in zip(weights, self.own, velocity, strict=True):
            torch.add(own, speed, alpha=self._momentum, out=weight)

    def shift(self, weights: Sequence[Tensor], back: Sequence[Tensor]) -> None:
        """Move x back outside a step, and what looks ahead of it with it."""
        self.move(self.own, back)
        self.move(weights, back)

    @staticmethod
    def move(tensors: Sequence[Tensor], back: Sequence[Tensor] | None) -> None:
        """Take `back` off."""
        for tensor, each in zip(tensors, back or [], strict=back is not None):
            tensor.sub_(each)

    def rest(self, weights: Sequence[Tensor]) -> None:
        """Forget the speed: x is what the parameters hold."""
        for own, weight in zip(self.own, weights, strict=True):
            own.copy_(weight)

    def state(self) -> dict[str, Tensor]:
        """x, by the parameters' names."""
        return {name: own.clone() for name, own in zip(self._names, self.own, strict=True)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
        for name, own in zip(self._names, self.own, strict=True):
            own.copy_(state[name])


def check_momentum(spec: object, momentum: float, optimizer: Optimizer) -> None:
    """Refuse momentum on top of momentum."""
    found = max((float(group.get("momentum") or 0.0) for group in optimizer.param_groups), default=0.0)
    if momentum and found:
        raise IncompatibleError(
            f"{spec} has a momentum of its own, and the optimizer's is {found:g}: they would add up; give the "
            "optimizer none, or leave the strategy's out"
        )
