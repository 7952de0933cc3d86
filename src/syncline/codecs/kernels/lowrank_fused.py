"""The numba kernels of powersgd: the same order of additions as in `powersgd.py`, so the same bits."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from syncline.codecs.kernels.compiled import Number, jit

__all__ = ["orthonormal", "product"]


def orthonormal(columns: Tensor, dependent: float) -> None:
    """Modified Gram-Schmidt of the rows of a float64 tensor, in place."""
    _orthonormal(columns.numpy(), dependent)


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Σ_k left[k]ᵀ right[k] into `out`, the terms of an element in the order of k."""
    _product(left.numpy(), right.numpy(), out.numpy())


@jit
def _total(row: Number) -> Number:
    """Pairwise summation; overwrites `row`."""
    count = row.shape[0]
    if count == 0:
        return 0.0
    while count > 1:
        half = (count + 1) // 2
        for index in range(count - half):
            row[index] += row[half + index]
        count = half
    return row[0]


@jit
def _orthonormal(columns: Number, dependent: Number) -> None:
    count, length = columns.shape
    scratch = np.empty(length, np.float64)
    for index in range(count):
        column = columns[index]
        for place in range(length):
            scratch[place] = column[place] * column[place]
        before = _total(scratch)
        for earlier in range(index):
            other = columns[earlier]
            for place in range(length):
                scratch[place] = other[place] * column[place]
            shared = _total(scratch)
            for place in range(length):
                column[place] -= shared * other[place]
        for place in range(length):
            scratch[place] = column[place] * column[place]
        after = _total(scratch)
        if after <= dependent * dependent * before:
            column[:] = 0.0
        else:
            norm = np.sqrt(after)
            for place in range(length):
                column[place] /= norm


@jit
def _product(left: Number, right: Number, out: Number) -> None:
    for row in range(out.shape[0]):
        into = out[row]
        first, factor = right[0], left[0, row]
        for place in range(into.shape[0]):
            into[place] = factor * first[place]
        for index in range(1, left.shape[0]):
            other, factor = right[index], left[index, row]
            for place in range(into.shape[0]):
                into[place] += factor * other[place]
