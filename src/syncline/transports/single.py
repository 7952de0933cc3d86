"""The null transport: a world of one, in which a rank can still send to itself."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.errors import PeerLostError
from syncline.runtime import RealRuntime, Runtime
from syncline.transports.base import DEFAULT_TIMEOUT_S, Handle, Monitor, RemoteMemory, Transport, Window, check_span
from syncline.transports.messages import CompletedHandle, Mailbox, MailboxHandle, channel_closed

__all__ = ["SingleTransport"]


class SingleTransport(Transport):
    """One rank that talks to itself.

    >>> transport = SingleTransport()
    >>> _ = transport.send(torch.tensor([1.0, 2.0]), to=0)
    >>> received = torch.zeros(2)
    >>> transport.recv(received).wait()
    >>> received
    tensor([1., 2.])
    """

    name = "single"

    def __init__(self, runtime: Runtime | None = None, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(0, 1, runtime or RealRuntime(), timeout)
        self._mailbox = Mailbox(self.runtime)
        self.monitor = _NoComparison()

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        self._mailbox.deliver(data.clone(), 0, tag)
        return CompletedHandle(data.numel())

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        return MailboxHandle(self, self._mailbox, self._mailbox.post(data, source, tag, exact))

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        return SingleTransport(self.runtime, self.timeout)

    @property
    def memory(self) -> RemoteMemory:
        return _LocalMemory(self)

    def abort(self) -> None:
        self._mailbox.fail(channel_closed)

    def close(self) -> None:
        self._mailbox.close(channel_closed)

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        return PeerLostError(
            f"waited {seconds:.3g} s for {pending}: this world has one rank, and it has not sent that",
            peer=peer,
            pending=pending,
            seconds=seconds,
        )


class _NoComparison(Monitor):
    """Nothing to compare with: every call counts as compared."""

    def compare_call(self, number: int, call: str) -> bool:
        return True


class _LocalMemory(RemoteMemory):
    def window(self, numel: int, dtype: torch.dtype) -> Window:
        return LocalWindow(numel, dtype)


class LocalWindow:
    """The window of a world of one."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.local = torch.zeros(numel, dtype=dtype)

    def put(self, values: Tensor, to: int, offset: int = 0) -> None:
        check_span(self.local, values, offset)
        self.local[offset : offset + values.numel()].copy_(values.reshape(-1))

    def get(self, into: Tensor, source: int, offset: int = 0) -> Handle:
        check_span(self.local, into, offset)
        into.view(-1).copy_(self.local[offset : offset + into.numel()])
        return CompletedHandle(into.numel() * into.element_size(), 0)

    def accumulate(self, values: Tensor, to: int, offset: int = 0) -> None:
        check_span(self.local, values, offset)
        self.local[offset : offset + values.numel()].add_(values.reshape(-1))

    def flush(self, to: int | None = None) -> None:
        return

    def close(self) -> None:
        return
