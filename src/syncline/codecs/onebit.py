"""Sends the signs: one bit per value, and for each block of `bucket` elements the values of the two signs.

    x ≥ 0 → the mean of the nonnegative values        x < 0 → the mean of the negative values

    two means float32 for each block │ signs, packed block by block (see `kernels/dense_reference.py`)

Seide et al.: 1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs, 2014. It needs error feedback to train.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from syncline.codecs.base import MAX_BUCKET_ELEMENTS, CodecTraits, DenseCodec, is_whole_number
from syncline.codecs.kernels.dispatch import DenseKernel
from syncline.errors import SpecError

__all__ = ["OneBit"]


@dataclass(frozen=True, repr=False)
class OneBit(DenseCodec):
    """Send the sign of each value, and two means for each block of `bucket` values.

    >>> import torch
    >>> codec = OneBit()
    >>> codec.decode(codec.encode(torch.tensor([1.0, 3.0, -2.0, -6.0])), torch.empty(4))
    tensor([ 2.,  2., -4., -4.])
    """

    bucket: int = 1024
    feedback: bool | None = None

    name: ClassVar[str] = "onebit"
    codec_id: ClassVar[int] = 3
    draws_random_bits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not is_whole_number(self.bucket, 1, MAX_BUCKET_ELEMENTS):
            raise SpecError(
                f"onebit's bucket is how many elements share two means, as 1024 and up to 2^30, not {self.bucket!r}"
            )
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(detects_nonfinite=True)

    @cached_property
    def kernel(self) -> DenseKernel:
        return DenseKernel("onebit", self.bucket, scale_bytes=8)
