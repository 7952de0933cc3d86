"""Shared by the numba kernels. Imported only if numba is installed: see `dispatch.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

__all__ = ["Number", "bits_of", "jit", "mix32"]

F = TypeVar("F", bound=Callable[..., Any])
Number = Any
"""A numpy scalar. Its dtype is inferred by numba; numpy's annotations lose it at the first operation."""


def jit(function: F) -> F:
    """Compile at the first call, without the GIL. The code is cached on disk if a folder is writable."""
    try:
        return cast("F", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # neither beside the source nor in the home directory: compile in each process
        return cast("F", numba.njit(nogil=True)(function))


@jit
def mix32(x: Number) -> Number:
    """As in `random_bits.py`. Each step is cast back, because numba widens integers."""
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@jit
def bits_of(place: Number, key: Number) -> Number:
    """The 32 random bits of an element."""
    return mix32(np.uint32(np.uint32(place * np.uint32(0x9E3779B1)) ^ key))
