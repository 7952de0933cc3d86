"""One codec after another: `topk(0.01)|quantize(4)` quantises the values that were kept.

    selector | values | lossless       topk, threshold and randomk choose; what follows codes the values they keep
    values | lossless                  the bytes of quantize, onebit, ternary or cast, compressed
    powersgd | cast                    the factors travel in half precision

Nothing else makes sense, and is refused.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import Codec, Draw, Part, PayloadCodec
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
    """Codecs in a row; made by `|`.

    >>> import syncline as sl
    >>> sl.TopK(0.01) | sl.Quantize(4)
    topk(0.01)|quantize(4)
    """

    links: tuple[Codec, ...]

    name: ClassVar[str] = "chain"
    kind: ClassVar[int] = 15

    def __post_init__(self) -> None:
        if len(self.links) < 2:
            raise SpecError("a chain has at least two links")
        first, *rest = self.links
        for link in self.links:
            if not isinstance(link, (PayloadCodec, PowerSGD)) or isinstance(link, (Chain, Raw)):
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
        """What follows the first link, as one codec."""
        found = self.links[1] if len(self.links) == 2 else Chain(self.links[1:])
        assert isinstance(found, PayloadCodec), "checked when it was built"
        return found

    @property
    def first(self) -> Codec:
        return self.links[0]

    @property
    def biased(self) -> bool:
        return any(link.biased and not link.exact for link in self.links)

    @property
    def keeps_residual(self) -> bool:
        told = [link.feedback for link in self.links if link.feedback is not None]
        return told[0] if told else self.biased

    @property
    def exact(self) -> bool:
        return all(link.exact for link in self.links)

    @property
    def sums(self) -> bool:
        return self.first.sums and isinstance(self.first, (PowerSGD, RandomK)) and isinstance(self.rest, Cast)

    @cached_property
    def fixed(self) -> bool:
        if isinstance(self.first, PowerSGD):
            return False
        assert isinstance(self.first, PayloadCodec)
        return self.first.fixed and self.rest.fixed

    @property
    def lingers(self) -> bool:
        return self.first.lingers

    @property
    def settled(self) -> int:
        return max(link.settled for link in self.links if isinstance(link, PayloadCodec))

    @property
    def notices(self) -> bool:
        return isinstance(self.first, PayloadCodec) and self.first.notices

    @property
    def counts_steps(self) -> bool:
        return any(link.counts_steps for link in self.links)

    @property
    def gradient_options(self) -> tuple[str, ...]:
        return tuple(option for link in self.links for option in link.gradient_options)

    @property
    def parameter_options(self) -> tuple[str, ...]:
        return tuple(option for link in self.links for option in link.parameter_options)

    def check(self, momentum: float) -> None:
        for link in self.links:
            link.check(momentum)

    def rounds(self, parts: Sequence[Part], draw: Draw, size: int) -> Generator[Tensor, None, None]:
        assert isinstance(self.first, (PowerSGD, RandomK)), "only these sum"
        assert isinstance(self.rest, Cast), "in half precision"
        return self.first.rounds(parts, draw, size, wire=self.rest.dtype, stochastic=self.rest.stochastic)

    # A tensor alone has no half factors to be summed: it is powersgd's own payload.

    def max_bytes(self, numel: int) -> int:
        return self.first.max_bytes(numel) if isinstance(self.first, PowerSGD) else super().max_bytes(numel)

    def encode(self, tensor: Tensor, draw: Draw | None = None, residual: Tensor | None = None) -> Tensor:
        if isinstance(self.first, PowerSGD):
            return self.first.encode(tensor, draw, residual)
        return super().encode(tensor, draw, residual)

    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        if isinstance(self.first, PowerSGD):
            return self.first.decode(payload, out, accumulate, step)
        return super().decode(payload, out, accumulate, step)

    def body_bytes(self, numel: int, step: int = 0) -> int:
        if isinstance(self.first, SparseCodec):
            return self.first.body_bytes(numel, step, self.rest)
        assert isinstance(self.first, PayloadCodec), "a chain that sums has no bodies"
        return Lossless.most_bytes(self.first.body_bytes(numel, step))

    def write(self, part: Part, body: Tensor, draw: Draw) -> int:
        if isinstance(self.first, TopK) and isinstance(self.rest, Quantize) and self.first.at_once(part):
            return self.first.write_at_once(part, body, draw, self.rest)
        if isinstance(self.first, SparseCodec):
            return self.first.write(part, body, draw, self.rest)
        assert isinstance(self.first, PayloadCodec), "a chain that sums has no bodies"
        inner = torch.zeros(self.first.body_bytes(part.numel, draw.step), dtype=torch.uint8, device=body.device)
        used = self.first.write(part, inner, draw)
        assert isinstance(self.rest, Lossless), "nothing else follows"
        return Lossless.compress(inner[:used], body, width=1, level=self.rest.level)

    def read_all(self, rows: Tensor, out: Tensor, scale: float) -> None:
        if not isinstance(self.first, SparseCodec):
            super().read_all(rows, out, scale)
        elif not (isinstance(self.rest, Quantize) and self.first.reads_at_once(rows, out, scale, self.rest)):
            self.first.read_all(rows, out, scale, self.rest)

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        if isinstance(self.first, SparseCodec):
            self.first.read(body, out, accumulate, self.rest)
            return
        assert isinstance(self.first, PayloadCodec), "a chain that sums has no bodies"
        inner = Lossless.decompress(body, self.first.body_bytes(out.numel()), width=1)
        self.first.read(inner, out, accumulate)

    def __repr__(self) -> str:
        return "|".join(map(repr, self.links))
