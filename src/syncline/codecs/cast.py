"""Sends half precision: fp16 or bf16, which the wire may sum.

    fp16   10 mantissa bits, up to 65504        bf16   7 mantissa bits, the range of float32

A value beyond the range becomes the largest value of the type, never Inf. If the values of n ranks are summed, the
limit is divided by n, so that the sum is finite too. The difference stays in the residual, if there is one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, PayloadCodec, RngKey, TensorSlice, all_finite
from syncline.codecs.kernels import dispatch
from syncline.errors import DivergedError, SpecError

__all__ = ["Cast", "round_to_half"]


@dataclass(frozen=True, repr=False)
class Cast(PayloadCodec):
    """Send values in half precision.

    Values are rounded to the nearest or, with `stochastic`, up or down at random without bias. The error of rounding to
    nearest has no preferred sign, so neither counts as biased. `feedback=True` keeps the error for the next step.

    >>> import torch
    >>> codec = Cast("fp16")
    >>> codec.decode(codec.encode(torch.tensor([0.1, 1e6])), torch.empty(2))
    tensor([9.9976e-02, 6.5504e+04])
    """

    to: str = "fp16"
    stochastic: bool = False
    feedback: bool | None = None

    name: ClassVar[str] = "cast"
    codec_id: ClassVar[int] = 1
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.to not in ("fp16", "bf16"):
            raise SpecError(f"cast goes to 'fp16' or 'bf16', not {self.to!r}")
        if not isinstance(self.stochastic, bool):
            raise SpecError(f"cast's stochastic is True or False, not {self.stochastic!r}")
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(biased=False, allreducible=True)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype on the wire."""
        return torch.float16 if self.to == "fp16" else torch.bfloat16

    def reduce_rounds(self, parts: Sequence[TensorSlice], rng: RngKey, size: int) -> Generator[Tensor, None, None]:
        """One round: the values of all slices."""
        if not parts:
            return
        wire = torch.empty(sum(part.numel for part in parts), dtype=self.dtype, device=parts[0].flat.device)
        pieces = torch.split_with_sizes(wire, [part.numel for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            self._round(part, piece, rng.for_slice(part.name, part.start), size)
        yield wire
        for part, piece in zip(parts, pieces, strict=True):
            part.flat.copy_(piece)

    def body_bytes(self, numel: int, step: int = 0) -> int:
        return 2 * numel

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        aligned = body if body.storage_offset() % 2 == 0 else torch.empty_like(body)
        self._round(part, aligned.view(self.dtype), rng)
        if aligned is not body:
            body.copy_(aligned)
        return body.numel()

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        self.check_length(body, out)
        aligned = body if body.storage_offset() % 2 == 0 else body.clone()
        self.store(aligned.view(self.dtype).float(), out, accumulate)

    def _round(self, part: TensorSlice, halves: Tensor, rng: RngKey, size: int = 1) -> None:
        """Round a slice with its residual to half precision. The sum of `size` such values is finite."""
        values = part.flat if part.residual is None else part.residual.add_(part.flat)
        round_to_half(values, halves, rng, size, self.stochastic)
        if part.residual is not None and not all_finite(part.residual.sub_(halves)):
            raise DivergedError(f"{self!r}: the residual and the gradient of {part.name!r} add up to Inf or NaN")


def round_to_half(values: Tensor, halves: Tensor, rng: RngKey, size: int, stochastic: bool) -> None:
    """Round a row to half precision, to the nearest or stochastically. The sum of `size` such values is finite."""
    limit, bits = _limit(halves.dtype, size)
    if stochastic:
        dispatch.cast_stochastic(values, halves, limit=bits, start=rng.start, key=rng.key)
    else:
        halves.copy_(values.clamp(-limit, limit))


@lru_cache(maxsize=256)
def _limit(dtype: torch.dtype, size: int) -> tuple[float, int]:
    """The largest value whose `size`-fold the dtype can represent, and its bits."""
    info = torch.finfo(dtype)
    exact = info.max / size / ((1 + info.eps) ** size if size > 1 else 1)  # every addition may round up
    found = torch.tensor(exact, dtype=torch.float64).to(dtype)
    bits = int(found.view(torch.int16)) - (float(found) > exact)  # the bits minus one are the next smaller value
    return float(torch.tensor(bits, dtype=torch.int16).view(dtype)), bits
