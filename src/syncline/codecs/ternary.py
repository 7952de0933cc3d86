"""Three values: each element becomes −s, 0 or s, at random so that the mean is right.

    s = max|x| of a part, or of each bucket        decoded: s · sign(x) · b, P(b = 1) = |x|/s
    with clip: s = min(max|x|, clip · σ), σ = √mean(x²), and what lies beyond s is cut to it

    scales float32 │ digits of base 3, five to a byte (`kernels/dense_reference.py` rngs how): 1.6 bits a value

Base 3 was chosen over 2 bits because it is a fifth shorter, and no slower here. σ is taken about zero, not about the
mean: a part of equal values would otherwise be cut to nothing.

Wen et al.: TernGrad: Ternary gradients to reduce communication in distributed deep learning, 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from syncline.codecs.base import CodecTraits, RngKey, TensorSlice
from syncline.codecs.dense import DenseCodec
from syncline.codecs.kernels import dense
from syncline.errors import SpecError

__all__ = ["Ternary"]

MOST = 2**30
"""Elements of a bucket: the kernels count them in 32 bits."""
BLOCK = 1280
"""Elements packed together where all share one scale: a multiple of 5 digits and of a machine word."""


@dataclass(frozen=True, repr=False)
class Ternary(DenseCodec):
    """Send −1, 0 or 1 for each value, and one scale for each parameter, or for each `bucket` of it.

    `clip=2.5` cuts what lies beyond 2.5 σ, as the paper does for large models: less noise, but the mean is off.

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
        number = isinstance(self.clip, (int, float)) and not isinstance(self.clip, bool)
        if self.clip is not None and not (number and 0 < self.clip < math.inf):
            raise SpecError(f"ternary clips at a positive number of standard deviations, as 2.5, not {self.clip!r}")
        whole = isinstance(self.bucket, int) and not isinstance(self.bucket, bool)
        if self.bucket is not None and not (whole and 1 <= self.bucket <= MOST):
            raise SpecError(
                "ternary's bucket is how many elements share a scale, as 1024 and up to 2^30 (None: all), "
                f"not {self.bucket!r}"
            )
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(biased=self.clip is not None, detects_nonfinite=True)

    def body_bytes(self, numel: int, step: int = 0) -> int:
        whole, rest = divmod(numel, self._block)
        scales = min(numel, 1) if self.bucket is None else -(-numel // self.bucket)
        return 4 * scales + whole * -(-self._block // 5) + -(-rest // 5)

    def encode_body(self, part: TensorSlice, body: Tensor, rng: RngKey) -> bool:
        return dense.encode_ternary(
            part.flat,
            part.residual,
            body,
            block=self._block,
            shared=self.bucket is None,
            clip=self.clip or 0.0,
            start=rng.start,
            key=rng.key,
        )

    def decode_body(self, body: Tensor, out: Tensor, accumulate: bool) -> str:
        return dense.decode_ternary(body, out, block=self._block, shared=self.bucket is None, accumulate=accumulate)

    @property
    def _block(self) -> int:
        """Elements packed together."""
        return BLOCK if self.bucket is None else self.bucket
