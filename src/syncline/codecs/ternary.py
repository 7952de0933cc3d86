"""Sends three values: each element becomes −s, 0 or s, stochastically and without bias.

    s = max|x| of a slice, or of each block        decoded: s · sign(x) · b, P(b = 1) = |x|/s
    with clip: s = min(max|x|, clip · σ), σ = √mean(x²), and larger values are clipped to s

    scales float32 │ digits of base 3, five to a byte (see `kernels/dense_reference.py`): 1.6 bits a value

Base 3 is a fifth shorter than 2 bits and no slower here. σ is taken about zero, not about the mean: a slice of equal
values would otherwise be clipped to zero.

Wen et al.: TernGrad: Ternary gradients to reduce communication in distributed deep learning, 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from syncline.codecs.base import MAX_BUCKET_ELEMENTS, CodecTraits, DenseCodec, is_number, is_whole_number
from syncline.codecs.kernels.dispatch import DenseKernel
from syncline.errors import SpecError

__all__ = ["Ternary"]

BLOCK_ELEMENTS = 1280
"""Elements packed together if all share one scale: a multiple of 5 digits and of a machine word."""


@dataclass(frozen=True, repr=False)
class Ternary(DenseCodec):
    """Send −1, 0 or 1 for each value, and one scale for each parameter, or for each block of `bucket` values.

    `clip=2.5` clips values beyond 2.5 σ, as the paper does for large models: less noise, but biased.

    >>> import torch
    >>> codec = Ternary()
    >>> codec.decode(codec.encode(torch.tensor([2.0, 0.0, -2.0])), torch.empty(3))
    tensor([ 2.,  0., -2.])
    """

    clip: float | None = None
    bucket: int | None = None
    feedback: bool | None = None

    name: ClassVar[str] = "ternary"
    codec_id: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if self.clip is not None and not (is_number(self.clip) and 0 < self.clip < math.inf):
            raise SpecError(f"ternary clips at a positive number of standard deviations, as 2.5, not {self.clip!r}")
        if self.bucket is not None and not is_whole_number(self.bucket, 1, MAX_BUCKET_ELEMENTS):
            raise SpecError(
                "ternary's bucket is how many elements share a scale, as 1024 and up to 2^30 (None: all), "
                f"not {self.bucket!r}"
            )
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(biased=self.clip is not None, detects_nonfinite=True)

    @cached_property
    def kernel(self) -> DenseKernel:
        shared = self.bucket is None
        rounding = (float(self.clip or 0.0),)
        return DenseKernel(
            "ternary", self.bucket or BLOCK_ELEMENTS, (shared,), rounding, codes_per_byte=5, shared_scale=shared
        )
