"""MPI's own operations: collectives and one-sided windows.

The collectives are non-blocking. A window is memory that MPI allocates, under *one* lock of all ranks for its whole
life. Other ranks write to it while its owner computes and never calls MPI. With user memory, or with one lock per
access, they would wait until the owner calls MPI. On one host a put is a copy into shared memory. In MPI's *unified*
model the owner's plain reads of `local` see what was put, without a call. A library without that model is refused.
`flush` ends in a memory barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, UnsupportedError, WorldError
from syncline.transports.base import Handle, NativeCollectives, Op, as_bytes, check_span, format_bytes
from syncline.transports.mpi.engine import RequestHandle, warn_long_wait

if TYPE_CHECKING:
    from syncline.transports.mpi.transport import MpiTransport

__all__ = ["MpiWindow", "NativeMpi", "reducing_type", "transfer_type"]

OPS: dict[Op, str] = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}
REDUCIBLE = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
"""The dtypes that MPI can reduce. Half precision is no MPI type; our schedules reduce it."""
TRANSFER_TYPES = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
"""By bytes per element: a type of that width, for data that is only moved."""


def reducing_type(mpi: ModuleType, dtype: torch.dtype) -> Any:
    """MPI's type for arithmetic, or None."""
    return getattr(mpi, REDUCIBLE[dtype]) if dtype in REDUCIBLE else None


def transfer_type(mpi: ModuleType, dtype: torch.dtype) -> Any:
    """MPI's type for moving elements."""
    return getattr(mpi, TRANSFER_TYPES[dtype.itemsize])


class NativeMpi(NativeCollectives):
    """Iallreduce and the other collectives of one communicator. Tensors on a GPU are copied through the CPU."""

    available = True

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._mpi = transport.engine.mpi

    def reduces(self, dtype: torch.dtype, op: Op) -> bool:
        return dtype in REDUCIBLE

    def allreduce(self, tensor: Tensor, op: Op) -> Handle:
        mpi, here = self._mpi, tensor.cpu()
        spec = _spec(here, self._reducing(tensor.dtype, op))
        return self._start(
            "allreduce", tensor, lambda comm: comm.Iallreduce(mpi.IN_PLACE, spec, getattr(mpi, OPS[op])), tensor, here
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op) -> Handle:
        mpi, kind = self._mpi, self._reducing(tensor.dtype, op)
        here, out = tensor.cpu(), output.cpu()
        self._check_sizes(here.numel(), out.numel(), "reduce_scatter")
        blocks = [_bytes(here), out.numel(), kind]  # mpi4py counts the elements of each rank's block, not of all

        def launch(comm: Any) -> Any:
            return comm.Ireduce_scatter_block(blocks, _spec(out, kind), getattr(mpi, OPS[op]))

        return self._start("reduce_scatter", tensor, launch, output, out, here)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        here = tensor.cpu()
        spec = _spec(here, transfer_type(self._mpi, tensor.dtype))
        return self._start("broadcast", tensor, lambda comm: comm.Ibcast(spec, root), tensor, here)

    def allgather(self, output: Tensor, tensor: Tensor) -> Handle:
        kind, here, out = transfer_type(self._mpi, tensor.dtype), tensor.cpu(), output.cpu()
        self._check_sizes(out.numel(), here.numel(), "allgather")
        blocks = [_bytes(out), here.numel(), kind]
        return self._start(
            "allgather", tensor, lambda comm: comm.Iallgather(_spec(here, kind), blocks), output, out, here
        )

    def alltoall(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        kind, here, out = transfer_type(self._mpi, tensor.dtype), tensor.cpu(), output.cpu()
        row = tensor[:1].numel() or output[:1].numel()
        if row * sum(input_splits) != here.numel() or row * sum(output_splits) != out.numel():
            raise IncompatibleError(
                f"alltoall: splits {list(input_splits)} of {list(tensor.shape)} into {list(output_splits)} of "
                f"{list(output.shape)} do not add up"
            )
        sending = [_bytes(here), ([row * count for count in input_splits], None), kind]
        receiving = [_bytes(out), ([row * count for count in output_splits], None), kind]
        return self._start("alltoall", tensor, lambda comm: comm.Ialltoallv(sending, receiving), output, out, here)

    def barrier(self) -> Handle:
        token = torch.zeros(1, dtype=torch.uint8)
        return self._start("barrier", token, lambda comm: comm.Ibarrier(), token, token)

    def _reducing(self, dtype: torch.dtype, op: Op) -> Any:
        kind = reducing_type(self._mpi, dtype)
        if kind is None:
            raise UnsupportedError(f"MPI cannot reduce {dtype} ({op}): use a schedule such as algorithm='ring'")
        return kind

    def _check_sizes(self, whole: int, part: int, name: str) -> None:
        if whole != part * self._transport.size:
            raise IncompatibleError(
                f"{name}: {whole} elements are not {self._transport.size} ranks' parts of {part} elements each"
            )

    def _start(
        self,
        name: str,
        tensor: Tensor,
        launch: Callable[[Any], Any],
        output: Tensor,
        *buffers: Tensor,
    ) -> Handle:
        """Start a collective. The first buffer has its result, which is copied to `output` if that is on a GPU."""
        transport, mpi = self._transport, self._mpi
        pending = (
            f"{name} of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} among {transport.size} ranks"
        )
        transport.check_count(max(buffer.numel() for buffer in buffers), name)
        transport.monitor.enter(pending)
        try:
            request = launch(transport.comm)
        except (OverflowError, mpi.Exception) as error:
            wrong = (mpi.ERR_ARG, mpi.ERR_COUNT, mpi.ERR_TYPE, mpi.ERR_OP, mpi.ERR_BUFFER)
            # These mean wrong arguments: no peer is lost.
            if isinstance(error, OverflowError) or error.Get_error_class() in wrong:
                raise IncompatibleError(f"MPI refuses the {pending}: {error}") from error
            raise transport.failure(None, pending, 0.0, error) from error
        finish = None if buffers[0] is output else lambda: output.copy_(buffers[0])
        return RequestHandle(transport, request, buffers, None, pending, finish)


def _bytes(tensor: Tensor) -> Any:
    """A tensor's memory as bytes, because NumPy does not have all dtypes."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _spec(tensor: Tensor, kind: Any) -> list[Any]:
    return [_bytes(tensor), tensor.numel(), kind]


class MpiWindow:
    """The window of one rank, and access to those of the others."""

    def __init__(self, transport: MpiTransport, numel: int, dtype: torch.dtype) -> None:
        self._transport = transport
        self._mpi = mpi = transport.engine.mpi
        self._transfer_type = transfer_type(mpi, dtype)
        self._reducing_type = reducing_type(mpi, dtype)
        self._closed = False
        self._on_one_host = all(member in transport.engine.neighbours for member in transport.members)
        self._what = f"a window of {numel} × {str(dtype).removeprefix('torch.')}"
        self._barrier(transport.timeout)
        try:
            self._win = mpi.Win.Allocate(numel * dtype.itemsize, dtype.itemsize, comm=transport.comm)
            self._win.Set_errhandler(mpi.ERRORS_RETURN)
            self._win.Lock_all(mpi.MODE_NOCHECK)
        except mpi.Exception as error:
            raise transport.failure(None, self._what, 0.0, error) from error
        if self._win.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
            raise UnsupportedError(
                "this MPI keeps two copies of a window (MPI_WIN_SEPARATE), so `local` would not show what was put; "
                "MPICH and Open MPI on x86-64 and arm64 have one"
            )
        memory = torch.frombuffer(self._win.tomemory(), dtype=dtype) if numel else torch.empty(0, dtype=dtype)
        self.local = memory.zero_()
        self._win.Sync()
        self._barrier(transport.timeout)  # no rank puts before all have zeroed their memory

    def put(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Write into the window of `to`; `values` may be changed as soon as this returns."""
        self._check(values, to, offset)
        self._start("put", self._win.Rput, values.cpu(), to, offset, self._transfer_type).wait()

    def get(self, into: Tensor, source: int, offset: int = 0) -> Handle:
        self._check(into, source, offset)
        buffer = torch.empty_like(into, device="cpu") if into.is_cuda else into
        return self._start("get", self._win.Rget, buffer, source, offset, self._transfer_type, into)

    def accumulate(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Add to the window of `to`, atomically for each element; `values` may be changed as soon as this returns."""
        self._check(values, to, offset)
        if self._reducing_type is None:
            raise UnsupportedError(
                f"MPI cannot add {values.dtype} in a window: accumulate float32, or put and get {values.dtype}"
            )
        self._start("accumulate", self._win.Raccumulate, values.cpu(), to, offset, self._reducing_type).wait()

    def flush(self, to: int | None = None) -> None:
        """Wait until all puts and accumulates of this rank have taken effect.

        MPI's flush has no timeout. On one host it is a memory barrier. Over a network it waits for the target's host,
        so it runs in a separate task, and the caller stops waiting at the timeout.
        """
        self._check_open()
        if to is not None:
            self._transport._check(to, "to", 0)
        transport = self._transport
        try:
            if self._on_one_host:
                self._flush(to)
                return
            pending = f"what was put into {self._what} of {'all ranks' if to is None else f'rank {to}'}"
            task = transport.runtime.spawn(self._flush, to, name="flush")
            soon = min(transport.engine.warn_after_s, transport.timeout)
            done = task.join(soon)
            if not done and soon < transport.timeout:
                warn_long_wait(transport.members[transport.rank], soon, pending)
                done = task.join(transport.timeout - soon)
            if not done:
                transport.give_up(for_good=True)
                raise transport.failure(to, pending, transport.timeout, None)
        except self._mpi.Exception as error:
            raise transport.failure(to, f"a flush of {self._what}", 0.0, error) from error

    def close(self) -> None:
        """Free the memory. Every rank calls it. The last content of `local` stays readable."""
        if self._closed:
            return
        self._closed = True
        transport = self._transport
        transport.forget(self)
        self._flush(None)
        self._barrier(transport.timeout)  # freeing waits for all ranks too, but has no timeout
        self.local = self.local.clone()
        try:
            self._win.Unlock_all()
            self._win.Free()
        except self._mpi.Exception as error:
            raise transport.failure(None, f"all ranks to free {self._what}", 0.0, error) from error

    def _start(
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

    def _barrier(self, timeout: float) -> None:
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
