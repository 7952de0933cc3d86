"""Tensors of many shapes and types as a few rows of numbers, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.errors import IncompatibleError

__all__ = ["Rows"]


class Rows:
    """The layout of tensors like these: one row for each dtype, in CPU memory.

    >>> rows = Rows([torch.zeros(2, 2), torch.zeros(3)])
    >>> [row.shape for row in rows.read([torch.ones(2, 2), torch.ones(3)])]
    [torch.Size([7])]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._kinds: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                raise IncompatibleError(
                    f"gossip mixes real numbers, and a parameter of shape {tuple(tensor.shape)} is {tensor.dtype}: "
                    "view it as real numbers, or take a strategy that averages gradients, such as allreduce"
                )
            self._kinds.setdefault(tensor.dtype, []).append(number)

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(row.nbytes for row in self.empty())

    def empty(self) -> list[Tensor]:
        """Rows to be filled."""
        return [
            torch.empty(sum(self._shapes[number].numel() for number in numbers), dtype=dtype)
            for dtype, numbers in self._kinds.items()
        ]

    def read(self, tensors: Sequence[Tensor], into: list[Tensor] | None = None) -> list[Tensor]:
        """Copy tensors into rows."""
        rows = self.empty() if into is None else into
        views = self.views(rows)
        torch._foreach_copy_(views, [tensor.detach() for tensor in tensors])
        return rows

    def views(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's place in rows, in its shape and the tensors' order."""
        found: list[Tensor] = [torch.empty(0, dtype=torch.float32)] * len(self._shapes)
        for row, numbers in zip(rows, self._kinds.values(), strict=True):
            parts = torch.split_with_sizes(row, [self._shapes[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part.view(self._shapes[number])
        return found
