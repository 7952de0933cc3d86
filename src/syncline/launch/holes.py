"""Giving disk space back: the part of a file that has been read becomes a hole, while somebody still writes its end."""

from __future__ import annotations

import ctypes

__all__ = ["punch"]

KEEP_SIZE, PUNCH_HOLE = 1, 2


def punch(fd: int, start: int, end: int) -> bool:
    """Free the space of bytes `start` to `end`; the file keeps its length. False where the file system cannot."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, KEEP_SIZE | PUNCH_HOLE, start, end - start) == 0)
