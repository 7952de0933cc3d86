"""Sends all elements of at least a given magnitude. Their number varies, and so does the length.

    e = residual + g      send e_i where |e_i| ≥ t      residual = e, 0 where it was sent

Strom: Scalable distributed DNN training using commodity GPU cloud computing, 2015 (there with one bit a value).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, PayloadCodec, RngKey, TensorSlice, is_number
from syncline.codecs.kernels.dispatch import sparse_kernels
from syncline.codecs.kernels.indices import layout
from syncline.codecs.sparse import RAW, SparseCodec
from syncline.errors import SpecError

__all__ = ["Threshold"]


@dataclass(frozen=True, repr=False)
class Threshold(SparseCodec):
    """Send the elements of at least this magnitude.

    >>> codec = Threshold(0.5)
    >>> codec.decode(codec.encode(torch.tensor([0.4, -0.5, 2.0])), torch.empty(3))
    tensor([ 0.0000, -0.5000,  2.0000])
    """

    threshold: float
    feedback: bool | None = None

    name: ClassVar[str] = "threshold"
    codec_id: ClassVar[int] = 7
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        info = torch.finfo(torch.float32)
        if not (is_number(self.threshold) and info.tiny <= self.threshold <= info.max):
            raise SpecError(
                f"threshold is a magnitude that float32 has ({info.tiny:.2g} and above), not {self.threshold!r}"
            )
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(fixed_length=False)

    def max_selected(self, numel: int, step: int = 0) -> int:
        return numel

    def body_bytes(self, numel: int, step: int = 0, values: PayloadCodec = RAW) -> int:
        # The layout of all indices is the longest: fewer never take more than one bit per element.
        return 4 + layout(numel, numel).nbytes + values.body_bytes(numel)

    def select(self, part: TensorSlice, rng: RngKey) -> tuple[Tensor, Tensor]:
        return sparse_kernels(part.flat).at_least(part.flat, part.residual, self.threshold)
