"""The contract of an update rule: what a server does with values that are pushed.

Rule
├── (elementwise)   its state lies in flat tensors beside the weights        add, assign, sgd, momentum, adagrad, adam
└── (by pieces)     one optimizer of torch for each piece of the weights     torch

A rule is a frozen dataclass whose repr is its spec. It has no state of its own: the server keeps it, and hands a rule
the slices, or the gathered elements, that a push is about.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol

from torch import Tensor

from syncline.errors import ProtocolError, SpecError
from syncline.specs import Spec

__all__ = ["Applier", "UpdateRule"]


class Applier(Protocol):
    """A rule at work on one piece of the weights, where the rule is not elementwise."""

    def apply(self, update: Tensor, rate: float | None = None, first: int = 0) -> None:
        """Change the piece in place, or whole parameters of it from element `first` on. `update` may be overwritten."""
        ...

    def use(self, rule: Any) -> None:
        """Continue with other settings of the same optimizer."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Its state: copies of tensors as long as the piece, and of single numbers."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there; an empty one is a fresh start."""
        ...


class UpdateRule(ABC):
    """What a server does with values that are pushed.

    >>> import torch
    >>> from syncline.server.rules import build_rule
    >>> rule, weights = build_rule("sgd(lr=0.5)"), torch.zeros(2)
    >>> rule.apply(weights, torch.tensor([1.0, 2.0]), rule.state(2), None)
    >>> weights
    tensor([-0.5000, -1.0000])
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool] = True
    """Whether any range or list of keys may be pushed; otherwise whole pieces only, by `open`."""

    def state(self, numel: int) -> dict[str, Tensor]:
        """What it remembers of so many weights before the first push: flat tensors, one element a weight."""
        return {}

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        """Where it is elementwise: change `weights` and `state` in place, all of them as long as `update`.

        `update` is a gradient or a difference, averaged already; it may be used as scratch. `rate` goes before the
        rule's own.
        """
        raise AssertionError(f"{self!r} is not elementwise: open() it for each piece")

    def open(self, weights: Tensor, starts: Sequence[int] = ()) -> Applier:
        """For a rule that is not elementwise: begin with a piece, a row of float32 that is changed in place.

        `starts` are the elements at which another parameter begins: a step may leave some parameters out.
        """
        raise AssertionError(f"{self!r} is elementwise: apply() it")

    def pick(self, rate: float | None, own: float) -> float:
        """The rate of a push, or the rule's own. It comes from outside, and may be anything."""
        if rate is None:
            return own
        if not math.isfinite(rate):
            raise ProtocolError(f"a push to {self!r} has the rate {rate}: give a finite number, or none")
        return rate

    def check(self, name: str, low: float = 0.0, below: float = math.inf) -> None:
        """Refuse a setting that is not a number from `low` up to, but not, `below`."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
            end = f" and below {below:g}" if math.isfinite(below) else ""
            raise SpecError(f"{self.name}'s {name} is a finite number, {low:g} or more{end}, not {value!r}")

    def __repr__(self) -> str:
        own = [each for each in fields(self) if each.init]  # type: ignore[arg-type]
        first = tuple(getattr(self, each.name) for each in own if each.default is MISSING)
        rest = {
            each.name: getattr(self, each.name)
            for each in own
            if each.default is not MISSING and getattr(self, each.name) != each.default
        }
        return str(Spec(self.name, first, rest))
