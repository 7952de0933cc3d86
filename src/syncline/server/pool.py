"""Buffers that are used again: fresh memory costs a page fault for every 4 KB."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from syncline.runtime import Lock
from syncline.server.protocol import INLINE

__all__ = ["Pool"]

KEPT = 64 << 20
"""Bytes that are kept for later."""


class Pool:
    """Rows of bytes. With a lock, several tasks may use it.

    Memory is kept in powers of two: requests of ever other lengths would fill it with rows that nobody asks for again.

    >>> pool = Pool()
    >>> row = pool.take(900_000)
    >>> pool.give(row)
    >>> pool.take(1_000_000).data_ptr() == row.data_ptr()
    True
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = nullcontext() if lock is None else lock
        self._free: dict[int, list[Tensor]] = {}
        self._kept = 0

    def take(self, nbytes: int) -> Tensor:
        """A row whose bytes are anything."""
        if nbytes <= INLINE:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = _class_of(nbytes)
        with self._lock:
            rows = self._free.get(size)
            whole = rows.pop() if rows else None
            if whole is not None:
                self._kept -= size
        return (torch.empty(size, dtype=torch.uint8) if whole is None else whole)[:nbytes]

    def give(self, row: Tensor | None) -> None:
        """Take back a row that nobody uses any more; one that is no row of a pool is let go."""
        if row is None or row.numel() <= INLINE:
            return
        memory, size = row.untyped_storage(), _class_of(row.numel())
        if memory.nbytes() != size or row.storage_offset() or row.dtype != torch.uint8:
            return
        with self._lock:
            if self._kept + size <= KEPT:
                self._kept += size
                self._free.setdefault(size, []).append(torch.empty(0, dtype=torch.uint8).set_(memory))


def _class_of(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
