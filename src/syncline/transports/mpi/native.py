"""MPI's own collectives, in their non-blocking form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, UnsupportedError
from syncline.transports.base import Handle, NativeCollectives, Op
from syncline.transports.mpi.handles import RequestHandle

if TYPE_CHECKING:
    from syncline.transports.mpi.transport import MpiTransport

__all__ = ["NativeMpi", "moving_type", "reducing_type"]

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
"""What MPI can add. Half precision is no MPI type: schedules of ours reduce it."""
MOVED = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
"""A type as wide as an element, by its bytes: what is only moved needs no other."""


def reducing_type(mpi: ModuleType, dtype: torch.dtype) -> Any:
    """MPI's type for arithmetic, or None where it has none."""
    return getattr(mpi, REDUCIBLE[dtype]) if dtype in REDUCIBLE else None


def moving_type(mpi: ModuleType, dtype: torch.dtype) -> Any:
    """MPI's type for moving elements."""
    return getattr(mpi, MOVED[dtype.itemsize])


class NativeMpi(NativeCollectives):
    """Iallreduce and its kin on one communicator. Tensors on a GPU go through the CPU's memory."""

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
            "allreduce",
            tensor,
            lambda comm: comm.Iallreduce(mpi.IN_PLACE, spec, getattr(mpi, OPS[op])),
            (here,),
            lambda: _bring_back(tensor, here),
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op) -> Handle:
        mpi, kind = self._mpi, self._reducing(tensor.dtype, op)
        here, out = tensor.cpu(), output.cpu()
        self._check_sizes(here.numel(), out.numel(), "reduce_scatter")
        return self._start(
            "reduce_scatter",
            tensor,
            # mpi4py counts the elements of each rank's block, not of all.
            lambda comm: comm.Ireduce_scatter_block(
                [_bytes(here), out.numel(), kind], _spec(out, kind), getattr(mpi, OPS[op])
            ),
            (out, here),
            lambda: _bring_back(output, out),
        )

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        here = tensor.cpu()
        spec = _spec(here, moving_type(self._mpi, tensor.dtype))
        return self._start(
            "broadcast", tensor, lambda comm: comm.Ibcast(spec, root), (here,), lambda: _bring_back(tensor, here)
        )

    def allgather(self, output: Tensor, tensor: Tensor) -> Handle:
        kind, here, out = moving_type(self._mpi, tensor.dtype), tensor.cpu(), output.cpu()
        self._check_sizes(out.numel(), here.numel(), "allgather")
        return self._start(
            "allgather",
            tensor,
            lambda comm: comm.Iallgather(_spec(here, kind), [_bytes(out), here.numel(), kind]),
            (out, here),
            lambda: _bring_back(output, out),
        )

    def alltoall(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        kind, here, out = moving_type(self._mpi, tensor.dtype), tensor.cpu(), output.cpu()
        row = tensor[:1].numel() or output[:1].numel()
        if row * sum(input_splits) != here.numel() or row * sum(output_splits) != out.numel():
            raise IncompatibleError(
                f"alltoall: splits {list(input_splits)} of {list(tensor.shape)} into {list(output_splits)} of "
                f"{list(output.shape)} do not add up"
            )
        sending = [_bytes(here), ([row * count for count in input_splits], None), kind]
        receiving = [_bytes(out), ([row * count for count in output_splits], None), kind]
        return self._start(
            "alltoall",
            tensor,
            lambda comm: comm.Ialltoallv(sending, receiving),
            (out, here),
            lambda: _bring_back(output, out),
        )

    def barrier(self) -> Handle:
        token = torch.zeros(1, dtype=torch.uint8)
        return self._start("barrier", token, lambda comm: comm.Ibarrier(), (token,), None)

    def _reducing(self, dtype: torch.dtype, op: Op) -> Any:
        kind = reducing_type(self._mpi, dtype)
        if kind is None:
            raise UnsupportedError(f"MPI cannot reduce {dtype} ({op}): name a schedule, whose arithmetic is ours")
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
        buffers: tuple[Tensor, ...],
        finish: Callable[[], object] | None,
    ) -> Handle:
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
            if (
                isinstance(error, OverflowError) or error.Get_error_class() in wrong
            ):  # what was asked for, not who is there
                raise IncompatibleError(f"MPI refuses the {pending}: {error}") from error
            raise transport.failure(None, pending, 0.0, error) from error
        return RequestHandle(transport, request, buffers, None, pending, finish)


def _bytes(tensor: Tensor) -> Any:
    """A tensor's memory, whatever its dtype: NumPy has not all of them."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _spec(tensor: Tensor, kind: Any) -> list[Any]:
    return [_bytes(tensor), tensor.numel(), kind]


def _bring_back(tensor: Tensor, here: Tensor) -> None:
    if here is not tensor:
        tensor.copy_(here)
