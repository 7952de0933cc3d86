"""The loop of stochastic rounding to half precision for the CPU; the same bits as in `dense_reference.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.codecs.kernels.compiled import bits_of, jit

__all__ = ["cast_stochastic"]


@jit
def cast_stochastic(
    values: NDArray[np.float32], halves: NDArray[np.int16], brain: bool, limit: int, start: int, key: int
) -> None:
    """The bits of half-precision neighbours, up with the probability that makes the mean right."""
    bits = values.view(np.uint32)
    top = np.uint32(limit)
    for j in range(len(values)):
        sign = np.uint32(np.uint32(bits[j] >> np.uint32(16)) & np.uint32(0x8000))
        size = np.uint32(bits[j] & np.uint32(0x7FFFFFFF))
        random = bits_of(np.uint32(start + j), np.uint32(key))
        if brain:
            half = np.uint32(np.uint32(size + np.uint32(random >> np.uint32(16))) >> np.uint32(16))
        else:
            half = np.uint32(
                np.uint32(np.uint32(size + np.uint32(random >> np.uint32(19))) >> np.uint32(13)) - np.uint32(112 << 10)
            )
            if size < np.uint32(113 << 23):  # below fp16's normal numbers the steps are 2^-24 wide
                steps = np.float32(abs(values[j]) * np.float32(2.0**24))
                low = np.int32(steps)
                rest = np.int32(np.float32(steps - np.float32(low)) * np.float32(1 << 24))
                half = np.uint32(low + np.int32(np.int32(random >> np.uint32(8)) < rest))
        halves[j] = np.int16(np.uint16(min(half, top) | sign))
