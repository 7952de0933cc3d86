"""The part of an unsplit model that one worker has: some of its tensors, and slices of others.

`DimensionSlice(0, ((1, 2), (3, 4), (5, 6)), 6)`:

```text
whole, 6 rows    q0 q1 k0 k1 v0 v1
this worker         q1    k1    v1
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["DimensionSlice", "ModelPart"]


@dataclass(frozen=True)
class DimensionSlice:
    """Ranges along one dimension of a tensor, one after another.

    >>> half = DimensionSlice(0, ((2, 4),), 4)
    >>> half.take(torch.arange(4)), half.length
    (tensor([2, 3]), 2)
    """

    dimension: int
    ranges: tuple[tuple[int, int], ...]
    """Each from its first index to the one after its last."""
    size: int
    """The size of the whole tensor in this dimension."""

    @property
    def length(self) -> int:
        """The size of the slice in this dimension."""
        return sum(stop - start for start, stop in self.ranges)

    def take(self, whole: Tensor) -> Tensor:
        """A copy of this part of the whole tensor."""
        parts = [whole.narrow(self.dimension, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dimension)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copy this part into the whole tensor."""
        sizes = [stop - start for start, stop in self.ranges]
        for (start, stop), values in zip(self.ranges, torch.split(part, sizes, self.dimension), strict=True):
            whole.narrow(self.dimension, start, stop - start).copy_(values)


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a worker saves and loads. Names are those of the unsplit model's state dict."""

    number: int
    """Workers with the same part have the same number."""
    saves: frozenset[str]
    """The names that this worker saves. Each name is saved by one worker, or by several with a slice each."""
    loads: frozenset[str]
    """The names that this worker needs."""
    slices: Mapping[str, DimensionSlice] = field(default_factory=dict)
    """The names of which it has only a slice."""
    keeps_state: bool = False
    """Whether it saves the run's state of its part even if other workers save all of its tensors."""

    @property
    def writes(self) -> bool:
        """Whether this worker saves anything of its part."""
        return bool(self.saves) or self.keeps_state
