"""`TensorSlice`: the part of one tensor of the unsplit model that a worker has.

```text
whole, 6 rows    q0 q1 k0 k1 v0 v1          TensorSlice(0, ((1, 2), (3, 4), (5, 6)), 6)
this worker         q1    k1    v1
```
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TensorSlice"]


@dataclass(frozen=True)
class TensorSlice:
    """Ranges along one dimension of a tensor, one after another.

    >>> half = TensorSlice(0, ((2, 4),), 4)
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
