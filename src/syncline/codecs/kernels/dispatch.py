"""The kernels of the codecs: numba's (fused) on the CPU where it is installed, plain torch (reference) elsewhere.

Both give the same bits.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from syncline.codecs.kernels import dense_reference as reference

__all__ = [
    "DenseKernel",
    "SparseKernels",
    "cast_stochastic",
    "fused",
    "has_numba",
    "needs_compiling",
    "reference_only",
    "sparse_kernels",
]

_REFERENCE: ContextVar[bool] = ContextVar("syncline_reference_kernels", default=False)


def fused(tensor: Tensor) -> bool:
    """True if numba's kernels are used for this tensor.

    >>> import torch
    >>> with reference_only():
    ...     fused(torch.zeros(3))
    False
    """
    return tensor.device.type == "cpu" and not _REFERENCE.get() and has_numba()


def needs_compiling() -> bool:
    """True if numba must compile first: there is no compiled code beside the source."""
    cache = Path(__file__).parent / "__pycache__"
    return has_numba() and not any(cache.glob("*.nbi")) and os.access(cache.parent, os.W_OK)


@contextmanager
def reference_only() -> Iterator[None]:
    """Use the plain torch kernels in this context: to compare with them, or to avoid compiling."""
    token = _REFERENCE.set(True)
    try:
        yield
    finally:
        _REFERENCE.reset(token)


@lru_cache(maxsize=1)
def has_numba() -> bool:
    try:
        importlib.import_module("numba")
    except (ImportError, OSError):  # missing, or its LLVM does not load here
        return False
    return True


class SparseKernels(Protocol):
    """What `sparse_fused` and `sparse_reference` have. Indices are sorted.

    A `residual` becomes residual + flat, with 0 at the selected elements. NaN counts as larger than every number, so
    that the caller finds it among the selected values.
    """

    def largest(self, flat: Tensor, residual: Tensor | None, k: int) -> tuple[Tensor, Tensor]: ...
    def largest_of_buckets(
        self, flat: Tensor, residual: Tensor | None, k: int, bucket: int
    ) -> tuple[Tensor, Tensor]: ...
    def at_least(self, flat: Tensor, residual: Tensor | None, threshold: float) -> tuple[Tensor, Tensor]: ...
    def pack_indices(self, indices: Tensor, low: int, first: int, out: Tensor) -> None: ...
    def unpack_indices(self, packed: Tensor, numel: int, count: int, low: int, first: int, out: Tensor) -> None: ...
    def scatter(self, out: Tensor, indices: Tensor, values: Tensor, accumulate: bool) -> None: ...
    def merge(self, indices: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]: ...


def sparse_kernels(tensor: Tensor) -> SparseKernels:
    """The kernels of sparse codecs for this tensor."""
    if fused(tensor):
        from syncline.codecs.kernels import sparse_fused

        return sparse_fused
    from syncline.codecs.kernels import sparse_reference

    return sparse_reference


FAULTS = {
    reference.FINE: "",
    reference.BAD_SCALE: "a scale that is NaN, Inf or of the wrong sign",
    reference.BAD_CODE: "a code without a value",
}


class DenseKernel(NamedTuple):
    """The kernels `encode_NAME` and `decode_NAME` of a dense codec, with the arguments that follow from its options.

    A body begins with scales, which `decode` checks.
    """

    name: str
    block: int
    """Number of elements packed together."""
    layout: tuple[Any, ...] = ()
    """Arguments of both kernels, after the block."""
    rounding: tuple[Any, ...] = ()
    """Further arguments of `encode`."""
    planes: int = 1
    """Number of bytes for each `codes_per_byte` codes."""
    codes_per_byte: int = 8
    scale_bytes: int = 4
    """Size of the scales of a block."""
    shared_scale: bool = False
    """All blocks share one scale."""

    def encode(self, flat: Tensor, residual: Tensor | None, body: Tensor, *random: int) -> bool:
        """Write a body. Returns False for NaN or Inf. A residual is added first, and then holds the rest.

        `random`: start and key of the random bits, if the codec draws any.
        """
        tensors = (flat, flat[:0] if residual is None else residual, body)
        return bool(
            _run("encode_" + self.name, tensors, flat.numel(), self.block, *self.layout, *self.rounding, *random)
        )

    def decode(self, body: Tensor, out: Tensor, accumulate: bool) -> str:
        """Write or add. Returns an empty text, or what is wrong; then nothing is written."""
        return FAULTS[_run("decode_" + self.name, (body, out), out.numel(), self.block, *self.layout, accumulate)]


def cast_stochastic(values: Tensor, halves: Tensor, *, limit: int, start: int, key: int) -> None:
    """Round to half precision stochastically, without bias. No magnitude exceeds the bits `limit`."""
    brain, bits = halves.dtype == torch.bfloat16, halves.view(torch.int16)
    if fused(values):
        from syncline.codecs.kernels import dense_fused

        dense_fused.cast_stochastic(values.detach().numpy(), bits.numpy(), brain, limit, start, key)
    else:
        reference.cast_stochastic(values, bits, brain, limit, start, key)


def _run(name: str, tensors: tuple[Tensor, ...], numel: int, block: int, *arguments: Any) -> Any:
    block = max(1, min(block, numel))  # the kernels allocate a block
    if fused(tensors[0]):
        from syncline.codecs.kernels import dense_fused

        return getattr(dense_fused, name)(*map(Tensor.numpy, map(Tensor.detach, tensors)), block, *arguments)
    return getattr(reference, name)(*tensors, block, *arguments)
