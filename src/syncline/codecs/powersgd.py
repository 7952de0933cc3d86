"""Low-rank approximation: a matrix is sent as two factors, which the wire sums (Vogels, Karimireddy, Jaggi 2019).

    M ≈ P Qᵀ      P = M Q, summed over the ranks, orthonormalised;  Q = Mᵀ P, summed;  the next step starts from Q

    round 1   │ P of each matrix of the bucket │ vectors and small tensors, unencoded │
    round 2   │ Q of each matrix of the bucket │

What must be equal on every rank is computed from the sums alone, by additions and products in a fixed order: its bits
do not depend on the number of threads or the processor.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import (
    SHARED_MEMORY_KEY,
    CodecTraits,
    PayloadCodec,
    RngKey,
    TensorSlice,
    all_finite,
    floats_of,
    get_u32,
    is_whole_number,
    put_u32,
)
from syncline.codecs.cast import round_to_half
from syncline.codecs.kernels.dispatch import fused
from syncline.errors import DivergedError, ProtocolError, SpecError

__all__ = ["PowerSGD"]

ROWS_BYTES = 4
"""Size of the number of rows at the start of a body. 0 rows: it is no matrix, and its elements follow."""
BLOCK_ELEMENTS = 1 << 17
"""Elements that are multiplied together: they stay in the cache from one column to the next."""
MAX_FLOAT32 = torch.finfo(torch.float32).max
SAFE_ADDEND = 1e31
"""Less than half the gap between the two largest float32 numbers: adding it cannot overflow."""
DEPENDENT = 1e-12
"""A column of which less than this is left after the others were taken out of it is one of them."""


@dataclass(frozen=True, repr=False)
class PowerSGD(PayloadCodec):
    """Sends matrices as products of two factors; vectors, and matrices that would not get smaller, unencoded.

    A parameter of more than two dimensions is a matrix with a row for each index of the first. The codec is biased, so
    it keeps a residual. Each step continues the subspace iteration of the last one. The payload of a single tensor has
    P and Q after two power iterations.

    >>> import torch
    >>> codec = PowerSGD(1)
    >>> gradient = torch.outer(torch.arange(8.0), torch.arange(12.0))  # rank 1: exact
    >>> payload = codec.encode(gradient)
    >>> payload.numel(), torch.allclose(codec.decode(payload, torch.empty(8, 12)), gradient)
    (104, True)
    """

    rank: int = 2
    feedback: bool | None = None

    name: ClassVar[str] = "powersgd"
    codec_id: ClassVar[int] = 8
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not is_whole_number(self.rank, 1):
            raise SpecError(f"powersgd: the rank is a whole number, at least 1 (usually 1 to 4), not {self.rank!r}")
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(fixed_length=False, allreducible=True, residual_needs_sum=True)

    def reduce_rounds(
        self,
        parts: Sequence[TensorSlice],
        rng: RngKey,
        size: int,
        wire: torch.dtype = torch.float32,
        stochastic: bool = False,
    ) -> Generator[Tensor, None, None]:
        """Two rounds for the bucket, one if it has no matrix; everything is sent as `wire`.

        With `stochastic`, values are rounded to half precision stochastically, without bias.
        """
        if not parts:
            return
        bucket = [_Target(part, self.rank) for part in parts]
        dense = [each for each in bucket if not each.rows]
        matrices = [each for each in bucket if each.rows]
        for each in matrices:
            each.start(self.rank, rng)
        first = [_Piece(each.matrix @ each.q, _shrink(len(each.q)), rng.for_slice(each.part.name)) for each in matrices]
        first += [_Piece(each.values, 1.0, rng.for_slice(each.part.name, each.part.start)) for each in dense]
        sent = _Message(first, size, wire, stochastic)
        yield sent.flat
        summed = sent.pieces()
        own = sent.own
        for one, whole, mine in zip(dense, summed[len(matrices) :], own[len(matrices) :], strict=True):
            one.set_residual(mine)
            one.part.flat.copy_(whole)
        if not matrices:
            return
        ps = [_orthonormal(whole) for whole in summed[: len(matrices)]]
        second = [
            _Piece(
                each.matrix.T @ _down(p), _shrink(len(p)), rng.for_slice(each.part.name, p.numel())
            )  # other bits than P's
            for each, p in zip(matrices, ps, strict=True)
        ]
        sent = _Message(second, size, wire, stochastic)
        yield sent.flat
        for each, p, whole, mine in zip(matrices, ps, sent.pieces(), sent.own, strict=True):
            each.subtract_product(_up(p), mine)
            _product(_up(p), whole, out=each.part.flat)
            each.part.memory[SHARED_MEMORY_KEY] = whole.clone()  # not a view, which would keep the bucket alive

    def body_bytes(self, numel: int, step: int = 0) -> int:
        return ROWS_BYTES + 4 * numel

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        target = _Target(part, self.rank)
        numbers = decoded = target.values
        if target.rows:
            target.start(self.rank, rng)
            for _ in range(2):  # the second starts from the result of the first
                p = _orthonormal(target.matrix @ target.q)
                q = target.matrix.T @ _down(p)
                target.q = _unit(q, rng)
            numbers = torch.cat([_up(p).flatten(), q.flatten()])
            decoded = _product(_up(p), q).flatten()
        used = ROWS_BYTES + 4 * numbers.numel()
        put_u32(body, target.rows)
        body[ROWS_BYTES:used].copy_(numbers.view(torch.uint8))
        target.set_residual(decoded)  # last: without a matrix the numbers are the residual itself
        return used

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        rank, numel = self.rank, out.numel()
        rows = get_u32(body)
        if rows and (numel % rows or _rows((rows, numel // rows), numel, rank) != rows):
            raise ProtocolError(f"a body of {self!r} says that {numel} elements are a matrix of {rows} rows")
        due = rank * (rows + numel // rows) if rows else numel
        if body.numel() != ROWS_BYTES + 4 * due:
            raise ProtocolError(f"a body of {self!r} has {body.numel()} B, and {ROWS_BYTES + 4 * due} B are due")
        values = floats_of(body[ROWS_BYTES:])
        if not all_finite(values):
            raise ProtocolError(f"a body of {self!r} holds NaN or Inf")
        if rows:
            p, q = values[: rank * rows].view(rows, rank), values[rank * rows :].view(-1, rank)
            values = _product(p, q).flatten()
        self.store(values, out, accumulate)


class _Target:
    """What a slice has to send: gradient plus residual, as a matrix if it is one.

    They are added in the residual's memory: allocating memory costs more than the addition.
    """

    def __init__(self, part: TensorSlice, rank: int) -> None:
        self.part = part
        self.values = part.flat if part.residual is None else part.residual.add_(part.flat)
        self.rows = _rows(part.shape, part.numel, rank)
        self.matrix = self.values.view(self.rows, -1) if self.rows else self.values
        self.q = self.values.new_empty(0)

    def start(self, rank: int, rng: RngKey) -> None:
        """Start from the subspace of the last step, or from a random one that is equal on every rank."""
        own = rng.for_slice(self.part.name)
        kept = self.part.memory.get(SHARED_MEMORY_KEY)
        shape = (self.matrix.shape[1], rank)
        self.q = _unit(kept if kept is not None and kept.shape == shape else self.values.new_zeros(shape), own)

    def set_residual(self, sent: Tensor) -> None:
        """Leave in the residual what was not sent, clamped to the range of float32."""
        if self.part.residual is not None:
            torch.sub(self.values, sent.reshape(-1), out=self.part.residual).clamp_(-MAX_FLOAT32, MAX_FLOAT32)

    def subtract_product(self, p: Tensor, q: Tensor) -> None:
        """Leave in the residual what P Qᵀ lacks. No other rank computes it, so any order of additions is correct."""
        if self.part.residual is None:
            return
        if _max_magnitude(p, q) >= SAFE_ADDEND:
            self.set_residual(_product(p, q))
        else:
            self.matrix.addmm_(p, q.T, alpha=-1)


@dataclass(frozen=True)
class _Piece:
    """A tensor to be all-reduced."""

    tensor: Tensor
    shrunk: float
    """The factor by which it was scaled down."""
    rng: RngKey
    """The key of the random bits of its rounding."""


class _Message:
    """Pieces in one flat tensor, to be all-reduced together."""

    def __init__(self, pieces: Sequence[_Piece], size: int, wire: torch.dtype, stochastic: bool) -> None:
        self.shapes = [each.tensor.shape for each in pieces]
        # Half precision has no range for numbers that were scaled down against an overflow of float32.
        self.shrunk = [each.shrunk if wire == torch.float16 else 1.0 for each in pieces]
        flats = zip((each.tensor.reshape(-1) for each in pieces), self.shrunk, strict=True)
        self.flat = torch.cat([row if factor == 1.0 else row / factor for row, factor in flats])
        if wire != torch.float32:  # clamped, so that the sum is not Inf; the rest stays in the residual
            whole, self.flat = self.flat, torch.empty_like(self.flat, dtype=wire)
            lengths = [shape.numel() for shape in self.shapes]
            rows, halves = (torch.split_with_sizes(each, lengths) for each in (whole, self.flat))
            for each, row, half in zip(pieces, rows, halves, strict=True):
                round_to_half(row, half, each.rng, size, stochastic)
        self.own = self._cut(self.flat.clone())

    def pieces(self) -> list[Tensor]:
        """The reduced tensors."""
        if not all_finite(self.flat):  # the same bits on every rank, so all raise
            raise DivergedError("powersgd: the sum over the ranks holds NaN or Inf")
        return self._cut(self.flat)

    def _cut(self, whole: Tensor) -> list[Tensor]:
        cut = torch.split(whole.float(), [shape.numel() for shape in self.shapes])
        return [
            (each if factor == 1.0 else each * factor).view(shape)
            for each, factor, shape in zip(cut, self.shrunk, self.shapes, strict=True)
        ]


def _rows(shape: tuple[int, ...], numel: int, rank: int) -> int:
    """Number of rows of a parameter's matrix. 0: no matrix, a slice, or the factors would not be smaller."""
    if len(shape) < 2 or math.prod(shape) != numel or numel == 0:
        return 0
    rows = shape[0]
    return 0 if rank * (rows + numel // rows) >= numel else rows


def _unit(q: Tensor, rng: RngKey) -> Tensor:
    """Normalised columns to start from. A zero column would stay zero, so it is replaced by a random one.

    They are then scaled down, so that no element of M Q exceeds the largest of M.
    """
    length = q.double().square().sum(dim=0).sqrt()
    known = length > 0
    columns = q.double() / torch.where(known, length, 1.0)
    if not bool(known.all()):
        generator = torch.Generator().manual_seed(rng.shared_key)
        drawn = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(q.device)
        columns = torch.where(known, columns, drawn / drawn.square().sum(dim=0).sqrt())
    return _down(columns)


def _orthonormal(p: Tensor) -> Tensor:
    """Modified Gram-Schmidt in float64, column by column. A linearly dependent column becomes zero."""
    columns = p.double().T.contiguous()
    if fused(columns):
        from syncline.codecs.kernels.dense_fused import orthonormal

        orthonormal(columns, DEPENDENT)
        return columns.T
    for index in range(len(columns)):
        column = columns[index]
        before = _total(p[:, index].double().square())
        for earlier in columns[:index]:
            column -= _total(earlier * column) * earlier
        after = _total(column.square())
        if bool(after <= DEPENDENT**2 * before):
            column.zero_()
        else:
            column /= after.sqrt()
    return columns.T


def _total(row: Tensor) -> Tensor:
    """Pairwise summation: the order of additions depends on the length alone, not on threads or vector units."""
    while row.numel() > 1:
        half = (row.numel() + 1) // 2
        rest = row[half:]
        row = torch.cat([row[: rest.numel()] + rest, row[rest.numel() : half]])
    return row.sum()


def _product(p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """P Qᵀ, column by column: the bits of a matrix product would depend on the library's order of additions.

    The projection may be larger than the input; it is clamped to the range of float32.
    """
    whole = p.new_empty(len(p), len(q)) if out is None else out.view(len(p), len(q))
    if _max_magnitude(p, q) >= MAX_FLOAT32:
        exact = (p.double().unsqueeze(1) * q.double()).sum(dim=2)
        return whole.copy_(exact.clamp_(-MAX_FLOAT32, MAX_FLOAT32))
    left, right = p.T.contiguous(), q.T.contiguous()
    if fused(whole):
        from syncline.codecs.kernels.dense_fused import product

        product(left, right, whole)
        return whole
    rows = max(1, BLOCK_ELEMENTS // len(q))
    term = p.new_empty(min(rows, len(p)), len(q))
    for first in range(0, len(p), rows):
        block = whole[first : first + rows]
        torch.mul(left[0, first : first + rows, None], right[0], out=block)
        for index in range(1, len(left)):
            block += torch.mul(left[index, first : first + rows, None], right[index], out=term[: len(block)])
    return whole


def _max_magnitude(p: Tensor, q: Tensor) -> float:
    """An upper bound of the magnitudes of all partial sums of P Qᵀ."""
    return float((p.abs().amax(dim=0).double() * q.abs().amax(dim=0).double()).sum())


def _down(columns: Tensor) -> Tensor:
    """Normalised columns, scaled so that magnitudes sum to at most 1: a product with them cannot overflow."""
    return (columns * _shrink(len(columns))).float()


def _up(columns: Tensor) -> Tensor:
    """The inverse scaling of `_down`."""
    return (columns / _shrink(len(columns))).float()


def _shrink(rows: int) -> float:
    """A power of two ≤ 1/√rows, so that scaling is exact. Magnitudes of a normalised column sum to at most √rows."""
    return 2.0 ** -math.ceil(math.log2(math.sqrt(rows)))
