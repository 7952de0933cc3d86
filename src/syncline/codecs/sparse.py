"""The base of codecs that select elements: a body of indices and values.

    count u32 │ indices, see kernels/indices.py │ the values, encoded by another codec

Both ends derive the layout from the number of elements and the count, so a fixed count gives a fixed length.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice, all_finite, get_u32, put_u32
from syncline.codecs.kernels.dispatch import fused, sparse_kernels
from syncline.codecs.kernels.indices import layout
from syncline.codecs.quantize import Quantize
from syncline.codecs.raw import Raw
from syncline.errors import DivergedError, ProtocolError

__all__ = ["RAW", "SparseCodec", "index_dtype", "read_indices", "write_indices"]

RAW = Raw()


class SparseCodec(PayloadCodec):
    """A codec that selects elements. The others are decoded as 0 and stay in the residual."""

    @abstractmethod
    def max_selected(self, numel: int, step: int = 0) -> int:
        """Maximum number of elements that are selected of `numel` in a step."""

    @abstractmethod
    def select(self, part: TensorSlice, rng: RngKey) -> tuple[Tensor, Tensor]:
        """The selected indices, sorted (int32, or int64 from 2^31 elements on), and their values of residual + flat.

        Afterwards the residual holds that sum, with 0 at the selected elements.
        """

    def is_valid_count(self, numel: int, count: int) -> bool:
        """True if a body of `numel` elements may hold `count` selected ones."""
        return count <= self.max_selected(numel)

    def body_bytes(self, numel: int, step: int = 0, values: PayloadCodec = RAW) -> int:
        count = self.max_selected(numel, step)
        return self.head_bytes(numel, count) + values.body_bytes(count)

    def head_bytes(self, numel: int, count: int) -> int:
        """Size in bytes of what precedes the values."""
        return 4 + layout(numel, count).nbytes

    def write_head(self, head: Tensor, numel: int, indices: Tensor, rng: RngKey) -> None:
        """Write what precedes the values."""
        put_u32(head, indices.numel())
        write_indices(head[4:], numel, indices)

    def read_head(self, body: Tensor, numel: int) -> tuple[Tensor, int]:
        """The indices, and the number of bytes before the values."""
        count = get_u32(body)
        if not self.is_valid_count(numel, count):
            raise ProtocolError(f"a payload of {self!r} says that it holds {count} of {numel} elements: it is corrupt")
        head = self.head_bytes(numel, count)
        if body.numel() < head:
            raise ProtocolError(f"a body of {body.numel()} B is too short for {count} indices: it is truncated")
        return read_indices(body[4:head], numel, count), head

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey, values: PayloadCodec = RAW) -> int:
        indices, selected = self.select(part, rng)
        if not all_finite(selected):
            self._restore_residual(part, indices, selected)
            raise DivergedError(f"{self!r}: {part.name or 'a tensor'} and its residual add up to Inf")
        head = self.head_bytes(part.numel, indices.numel())
        self.write_head(body[:head], part.numel, indices, rng)
        lost = None if part.residual is None or values.traits.exact else torch.zeros_like(selected)
        size = values.body_bytes(selected.numel())
        used = values.write(TensorSlice(selected, name=part.name, residual=lost), body[head : head + size], rng)
        if part.residual is not None and lost is not None:
            sparse_kernels(lost).scatter(part.residual, indices, lost, accumulate=False)
        return head + used

    def _restore_residual(self, part: TensorSlice, indices: Tensor, selected: Tensor) -> None:
        """Nothing is sent: restore the residual, as far as it is known."""
        if part.residual is not None:
            sparse_kernels(selected).scatter(part.residual, indices, selected, accumulate=False)
            part.residual.sub_(part.flat).nan_to_num_(0.0, 0.0, 0.0)

    def read(self, body: Tensor, out: Tensor, accumulate: bool, values: PayloadCodec = RAW, scale: float = 1.0) -> None:
        indices, found = self.read_stream(body, out.numel(), values)
        if scale != 1.0:
            found *= scale
        if not accumulate:
            out.zero_()
        sparse_kernels(out).scatter(out, indices, found, accumulate)

    def read_all(self, rows: Tensor, out: Tensor, scale: float, values: PayloadCodec = RAW) -> None:
        for rank, row in enumerate(rows):
            try:
                self.read(row, out, rank > 0, values, scale)
            except ProtocolError as error:
                raise ProtocolError(f"from rank {rank}: {error}", peer=rank) from None

    def read_all_fused(self, rows: Tensor, out: Tensor, scale: float, values: Quantize) -> bool:
        """Read all rows in one call. Returns False if there is no kernel for it, or if a row is invalid."""
        plain_head = type(self).read_head is SparseCodec.read_head
        if not (plain_head and self.traits.fixed_length and fused(out) and len(rows)):
            return False
        from syncline.codecs.kernels.sparse_fused import read_rows

        count = get_u32(rows[0])
        plan = layout(out.numel(), count) if self.is_valid_count(out.numel(), count) else None
        due = 0 if plan is None else 4 + plan.nbytes + values.body_bytes(count)
        if plan is None or rows.shape[1] != due or out.numel() >= 2**31:
            return False  # `read_all` raises the error
        return read_rows(rows, out, count, plan, values.bits, values.bucket, scale) == 0

    def read_stream(self, body: Tensor, numel: int, values: PayloadCodec = RAW) -> tuple[Tensor, Tensor]:
        """The indices and values of a body, without a dense tensor."""
        indices, head = self.read_head(body, numel)
        count = indices.numel()
        if values.traits.fixed_length and body.numel() - head != values.body_bytes(count):
            raise ProtocolError(
                f"{body.numel() - head} B of values are not the {values.body_bytes(count)} B of {count} in {values!r}"
            )
        found = torch.empty(count, dtype=torch.float32, device=body.device)
        values.read(body[head:], found, False)
        return indices, found


def index_dtype(numel: int) -> torch.dtype:
    """The dtype of indices into `numel` elements."""
    return torch.int32 if numel < 2**31 else torch.int64


def write_indices(out: Tensor, numel: int, indices: Tensor) -> None:
    """Write sorted indices below `numel` into bytes of their layout's size."""
    plan = layout(numel, indices.numel())
    sparse_kernels(out).pack_indices(indices, plan.low, plan.first, out.zero_())


def read_indices(packed: Tensor, numel: int, count: int) -> Tensor:
    """Read indices. A `ProtocolError` if they do not increase, are not below `numel`, or are not `count`."""
    plan = layout(numel, count)
    if packed.numel() != plan.nbytes:
        raise ProtocolError(f"{packed.numel()} B are not the {plan.nbytes} B that {count} of {numel} indices take")
    out = torch.empty(count, dtype=index_dtype(numel), device=packed.device)
    sparse_kernels(packed).unpack_indices(packed, numel, count, plan.low, plan.first, out)
    return out
