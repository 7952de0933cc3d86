"""A user's own rule: a handler that both ends have registered by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from syncline.errors import SpecError
from syncline.server.handlers import find_handler
from syncline.server.rules.base import Rule

__all__ = ["Handled"]


@dataclass(frozen=True, repr=False)
class Handled(Rule):
    """What the handler of this name does; it is looked up where it runs, because code is never sent.

    >>> import torch
    >>> from syncline.server.handlers import handler
    >>> @handler("largest")
    ... def largest(weights, values, state):
    ...     torch.maximum(weights, values, out=weights)
    >>> weights = torch.tensor([1.0, 5.0])
    >>> Handled("largest").apply(weights, torch.tensor([3.0, 3.0]), {}, None)
    >>> weights
    tensor([3., 5.])
    """

    handler: str

    name: ClassVar[str] = "handler"

    def __post_init__(self) -> None:
        if not (isinstance(self.handler, str) and self.handler.isidentifier()):
            raise SpecError(f"handler takes the name of one, as handler('largest'), not {self.handler!r}")

    def state(self, numel: int) -> dict[str, Tensor]:
        return find_handler(self.handler).fresh(numel)

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        find_handler(self.handler)(weights, update, state, rate)
