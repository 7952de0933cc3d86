"""One-sided memory: a window that MPI allocates, open to everyone from its making to its close.

Memory that MPI allocates itself, under *one* lock of all ranks for the window's whole life, is written while its
owner computes and never calls MPI (memory of ours, or a lock for each access, waits until the owner does). On one host
a put is a copy into shared memory.

In MPI's *unified* model the owner's plain reads of `local` see what was put, with no call; a library without it is
refused. `flush` ends in a memory barrier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.errors import UnsupportedError, WorldError
from syncline.transports.base import Handle, as_bytes, check_span, format_bytes
from syncline.transports.mpi.engine import warn_of_a_wait
from syncline.transports.mpi.handles import RequestHandle
from syncline.transports.mpi.native import moving_type, reducing_type

if TYPE_CHECKING:
    from syncline.transports.mpi.transport import MpiTransport

__all__ = ["MpiWindow"]


class MpiWindow:
    """The window of one rank, and its way into the others'."""

    def __init__(self, transport: MpiTransport, numel: int, dtype: torch.dtype) -> None:
        self._transport = transport
        self._mpi = mpi = transport.engine.mpi
        self._moving = moving_type(mpi, dtype)
        self._adding = reducing_type(mpi, dtype)
        self._closed = False
        self._near = all(member in transport.engine.neighbours for member in transport.members)
        self._what = f"a window of {numel} × {str(dtype).removeprefix('torch.')}"
        self._all_here(transport.timeout)
        try:
            self._win = mpi.Win.Allocate(numel * dtype.itemsize, dtype.itemsize, comm=transport.comm)
            self._win.Set_errhandler(mpi.ERRORS_RETURN)
            self._win.Lock_all(mpi.MODE_NOCHECK)
        except mpi.Exception as error:
            raise transport.failure(None, self._what, 0.0, error) from error
        if self._win.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
            raise UnsupportedError(
                "this MPI keeps two copies of a window (MPI_WIN_SEPARATE): what is put would not show in `local`; "
                "MPICH and Open MPI on x86-64 and arm64 have one"
            )
        memory = torch.frombuffer(self._win.tomemory(), dtype=dtype) if numel else torch.empty(0, dtype=dtype)
        self.local = memory.zero_()
        self._win.Sync()
        self._all_here(transport.timeout)  # nobody puts before all have zeroed

    def put(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Write into the window of `to`; `values` may be changed as soon as this returns."""
        self._check(values, to, offset)
        self._do("put", self._win.Rput, values.cpu(), to, offset, self._moving).wait()

    def get(self, into: Tensor, source: int, offset: int = 0) -> Handle:
        self._check(into, source, offset)
        landing = torch.empty_like(into, device="cpu") if into.is_cuda else into
        return self._do("get", self._win.Rget, landing, source, offset, self._moving, into)

    def accumulate(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Add to the window of `to`, atomically for each element; `values` may be changed as soon as this returns."""
        self._check(values, to, offset)
        if self._adding is None:
            raise UnsupportedError(
                f"MPI cannot add {values.dtype} in a window: accumulate float32, or put and get {values.dtype}"
            )
        self._do("accumulate", self._win.Raccumulate, values.cpu(), to, offset, self._adding).wait()

    def flush(self, to: int | None = None) -> None:
        """Return when what this rank has put and accumulated is in place.

        MPI's flush knows no time limit. On one host it is a barrier in memory; over a network, where it waits for the
        target's host, it runs in a task that the timeout can leave.
        """
        self._check_open()
        if to is not None:
            self._transport._check(to, "to", 0)
        transport = self._transport
        try:
            if self._near:
                self._flush(to)
                return
            pending = f"what was put into {self._what} of {'all ranks' if to is None else f'rank {to}'}"
            task = transport.runtime.spawn(self._flush, to, name="flush")
            soon = min(transport.engine.warn_after, transport.timeout)
            done = task.join(soon)
            if not done and soon < transport.timeout:
                warn_of_a_wait(transport.members[transport.rank], soon, pending)
                done = task.join(transport.timeout - soon)
            if not done:
                transport.give_up(for_good=True)
                raise transport.failure(to, pending, transport.timeout, None)
        except self._mpi.Exception as error:
            raise transport.failure(to, f"a flush of {self._what}", 0.0, error) from error

    def close(self) -> None:
        """Free the memory; every rank closes. What `local` held last stays readable."""
        if self._closed:
            return
        self._closed = True
        transport = self._transport
        transport.forget(self)
        self._flush(None)
        self._all_here(transport.timeout)  # freeing waits for everyone too, but knows no time limit
        self.local = self.local.clone()
        try:
            self._win.Unlock_all()
            self._win.Free()
        except self._mpi.Exception as error:
            raise transport.failure(None, f"all ranks to free {self._what}", 0.0, error) from error

    def _do(
        self, name: str, operation: Any, here: Tensor, peer: int, offset: int, kind: Any, into: Tensor | None = None
    ) -> Handle:
        transport = self._transport
        pending = f"{name} of {format_bytes(here.numel() * here.element_size())} with rank {transport.members[peer]}"
        count = here.numel()
        transport.check_count(count, name)
        try:
            request = operation([as_bytes(here).numpy(), count, kind], peer, [offset, count, kind])
        except self._mpi.Exception as error:
            raise transport.failure(peer, pending, 0.0, error) from error
        finish = None if into is None or into is here else lambda: into.copy_(here)
        return RequestHandle(transport, request, (here,), peer, pending, finish)

    def _flush(self, to: int | None) -> None:
        if to is None:
            self._win.Flush_all()
        else:
            self._win.Flush(to)
        self._win.Sync()

    def _all_here(self, timeout: float) -> None:
        transport = self._transport
        request = transport.comm.Ibarrier()
        RequestHandle(transport, request, (), None, f"all ranks at {self._what}").wait(timeout)

    def _check(self, values: Tensor, peer: int, offset: int) -> None:
        self._check_open()
        self._transport._check(peer, "peer", 0)
        check_span(self.local, values, offset)

    def _check_open(self) -> None:
        if self._closed:
            raise WorldError(f"{self._what} is closed; make another with transport.memory.window()")
