"""Memory that receives land in, kept from one call to the next: fresh pages cost more than the bytes they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.runtime import Runtime

__all__ = ["Buffers"]


CPU = torch.device("cpu")


class Buffers:
    """A small store of byte buffers by length, taken and given back. Safe for several tasks."""

    def __init__(self, runtime: Runtime, limit: int = 1 << 28) -> None:
        self._lock = runtime.lock()
        self._limit = limit
        self._kept: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._kept_bytes = 0

    def take(self, nbytes: int, device: torch.device = CPU) -> Tensor:
        """A buffer of so many bytes."""
        with self._lock:
            line = self._kept.get((device, nbytes))
            if line:
                self._kept_bytes -= nbytes
                return line.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back. When all that is kept would pass the limit, it is let go and a new start made."""
        nbytes = buffer.numel()
        with self._lock:
            if self._kept_bytes + nbytes > self._limit:
                self._kept.clear()
                self._kept_bytes = 0
            if nbytes <= self._limit:
                self._kept.setdefault((buffer.device, nbytes), []).append(buffer)
                self._kept_bytes += nbytes

    def clear(self) -> None:
        """Let go of all that is kept."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0
