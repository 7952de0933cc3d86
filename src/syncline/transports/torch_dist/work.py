"""A handle over an operation of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncline.errors import WorldError

if TYPE_CHECKING:
    from syncline.transports.torch_dist.transport import TorchTransport

__all__ = ["FOREVER", "WorkHandle"]

FOREVER = timedelta(days=3650)


class WorkHandle:
    """An engine operation under way; keeps its buffer alive."""

    def __init__(
        self,
        transport: TorchTransport,
        work: Any,
        buffer: Tensor,
        peer: int | None,
        pending: str,
        copy_to: Tensor | None = None,
        outlives: bool = False,
        lossy: bool = False,
    ) -> None:
        self.work = work
        self.source = -1 if peer is None else peer
        self.nbytes = buffer.numel() * buffer.element_size()
        self._transport = transport
        self._buffer = buffer
        self._peer = peer
        self._pending = pending
        self._copy_to = copy_to
        self._done = False
        self._outlives = outlives
        self._lossy = lossy

    def __del__(self) -> None:
        if self._outlives and not self._done:
            self._outlives = False
            self._transport.dropped.append(self)  # lives on there: the engine cancels what nobody holds

    def notify(self, fn: Callable[[], None]) -> None:
        """Have `fn` called by the engine's thread when it is done, well or badly."""
        self.work.get_future().add_done_callback(lambda _: fn())

    def wait(self, timeout: float | None = None) -> None:
        if self._done:
            return
        transport = self._transport
        timeout = transport.timeout if timeout is None else timeout
        start = transport.runtime.now()
        over = transport.waiting(self._pending, self._peer, idle=timeout == math.inf)
        problem = None
        try:
            self.work.wait(FOREVER if timeout == math.inf else timedelta(seconds=timeout))
        except RuntimeError as error:
            problem = error
        finally:
            over()
        if problem is not None and self._lossy:
            self._done = True
            return
        if problem is not None and transport.has_ended:
            raise WorldError(f"this rank has closed the channel while it waited for {self._pending}") from problem
        if problem is not None:
            seconds = transport.runtime.now() - start
            idle = timeout == math.inf
            raise transport.failure(self._peer, self._pending, seconds, problem, idle) from problem
        if self._copy_to is not None:
            self._copy_to.copy_(self._buffer)
        self._done = True
