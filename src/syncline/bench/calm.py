"""Quiet for measuring."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["calm"]


@contextmanager
def calm() -> Iterator[None]:
    """One thread of torch's, no garbage collector in between."""
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
