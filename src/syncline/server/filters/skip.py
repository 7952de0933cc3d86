"""Send a random part: each value waits with a given probability."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.kernels.random_bits import SPREAD
from syncline.errors import SpecError
from syncline.server.filters.base import Filter, narrowed

__all__ = ["Skip"]


@dataclass(frozen=True, repr=False)
class Skip(Filter):
    """Each value waits for a later push with probability p.

    Seed, number of the push and place decide, whatever else was chosen: the same run skips the same.

    >>> chosen = Skip(0.75).choose(torch.ones(10_000), number=1)
    >>> chosen is not None and 2_300 < len(chosen) < 2_700
    True
    """

    p: float
    seed: int = 0

    name: ClassVar[str] = "skip"

    def __post_init__(self) -> None:
        if not (isinstance(self.p, (int, float)) and not isinstance(self.p, bool) and 0 <= self.p < 1):
            raise SpecError(f"skip's p is a probability, 0 or more and below 1, not {self.p!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise SpecError(f"skip's seed is a whole number, not {self.seed!r}")

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        where = torch.arange(residual.numel(), device=residual.device) if places is None else places
        return narrowed(places, _mixed(where, self._key(number)) >= round(self.p * 2**32) - 2**31)

    def _key(self, number: int) -> int:
        """32 bits for a push."""
        text = f"skip/{self.seed}/{number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _mixed(places: Tensor, key: int) -> Tensor:
    """`random_bits` of these places, less 2^31: in int32, where products wrap by themselves."""
    x = places.to(torch.int32).mul_(_signed(SPREAD)).bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return x.bitwise_xor_(-(2**31))


def _signed(number: int) -> int:
    """The same 32 bits as an int32."""
    return number - 2**32 if number >= 2**31 else number
