"""The engine's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as _c10d  # what torch.distributed re-exports untyped
import torch.distributed as dist
from torch import Tensor

from syncline.errors import IncompatibleError
from syncline.transports.base import Handle, NativeCollectives, Op
from syncline.transports.torch_dist.work import WorkHandle

if TYPE_CHECKING:
    from syncline.transports.torch_dist.transport import TorchTransport

__all__ = ["NativeTorch"]

OPS: dict[Op, Any] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
REDUCIBLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)


MOST_WORDS = 1000


class NativeTorch(NativeCollectives):
    """all_reduce and the other collectives of one process group."""

    available = True

    def __init__(self, transport: TorchTransport) -> None:
        self._transport = transport
        self._words: dict[tuple[str, torch.dtype, torch.Size], str] = {}

    def reduces(self, dtype: torch.dtype, op: Op) -> bool:
        return dtype in REDUCIBLE

    def allreduce(self, tensor: Tensor, op: Op) -> Handle:
        options = _c10d.AllreduceOptions()
        options.reduceOp = OPS[op]
        return self._start("allreduce", tensor, lambda group: group.allreduce([tensor], options))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op) -> Handle:
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = OPS[op]
        return self._start("reduce_scatter", tensor, lambda group: group._reduce_scatter_base(output, tensor, options))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        options = _c10d.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", tensor, lambda group: group.broadcast([tensor], options))

    def allgather(self, output: Tensor, tensor: Tensor) -> Handle:
        options, flat = _c10d.AllgatherOptions(), output.view(-1)
        return self._start("allgather", tensor, lambda group: group._allgather_base(flat, tensor.view(-1), options))

    def alltoall(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        options, into, out_of = _c10d.AllToAllOptions(), list(output_splits), list(input_splits)
        return self._start("alltoall", tensor, lambda group: group.alltoall_base(output, tensor, into, out_of, options))

    def barrier(self) -> Handle:
        return self.allreduce(torch.zeros(1, dtype=torch.uint8), "sum")

    def _start(self, name: str, tensor: Tensor, launch: Callable[[Any], Any]) -> Handle:
        transport = self._transport
        key = (name, tensor.dtype, tensor.shape)
        pending = self._words.get(key) or self._describe(key)
        transport.monitor.enter(pending)
        try:
            work = launch(transport.groups.of(tensor))
        except RuntimeError as error:
            if "invalid" in str(error).lower():  # what was asked for, not who is there
                raise IncompatibleError(f"the engine refuses the {pending}: {error}{_hint(str(error))}") from error
            raise transport.failure(None, pending, 0.0, error) from error
        return WorkHandle(transport, work, tensor, None, pending)

    def _describe(self, key: tuple[str, torch.dtype, torch.Size]) -> str:
        """What is waited for, in words; the same few again and again in training."""
        name, dtype, shape = key
        sizes = "" if name == "alltoall" else list(shape)  # its sizes may differ between ranks
        words = f"{name} of {str(dtype).removeprefix('torch.')}{sizes} among {self._transport.size} ranks"
        if len(self._words) < MOST_WORDS:
            self._words[key] = words
        return words


def _hint(error: str) -> str:
    """What to do about an error of NCCL whose own message is unclear.

    >>> _hint("NCCL error: invalid usage")[:44]
    '; NCCL needs a GPU of its own for each rank:'
    >>> _hint("invalid tensor")
    ''
    """
    if "NCCL" not in error or "invalid usage" not in error:
        return ""
    return (
        "; NCCL needs a GPU of its own for each rank: start no more workers on a host than it has GPUs, or take a "
        "schedule such as collective='ring', which sends through the CPU, or hide the GPUs with CUDA_VISIBLE_DEVICES="
    )
