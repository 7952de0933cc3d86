"""Send what has changed enough: the rest adds up at the client until it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.errors import SpecError
from syncline.server.filters.base import Filter, narrowed

__all__ = ["Significant"]


@dataclass(frozen=True, repr=False)
class Significant(Filter):
    """Send the values of at least a given magnitude.

        relative=False: |r| ≥ t        relative=True: |r| ≥ t · √(mean of r²)

    A zero is never sent, and NaN always: whoever checks for it must get to see it. Li et al., *Scaling distributed
    machine learning with the parameter server*, 2014.

    >>> Significant(0.5).choose(torch.tensor([0.1, -2.0, 0.5]), number=1)
    tensor([1, 2])
    >>> Significant(1.5, relative=True).choose(torch.tensor([0.1, -2.0, 0.5]), number=1)    # the root is 1.19
    tensor([1])
    """

    t: float
    relative: bool = False

    name: ClassVar[str] = "significant"

    def __post_init__(self) -> None:
        number = isinstance(self.t, (int, float)) and not isinstance(self.t, bool)
        info = torch.finfo(torch.float32)
        if not (number and info.tiny <= self.t <= info.max):
            raise SpecError(f"significant's t is a number above 0 that float32 has, not {self.t!r}")
        if not isinstance(self.relative, bool):
            raise SpecError(f"significant's relative is True or False, not {self.relative!r}")

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        bound: float | Tensor = self.t
        if self.relative:
            norm = torch.linalg.vector_norm(residual, dtype=torch.float64)  # squares of float32 may leave float32
            bound = (self.t * norm / max(1, residual.numel()) ** 0.5).to(torch.float32)
        values = residual if places is None else residual[places]
        enough = (values.abs() < bound).logical_not_()
        return narrowed(places, enough & (values != 0) if self.relative else enough)  # of zeros the bound is 0 too
