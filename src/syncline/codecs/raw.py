"""Sends float32 unchanged: the null codec. The default codec of a sparse codec's values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, PayloadCodec, RngKey, TensorSlice, floats_of

__all__ = ["Raw"]


@dataclass(frozen=True, repr=False)
class Raw(PayloadCodec):
    """Send float32 unchanged.

    >>> Raw()
    raw
    """

    name: ClassVar[str] = "raw"
    codec_id: ClassVar[int] = 10

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(biased=False, exact=True)

    def body_bytes(self, numel: int, step: int = 0) -> int:
        return 4 * numel

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        values = part.flat
        if part.residual is not None:
            values = part.residual + values
            part.residual.zero_()
        body.copy_(values.view(torch.uint8))
        return body.numel()

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        self.check_length(body, out)
        self.store(floats_of(body), out, accumulate)
