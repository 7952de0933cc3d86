"""Random bits from a counter: element i of a rng always gets the same 32 bits, whoever computes them and in any order.

    r_i = mix((i · 0x9E3779B1) xor key)       i = start + position, all in 32 bits

So a slice of a tensor gets the bits that it has within the whole, and the torch and numba kernels agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MASK", "SPREAD", "mix32", "random_bits", "uniform"]

MASK = 0xFFFFFFFF
SPREAD = 0x9E3779B1


def mix32(x: Tensor) -> Tensor:
    """Scramble numbers below 2^32, kept as int64: one to one, and each bit depends on all.

    >>> [hex(v) for v in mix32(torch.tensor([0, 1, 2])).tolist()]
    ['0x0', '0x688990c0', '0xd1132181']
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def random_bits(key: int, start: int, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits for each of `numel` elements from `start` on, as int64.

    >>> torch.equal(random_bits(7, 0, 10)[4:], random_bits(7, 4, 6))
    True
    """
    place = torch.arange(start, start + numel, dtype=torch.int64, device=device) & MASK
    return mix32(((place * SPREAD) & MASK) ^ key)  # the product may wrap: its low 32 bits are right all the same


def uniform(key: int, start: int, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Numbers in [0, 1) from the upper 24 bits, each exact in float32.

    >>> bool((uniform(7, 0, 1000) < 1).all())
    True
    """
    return (random_bits(key, start, numel, device) >> 8).to(torch.float32) * 2.0**-24
