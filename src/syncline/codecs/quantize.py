"""Quantises values to a few levels, with stochastic rounding to one of the two nearest levels, without bias.

    s = max|x| or ‖x‖₂ of a block          L = 2^(bits−1) − 1
    code = ⌊x L/s + u⌋ + L, u in [0, 1)    decoded: s (code − L)/L

    scales float32 │ codes, `bits` each, packed block by block

A block is `bucket` elements that share a scale. `kernels/dense_reference.py` packs on any device, and
`kernels/dense_fused.py` on the CPU with the same bits.

Alistarh et al.: QSGD: Communication-efficient SGD via gradient quantization and encoding, 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from syncline.codecs.base import MAX_BUCKET_ELEMENTS, CodecTraits, DenseCodec, is_whole_number
from syncline.codecs.kernels.dispatch import DenseKernel
from syncline.errors import SpecError

__all__ = ["Quantize"]

NORMS = ("max", "l2")


@dataclass(frozen=True, repr=False)
class Quantize(DenseCodec):
    """Send each value as one of 2^bits − 1 levels, symmetric about zero.

    With `norm="max"` the levels span the largest magnitude of a block. With "l2", as in the paper, they span more, and
    most values become zero. Without `stochastic` each value becomes the nearest level, which is biased.

    >>> import torch
    >>> codec = Quantize(4, stochastic=False)
    >>> codec.decode(codec.encode(torch.tensor([7.0, 1.2, 0.0, -3.9])), torch.empty(4))
    tensor([ 7.,  1.,  0., -4.])
    """

    bits: int = 4
    bucket: int = 1024
    norm: str = "max"
    stochastic: bool = True
    feedback: bool | None = None

    name: ClassVar[str] = "quantize"
    codec_id: ClassVar[int] = 2
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not is_whole_number(self.bits, 2, 8):
            raise SpecError(f"quantize takes 2 to 8 bits for a value, not {self.bits!r}; one bit is onebit's")
        if not is_whole_number(self.bucket, 1, MAX_BUCKET_ELEMENTS):
            raise SpecError(
                f"quantize's bucket is how many elements share a scale, as 1024 and up to 2^30, not {self.bucket!r}"
            )
        if self.norm not in NORMS:
            raise SpecError(f"quantize's norm is 'max' or 'l2', not {self.norm!r}")
        if not isinstance(self.stochastic, bool):
            raise SpecError(f"quantize's stochastic is True or False, not {self.stochastic!r}")
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(
            biased=not self.stochastic,
            detects_nonfinite=self.norm == "max",  # an Euclidean norm past the range of float32 is clamped
        )

    @cached_property
    def kernel(self) -> DenseKernel:
        rounding = (self.norm == "l2", self.stochastic)
        return DenseKernel("quantize", self.bucket, (self.bits,), rounding, planes=self.bits)
