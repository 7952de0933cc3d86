"""Elements drawn at random, the same on every rank: their values add up on the wire, and no index travels.

The n elements, in a ring, are cut from a random place on into k stretches, as equal as they can be, and one element is
drawn from each: so every element is drawn equally often, k/n of all steps, and what is drawn is spread over all.

Stich, Cordonnier, Jaggi: Sparsified SGD with memory, 2018. Values are not scaled by n/k: with error feedback what was
not drawn comes later.

    key u32 │ the values, as another codec codes them
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, RngKey, TensorSlice
from syncline.codecs.cast import round_to_half
from syncline.codecs.kernels.random_bits import MASK, random_bits
from syncline.codecs.kernels.sparse import kernels
from syncline.codecs.sparse import SparseCodec, get_u32, index_dtype, put_u32
from syncline.errors import DivergedError, SpecError

__all__ = ["RandomK"]


@dataclass(frozen=True, repr=False)
class RandomK(SparseCodec):
    """Send elements drawn at random, the same on every rank.

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
        if not (isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool) and 0 < self.ratio <= 1):
            raise SpecError(f"randomk keeps a fraction in (0, 1], as 0.01, not {self.ratio!r}")
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(allreducible=True)

    def most(self, numel: int, step: int = 0) -> int:
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
        kernels(values).scatter(part.residual, indices, torch.zeros_like(values), accumulate=False)
        return indices, values

    def reduce_rounds(
        self,
        parts: Sequence[TensorSlice],
        rng: RngKey,
        size: int,
        wire: torch.dtype = torch.float32,
        stochastic: bool = False,
    ) -> Generator[Tensor, None, None]:
        """One round: the drawn values of all parts, as `wire`. What that type cannot represent stays in the residual.

        With `stochastic` values are rounded to half precision at random, so that the mean is right.
        """
        if not parts:
            return
        rngs = [rng.for_slice(part.name, part.start) for part in parts]
        chosen = [self.select(part, own) for part, own in zip(parts, rngs, strict=True)]
        flat = torch.cat([values for _, values in chosen])
        flat = flat if wire == torch.float32 else torch.empty_like(flat, dtype=wire)
        pieces = torch.split_with_sizes(flat, [values.numel() for _, values in chosen])
        for part, own, (indices, values), piece in zip(parts, rngs, chosen, pieces, strict=True):
            if wire == torch.float32:
                continue
            round_to_half(values, piece, own, size, stochastic)
            if part.residual is not None:
                unsaid = values - piece.to(torch.float32)
                kernels(unsaid).scatter(part.residual, indices, unsaid, accumulate=False)
        yield flat
        if not bool(torch.isfinite(flat).all()):  # the same bits everywhere, so every rank raises
            raise DivergedError(f"{self!r}: the sum over {size} ranks holds NaN or Inf")
        for part, (indices, _), piece in zip(parts, chosen, pieces, strict=True):
            kernels(part.flat).scatter(part.flat.zero_(), indices, piece.to(torch.float32), accumulate=False)

    def _drawn(self, key: int, numel: int, device: torch.device) -> Tensor:
        """The indices that a key stands for, sorted."""
        count = self.most(numel)
        bits = random_bits(key, 0, count + 1, device)
        edges = torch.arange(count + 1, device=device) * numel // max(1, count)
        places = edges[:-1] + ((edges[1:] - edges[:-1]) * bits[:-1] >> 32)
        places = places + ((bits[-1:] >> 1) * numel >> 31)  # where the ring is cut
        over = int((places >= numel).sum())
        places = torch.cat([places[count - over :] - numel, places[: count - over]])
        return places.to(index_dtype(numel))


def _key(rng: RngKey) -> int:
    """The key of one part: of the step and the parameter, and where in it the part begins."""
    return rng.shared_key ^ int(random_bits(0x5EED, rng.start, 1)) & MASK
