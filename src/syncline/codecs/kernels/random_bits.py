"""Counter-based random bits: element i of a key always gets the same 32 bits, on any rank and in any order.

    r_i = mix((i · 0x9E3779B1) xor key)       i = start + position, all in 32 bits

So a slice gets the same bits as within the whole tensor, and the torch and numba kernels agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MASK", "POSITION_FACTOR", "mix32", "random_bits"]

MASK = 0xFFFFFFFF
POSITION_FACTOR = 0x9E3779B1


def mix32(x: Tensor) -> Tensor:
    """Scramble numbers below 2^32, stored as int64: a bijection in which each bit depends on all.

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
    return mix32(((place * POSITION_FACTOR) & MASK) ^ key)  # a wrap of the product keeps the low 32 bits
