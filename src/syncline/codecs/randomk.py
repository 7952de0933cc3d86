"""Sends random elements, the same on every rank: the wire sums their values, and no index is sent.

The n elements form a ring, which is cut at a random position into k intervals of nearly equal length. One element is
drawn from each. So every element is drawn in k/n of all steps, and the drawn elements are spread evenly.

Stich, Cordonnier, Jaggi: Sparsified SGD with memory, 2018. Values are not scaled by n/k: error
feedback sends the other elements later.

    key u32 │ the values, encoded by another codec
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, RngKey, TensorSlice, all_finite, get_u32, is_number, put_u32
from syncline.codecs.cast import round_to_half
from syncline.codecs.kernels.dispatch import sparse_kernels
from syncline.codecs.kernels.random_bits import MASK, random_bits
from syncline.codecs.sparse import SparseCodec, index_dtype
from syncline.errors import DivergedError, SpecError

__all__ = ["RandomK"]


@dataclass(frozen=True, repr=False)
class RandomK(SparseCodec):
    """Send random elements, the same on every rank.

    >>> codec = RandomK(0.5)
    >>> int(codec.decode(codec.encode(torch.ones(10)), torch.empty(10)).sum())
    5
    """

    ratio: float
    feedback: bool | None = None

    name: ClassVar[str] = "randomk"
    codec_id: ClassVar[int] = 6
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not (is_number(self.ratio) and 0 < self.ratio <= 1):
            raise SpecError(f"randomk keeps a fraction in (0, 1], as 0.01, not {self.ratio!r}")
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(allreducible=True)

    def max_selected(self, numel: int, step: int = 0) -> int:
        return min(numel, max(1, round(self.ratio * numel)))

    def head_bytes(self, numel: int, count: int) -> int:
        return 4

    def write_head(self, head: Tensor, numel: int, indices: Tensor, rng: RngKey) -> None:
        put_u32(head, _key(rng))

    def read_head(self, body: Tensor, numel: int) -> tuple[Tensor, int]:
        return self._drawn(get_u32(body), numel, body.device), 4

    def select(self, part: TensorSlice, rng: RngKey) -> tuple[Tensor, Tensor]:
        indices = self._drawn(_key(rng), part.numel, part.flat.device)
        if part.residual is None:
            return indices, part.flat[indices]
        values = part.residual.add_(part.flat)[indices]
        sparse_kernels(values).scatter(part.residual, indices, torch.zeros_like(values), accumulate=False)
        return indices, values

    def reduce_rounds(
        self,
        parts: Sequence[TensorSlice],
        rng: RngKey,
        size: int,
        wire: torch.dtype = torch.float32,
        stochastic: bool = False,
    ) -> Generator[Tensor, None, None]:
        """One round: the drawn values of all slices, as `wire`. The rounding error stays in the residual.

        With `stochastic`, values are rounded to half precision stochastically, without bias.
        """
        if not parts:
            return
        rngs = [rng.for_slice(part.name, part.start) for part in parts]
        selected = [self.select(part, own) for part, own in zip(parts, rngs, strict=True)]
        flat = torch.cat([values for _, values in selected])
        flat = flat if wire == torch.float32 else torch.empty_like(flat, dtype=wire)
        pieces = torch.split_with_sizes(flat, [values.numel() for _, values in selected])
        for part, own, (indices, values), piece in zip(parts, rngs, selected, pieces, strict=True):
            if wire == torch.float32:
                continue
            round_to_half(values, piece, own, size, stochastic)
            if part.residual is not None:
                lost = values - piece.to(torch.float32)
                sparse_kernels(lost).scatter(part.residual, indices, lost, accumulate=False)
        yield flat
        if not all_finite(flat):  # the same bits on every rank, so all raise
            raise DivergedError(f"{self!r}: the sum over {size} ranks holds NaN or Inf")
        for part, (indices, _), piece in zip(parts, selected, pieces, strict=True):
            sparse_kernels(part.flat).scatter(part.flat.zero_(), indices, piece.to(torch.float32), accumulate=False)

    def _drawn(self, key: int, numel: int, device: torch.device) -> Tensor:
        """The sorted indices of a key."""
        count = self.max_selected(numel)
        bits = random_bits(key, 0, count + 1, device)
        edges = torch.arange(count + 1, device=device) * numel // max(1, count)
        positions = edges[:-1] + ((edges[1:] - edges[:-1]) * bits[:-1] >> 32)
        positions = positions + ((bits[-1:] >> 1) * numel >> 31)  # the position where the ring is cut
        over = int((positions >= numel).sum())
        positions = torch.cat([positions[count - over :] - numel, positions[: count - over]])
        return positions.to(index_dtype(numel))


def _key(rng: RngKey) -> int:
    """The key of one slice, from the step, the parameter and the slice's start."""
    return rng.shared_key ^ int(random_bits(0x5EED, rng.start, 1)) & MASK
