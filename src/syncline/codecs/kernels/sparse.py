"""Which kernels serve a sparse codec on a tensor: `sparse_fused` or `sparse_reference`, which give the same bits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from syncline.codecs.kernels.dispatch import fused

__all__ = ["SparseKernels", "kernels"]


class SparseKernels(Protocol):
    """What both modules have. Indices are sorted. A `residual` becomes residual + flat, with 0 where it was chosen.

    NaN counts as larger than every number, so that the caller finds it among the chosen values.
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


def kernels(tensor: Tensor) -> SparseKernels:
    """Those for this tensor."""
    if fused(tensor):
        from syncline.codecs.kernels import sparse_fused

        return sparse_fused
    from syncline.codecs.kernels import sparse_reference

    return sparse_reference
