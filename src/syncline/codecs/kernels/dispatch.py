"""The kernels of the codecs: numba's (fused) on the CPU where it is installed, plain torch (reference) elsewhere.

Both give the same bits. The body of a dense codec begins with its scales, which the kernels check.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.codecs.kernels import dense_reference as reference

__all__ = [
    "SparseKernels",
    "cast_stochastic",
    "decode_onebit",
    "decode_quantize",
    "decode_ternary",
    "encode_onebit",
    "encode_quantize",
    "encode_ternary",
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
    reference.BAD_CODE: "a code that stands for nothing",
}


def encode_quantize(
    flat: Tensor,
    residual: Tensor | None,
    body: Tensor,
    *,
    bits: int,
    bucket: int,
    euclid: bool,
    stochastic: bool,
    start: int,
    key: int,
) -> bool:
    """Write scales and packed codes. A residual is added first, then holds the rest. Returns False for NaN or Inf."""
    tensors = (flat, _residual(flat, residual), body)
    return bool(_run("encode_quantize", tensors, bits, _block(bucket, flat), euclid, stochastic, start, key))


def decode_quantize(body: Tensor, out: Tensor, *, bits: int, bucket: int, accumulate: bool) -> str:
    """Write or add. Returns an empty text, or what is wrong; then nothing is written."""
    return FAULTS[_run("decode_quantize", (body, out), bits, _block(bucket, out), accumulate)]


def encode_onebit(flat: Tensor, residual: Tensor | None, body: Tensor, *, bucket: int) -> bool:
    """Write means and signs. A residual is added first, and then holds the rest. Returns False for NaN or Inf."""
    return bool(_run("encode_onebit", (flat, _residual(flat, residual), body), _block(bucket, flat)))


def decode_onebit(body: Tensor, out: Tensor, *, bucket: int, accumulate: bool) -> str:
    """Write or add. Returns an empty text, or what is wrong; then nothing is written."""
    return FAULTS[_run("decode_onebit", (body, out), _block(bucket, out), accumulate)]


def encode_ternary(
    flat: Tensor,
    residual: Tensor | None,
    body: Tensor,
    *,
    block: int,
    shared: bool,
    clip: float,
    start: int,
    key: int,
) -> bool:
    """Write one scale if `shared`, or one for each block, and digits. `clip` 0: no clipping.

    A residual is added first, and then holds the rest. Returns False for NaN or Inf.
    """
    tensors = (flat, _residual(flat, residual), body)
    return bool(_run("encode_ternary", tensors, _block(block, flat), shared, float(clip), start, key))


def decode_ternary(body: Tensor, out: Tensor, *, block: int, shared: bool, accumulate: bool) -> str:
    """Write or add. Returns an empty text, or what is wrong; then nothing is written."""
    return FAULTS[_run("decode_ternary", (body, out), _block(block, out), shared, accumulate)]


def cast_stochastic(values: Tensor, halves: Tensor, *, limit: int, start: int, key: int) -> None:
    """Round to half precision stochastically, without bias. No magnitude exceeds the bits `limit`."""
    brain, bits = halves.dtype == torch.bfloat16, halves.view(torch.int16)
    if fused(values):
        from syncline.codecs.kernels import dense_fused

        dense_fused.cast_stochastic(values.detach().numpy(), bits.numpy(), brain, limit, start, key)
    else:
        reference.cast_stochastic(values, bits, brain, limit, start, key)


def _residual(flat: Tensor, residual: Tensor | None) -> Tensor:
    return flat[:0] if residual is None else residual


def _block(block: int, flat: Tensor) -> int:
    """A block that is not longer than the tensor: the kernels allocate one."""
    return max(1, min(block, flat.numel()))


def _run(name: str, tensors: tuple[Tensor, ...], *arguments: Any) -> Any:
    if fused(tensors[0]):
        from syncline.codecs.kernels import dense_fused

        return getattr(dense_fused, name)(*[each.detach().numpy() for each in tensors], *arguments)
    return getattr(reference, name)(*tensors, *arguments)
