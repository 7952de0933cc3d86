"""What a schedule moves. A carrier says where a chunk lies, where one may land, and how it is merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from syncline.collectives.base import Move
from syncline.collectives.buffers import Buffers
from syncline.transports import Op

__all__ = ["Carrier", "DenseCarrier", "PiecesCarrier", "bounds"]

_COMBINE: dict[Op, Callable[..., Tensor]] = {
    "sum": Tensor.add_,
    "min": lambda place, data: torch.minimum(place, data, out=place),
    "max": lambda place, data: torch.maximum(place, data, out=place),
    "product": Tensor.mul_,
}
"""Each combines its second argument into its first."""


class Carrier(Protocol):
    """The data of one rank, cut into chunks."""

    def nbytes(self, move: Move) -> int:
        """How many bytes a move carries: the same on both its ends."""
        ...

    def read(self, move: Move) -> Tensor:
        """The bytes to send."""
        ...

    def landing(self, move: Move) -> Tensor:
        """Where the bytes of a receive go: their place itself, or a buffer if they are to be combined."""
        ...

    def merge(self, move: Move, data: Tensor) -> None:
        """Take in what has landed."""
        ...


def bounds(numel: int, chunks: int) -> list[int]:
    """Where chunks begin and end; sizes differ by one element at most.

    >>> bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [numel * chunk // chunks for chunk in range(chunks + 1)]


class DenseCarrier:
    """A contiguous tensor reduced in place, element by element."""

    def __init__(self, tensor: Tensor, edges: Sequence[int], op: Op, buffers: Buffers) -> None:
        self._flat = tensor.view(-1)
        self._bytes = self._flat.view(torch.uint8)
        self._item = tensor.element_size()
        self._edges = edges
        self._combine = _COMBINE[op]
        self._buffers = buffers

    def nbytes(self, move: Move) -> int:
        return (self._edges[move.chunk + move.width] - self._edges[move.chunk]) * self._item

    def read(self, move: Move) -> Tensor:
        return self._bytes[self._edges[move.chunk] * self._item : self._edges[move.chunk + move.width] * self._item]

    def landing(self, move: Move) -> Tensor:
        return self._buffers.take(self.nbytes(move), self._flat.device) if move.combine else self.read(move)

    def merge(self, move: Move, data: Tensor) -> None:
        if move.combine:
            place = self._flat[self._edges[move.chunk] : self._edges[move.chunk + move.width]]
            self._combine(place, data.view(place.dtype))
            self._buffers.give(data)


class PiecesCarrier:
    """Chunks that lie anywhere and are only moved: tensors by chunk number, each contiguous."""

    def __init__(self, pieces: Mapping[int, Tensor]) -> None:
        self._pieces = pieces

    def nbytes(self, move: Move) -> int:
        piece = self._pieces[move.chunk]
        return piece.numel() * piece.element_size()

    def read(self, move: Move) -> Tensor:
        return self._pieces[move.chunk]

    landing = read

    def merge(self, move: Move, data: Tensor) -> None:
        assert not move.combine, "pieces are moved, not combined"
