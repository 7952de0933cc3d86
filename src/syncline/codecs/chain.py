"""Chains of codecs: `topk(0.01)|quantize(4)` quantises the selected values.

    selector | values | lossless       topk, threshold and randomk select; the next codec encodes the selected values
    values | lossless                  the bytes of quantize, onebit, ternary or cast, compressed
    powersgd | cast                    the factors are sent in half precision

Other chains are refused.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.cast import Cast
from syncline.codecs.lossless import Lossless
from syncline.codecs.powersgd import PowerSGD
from syncline.codecs.quantize import Quantize
from syncline.codecs.randomk import RandomK
from syncline.codecs.raw import Raw
from syncline.codecs.sparse import SparseCodec
from syncline.codecs.topk import TopK
from syncline.errors import SpecError

__all__ = ["Chain"]


@dataclass(frozen=True, repr=False)
class Chain(PayloadCodec):
    """A chain of codecs, made by `|`.

    >>> import syncline as sl
    >>> sl.codecs.TopK(0.01) | sl.codecs.Quantize(4)
    topk(0.01)|quantize(4)
    """

    links: tuple[PayloadCodec, ...]

    name: ClassVar[str] = "chain"
    codec_id: ClassVar[int] = 15

    def __post_init__(self) -> None:
        if len(self.links) < 2:
            raise SpecError("a chain has at least two links")
        first, *rest = self.links
        for link in self.links:
            if not isinstance(link, PayloadCodec) or isinstance(link, (Chain, Raw)):
                raise SpecError(f"{self!r}: {link!r} cannot be part of a chain; put the chain inside it")
        for link in rest:
            if isinstance(link, SparseCodec):
                raise SpecError(f"{self!r}: {link!r} chooses elements, so it comes first")
            if isinstance(link, PowerSGD):
                raise SpecError(f"{self!r}: {link!r} makes matrices of the gradient itself, so it comes first")
        if isinstance(first, PowerSGD):
            if len(rest) != 1 or not isinstance(rest[0], Cast):
                raise SpecError(f"{self!r}: factors must add up on the wire; only cast may follow {first!r}")
        elif isinstance(first, SparseCodec):
            if len(rest) > 1:
                Chain(tuple(rest))
            if isinstance(first, TopK) and first.momentum and not self.keeps_residual:
                raise SpecError(f"{self!r}: topk's momentum lives in the residual; leave out feedback=False")
        elif len(rest) != 1 or not isinstance(rest[0], Lossless) or isinstance(first, Lossless):
            raise SpecError(f"{self!r}: after {first!r} only lossless may follow: its bytes are not numbers any more")

    @cached_property
    def rest(self) -> PayloadCodec:
        """The links after the first, as one codec."""
        return self.links[1] if len(self.links) == 2 else Chain(self.links[1:])

    @property
    def first(self) -> PayloadCodec:
        return self.links[0]

    @cached_property
    def traits(self) -> CodecTraits:
        links = [link.traits for link in self.links]
        first = links[0]
        power = isinstance(self.first, PowerSGD)
        return CodecTraits(
            biased=any(link.biased and not link.exact for link in links),
            exact=all(link.exact for link in links),
            fixed_length=not power and first.fixed_length and self.rest.traits.fixed_length,
            steady_from_step=max(link.steady_from_step for link in links),
            detects_nonfinite=first.detects_nonfinite,
            allreducible=isinstance(self.first, (PowerSGD, RandomK)) and isinstance(self.rest, Cast),
            residual_needs_sum=first.residual_needs_sum,
            momentum=max(link.momentum for link in links),
            gradient_options=tuple(option for link in links for option in link.gradient_options),
            parameter_options=tuple(option for link in links for option in link.parameter_options),
        )

    @cached_property
    def keeps_residual(self) -> bool:
        chosen = [link.feedback for link in self.links if link.feedback is not None]
        return chosen[0] if chosen else self.traits.biased

    def reduce_rounds(self, parts: Sequence[TensorSlice], rng: RngKey, size: int) -> Generator[Tensor, None, None]:
        assert isinstance(self.first, (PowerSGD, RandomK)), "only these sum"
        assert isinstance(self.rest, Cast), "in half precision"
        return self.first.reduce_rounds(parts, rng, size, wire=self.rest.dtype, stochastic=self.rest.stochastic)

    # A single tensor has no factors to sum: its payload is powersgd's own.

    def max_bytes(self, numel: int) -> int:
        return self.first.max_bytes(numel) if isinstance(self.first, PowerSGD) else super().max_bytes(numel)

    def encode(self, tensor: Tensor, rng: RngKey | None = None, residual: Tensor | None = None) -> Tensor:
        if isinstance(self.first, PowerSGD):
            return self.first.encode(tensor, rng, residual)
        return super().encode(tensor, rng, residual)

    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        if isinstance(self.first, PowerSGD):
            return self.first.decode(payload, out, accumulate, step)
        return super().decode(payload, out, accumulate, step)

    def body_bytes(self, numel: int, step: int = 0) -> int:
        if isinstance(self.first, SparseCodec):
            return self.first.body_bytes(numel, step, self.rest)
        return Lossless.max_body_bytes(self.first.body_bytes(numel, step))

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        if isinstance(self.first, TopK) and isinstance(self.rest, Quantize) and self.first.can_fuse(part):
            return self.first.write_fused(part, body, rng, self.rest)
        if isinstance(self.first, SparseCodec):
            return self.first.write(part, body, rng, self.rest)
        inner = torch.zeros(self.first.body_bytes(part.numel, rng.step), dtype=torch.uint8, device=body.device)
        used = self.first.write(part, inner, rng)
        assert isinstance(self.rest, Lossless), "nothing else follows"
        return Lossless.compress(inner[:used], body, width=1, level=self.rest.level)

    def read_all(self, rows: Tensor, out: Tensor, scale: float) -> None:
        if not isinstance(self.first, SparseCodec):
            super().read_all(rows, out, scale)
        elif not (isinstance(self.rest, Quantize) and self.first.read_all_fused(rows, out, scale, self.rest)):
            self.first.read_all(rows, out, scale, self.rest)

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        if isinstance(self.first, SparseCodec):
            self.first.read(body, out, accumulate, self.rest)
            return
        inner = Lossless.decompress(body, self.first.body_bytes(out.numel()), width=1)
        self.first.read(inner, out, accumulate)

    def __repr__(self) -> str:
        return "|".join(map(repr, self.links))
