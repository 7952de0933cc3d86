"""Which kernels run: numba's on the CPU where it is installed, plain torch ones elsewhere. Both give the same bits."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from torch import Tensor

__all__ = ["cold", "fused", "reference_only"]

_REFERENCE: ContextVar[bool] = ContextVar("syncline_reference_kernels", default=False)


def fused(tensor: Tensor) -> bool:
    """Whether numba's kernels serve this tensor.

    >>> import torch
    >>> with reference_only():
    ...     fused(torch.zeros(3))
    False
    """
    return tensor.device.type == "cpu" and not _REFERENCE.get() and _numba()


def cold() -> bool:
    """Whether numba will have to compile first: nothing compiled lies where it would be kept, beside the source."""
    kept = Path(__file__).parent / "__pycache__"
    return _numba() and not any(kept.glob("*.nbi")) and os.access(kept.parent, os.W_OK)


@contextmanager
def reference_only() -> Iterator[None]:
    """Use the plain torch kernels within this context: to compare with them, or to do without compiling."""
    token = _REFERENCE.set(True)
    try:
        yield
    finally:
        _REFERENCE.reset(token)


@lru_cache(maxsize=1)
def _numba() -> bool:
    try:
        importlib.import_module("numba")
    except (ImportError, OSError):  # missing, or its LLVM does not load here
        return False
    return True
