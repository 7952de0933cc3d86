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
from typing import Any, ClassVar, Protocol

from torch import Tensor

from syncline.errors import ProtocolError, SpecError
from syncline.specs import spec_of

__all__ = ["PieceOptimizer", "UpdateRule"]


class PieceOptimizer(Protocol):
    """A rule that is not elementwise, with its state, for one piece of the weights."""

    def apply(self, update: Tensor, rate: float | None = None, first: int = 0) -> None:
        """Update the piece in place, or whole parameters of it from element `first` on. `update` may be overwritten."""
        ...

    def use(self, rule: Any) -> None:
        """Continue with other settings of the same optimizer."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the state: tensors as long as the piece, or single numbers."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state; an empty one is a fresh start."""
        ...


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
        """For a rule that is not elementwise: begin with a piece, a 1-D float32 tensor that is updated in place.

        `starts` are the elements at which other parameters begin. A step may leave some parameters out.
        """
        raise AssertionError(f"{self!r} is elementwise: apply() it")

    def pick(self, rate: float | None, own: float) -> float:
        """The learning rate of a push, or the rule's own if the push has none."""
        if rate is None:
            return own
        if not math.isfinite(rate):
            raise ProtocolError(f"a push to {self!r} has the rate {rate}: give a finite number, or none")
        return rate

    def check(self, name: str, low: float = 0.0, below: float = math.inf) -> None:
        """Raise a `SpecError` if a setting is not a number of at least `low` and less than `below`."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
            end = f" and below {below:g}" if math.isfinite(below) else ""
            raise SpecError(f"{self.name}'s {name} is a finite number, {low:g} or more{end}, not {value!r}")

    def __repr__(self) -> str:
        return str(spec_of(self.name, self))
