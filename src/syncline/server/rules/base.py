"""The contract of an update rule: what a server does with pushed values.

UpdateRule
├── elementwise     implements `state` and `apply`     add, assign, sgd, momentum, adagrad, adam, handlers
└── by pieces       implements `open`                  torch: one optimizer for each piece of the weights

A rule is a frozen dataclass whose repr is its spec. The server keeps the state, and passes a rule the slices or the
gathered elements that a push is about.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from syncline.errors import SpecError
from syncline.specs import spec_of

if TYPE_CHECKING:
    from syncline.server.rules.torch_rule import PieceOptimizer

__all__ = ["UpdateRule"]


class UpdateRule(ABC):
    """What a server does with pushed values.

    >>> import torch
    >>> from syncline.server.rules import build_rule
    >>> rule, weights = build_rule("sgd(lr=0.5)"), torch.zeros(2)
    >>> rule.apply(weights, torch.tensor([1.0, 2.0]), rule.state(2), None)
    >>> weights
    tensor([-0.5000, -1.0000])
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool] = True
    """Whether any range or list of keys may be pushed; otherwise only whole pieces, by `open`."""

    def state(self, numel: int) -> dict[str, Tensor]:
        """The state of `numel` weights before the first push: 1-D tensors, one element for each weight."""
        return {}

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        """For an elementwise rule: update `weights` and `state` in place; all have the length of `update`.

        `update` is a gradient or a difference, already averaged. It may be overwritten. `rate` replaces the rule's own.
        """
        raise AssertionError(f"{self!r} is not elementwise: open() it for each piece")

    def open(self, weights: Tensor, starts: Sequence[int] = ()) -> PieceOptimizer:
        """For a rule that is not elementwise: the optimizer of a piece, a 1-D float32 tensor that is updated in place.

        `starts` are the elements at which other parameters begin. A step may leave some parameters out.
        """
        raise AssertionError(f"{self!r} is elementwise: apply() it")

    def check(self, name: str, low: float = 0.0, below: float = math.inf) -> None:
        """Raise a `SpecError` if a setting is not a number of at least `low` and less than `below`."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
            end = f" and below {below:g}" if math.isfinite(below) else ""
            raise SpecError(f"{self.name}'s {name} is a finite number, {low:g} or more{end}, not {value!r}")

    def __repr__(self) -> str:
        return str(spec_of(self.name, self))
