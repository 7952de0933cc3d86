"""Handles over MPI's requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncline.transports.memory import describe_recv
from syncline.transports.mpi.inbox import Expected

if TYPE_CHECKING:
    from syncline.transports.mpi.transport import MpiTransport

__all__ = ["ExpectedHandle", "RequestHandle"]


class RequestHandle:
    """A request under way; keeps its buffers alive, past its own end where MPI still needs them."""

    def __init__(
        self,
        transport: MpiTransport,
        request: Any,
        buffers: tuple[Tensor, ...],
        peer: int | None,
        pending: str,
        finish: Callable[[], object] | None = None,
        outgoing: bool = False,
    ) -> None:
        self.source = -1 if peer is None else peer
        self.nbytes = buffers[0].numel() * buffers[0].element_size() if buffers else 0
        self.outgoing = outgoing
        self._transport = transport
        self._request = request
        self._buffers = buffers
        self._peer = peer
        self._pending = pending
        self._finish = finish
        self._done = False
        self._kept = False

    def __del__(self) -> None:
        if not self._done and not self._kept:
            self._kept = True
            self._transport.engine.keep(self)  # lives on there: the bytes may still be read or written

    def over(self) -> bool:
        """Whether MPI has done with the buffers."""
        try:
            self._done = self._done or bool(self._request.Test())
        except self._transport.engine.mpi.Exception:
            self._done = True  # nobody waits to be told
        return self._done

    def wait(self, timeout: float | None = None) -> None:
        if self._done:
            return
        transport, engine = self._transport, self._transport.engine
        patience, start = transport.timeout if timeout is None else timeout, transport.runtime.now()
        cause: Exception | None = None
        try:
            finished = engine.wait(self._test, patience, lambda: self._pending, transport.has_ended)
        except engine.mpi.Exception as error:
            finished, cause, self._done = False, error, True
        if not finished:
            transport.give_up(for_good=timeout is None or cause is not None)
            raise transport.failure(self._peer, self._pending, transport.runtime.now() - start, cause) from cause
        self._done = True
        if self._finish is not None:
            self._finish()

    def _test(self) -> bool:
        return bool(self._request.Test())


class ExpectedHandle:
    """A receive that the inbox will match."""

    def __init__(self, transport: MpiTransport, data: Tensor, expected: Expected) -> None:
        self._transport = transport
        self._data = data
        self._expected = expected
        self._done = False
        self.source = -1
        self.nbytes = 0

    def __del__(self) -> None:
        if not self._done:
            self._transport.engine.keep(self._expected)

    def wait(self, timeout: float | None = None) -> None:
        transport, expected, engine = self._transport, self._expected, self._transport.engine
        if not self._done:
            patience, start = transport.timeout if timeout is None else timeout, transport.runtime.now()
            cause: Exception | None = None
            try:
                finished = engine.wait(expected.over, patience, self._pending, transport.has_ended)
            except engine.mpi.Exception as error:
                finished, cause = False, error
            if not finished:
                self._done = transport.inbox.withdraw(expected)
            if not finished and (self._done or cause is not None or not expected.over()):
                transport.give_up(for_good=timeout is None or cause is not None)
                seconds = transport.runtime.now() - start
                raise transport.failure(expected.wanted, self._pending(), seconds, cause) from cause
            self._done = True
            if expected.error is None and expected.data is not self._data:
                self._data[: expected.nbytes].copy_(expected.data[: expected.nbytes])
        if expected.error is not None:
            raise expected.error
        self.source, self.nbytes = expected.source, expected.nbytes

    def _pending(self) -> str:
        expected = self._expected
        return describe_recv(self._transport, expected.wanted, expected.tag, expected.data.numel())
