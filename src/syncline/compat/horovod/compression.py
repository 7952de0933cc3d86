"""What travels in place of a tensor: `Compression.none`, `Compression.fp16`, and any codec of ours."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.codecs import Codec, build_codec
from syncline.errors import IncompatibleError, UnsupportedError

__all__ = ["CodecCompression", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "codec_of"]


class Compressor:
    """A pair of functions: what travels, and what is made of it on arrival.

    `codec` is the way that `DistributedOptimizer` goes instead: by the codec of ours that does the same.
    """

    codec: ClassVar[str | None] = None

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and what `decompress` must know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """What arrived, as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are.

    >>> NoneCompressor.compress(torch.ones(1))
    (tensor([1.]), None)
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel in half precision; others as they are.

    >>> FP16Compressor.compress(torch.ones(1))
    (tensor([1.], dtype=torch.float16), torch.float32)
    """

    codec = "cast('fp16')"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class CodecCompression:
    """A codec of ours, for `DistributedOptimizer`: it sums what the ranks send in its own way.

    >>> CodecCompression("topk(0.01)|quantize(4)")
    Compression.codec('topk(0.01)|quantize(4)')
    """

    def __init__(self, spec: str | Codec) -> None:
        self.codec = build_codec(spec)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Refused: what a codec sends does not add up by an all-reduce of tensors."""
        raise UnsupportedError(
            f"{self!r} is for DistributedOptimizer(compression=…), where payloads are summed by their codec; a single "
            "operation takes Compression.none or Compression.fp16"
        )

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Refused, as `compress`."""
        return self.compress(tensor)[0]

    def __repr__(self) -> str:
        return f"Compression.codec({str(self.codec)!r})"


class Compression:
    """The ways to compress: `none`, `fp16`, and `codec(spec)` for `DistributedOptimizer`.

    >>> Compression.codec("quantize(4)").codec
    quantize(4)
    """

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor

    @staticmethod
    def codec(spec: str | Codec) -> CodecCompression:
        """Any codec of ours, as a spec or an object."""
        return CodecCompression(spec)


def codec_of(compression: Any) -> Codec | None:
    """The codec that `DistributedOptimizer` sends gradients by; None: as they are.

    >>> codec_of(Compression.fp16), codec_of("quantize(4)"), codec_of(Compression.none)
    (cast('fp16'), quantize(4), None)
    """
    if isinstance(compression, CodecCompression):
        return compression.codec
    if compression is None or isinstance(compression, (str, Codec)):
        return build_codec(compression)
    known = compression if isinstance(compression, type) else type(compression)
    if issubclass(known, (NoneCompressor, FP16Compressor)) and known.compress in (
        NoneCompressor.compress,
        FP16Compressor.compress,
    ):
        return build_codec(known.codec)
    raise IncompatibleError(
        f"compression={compression!r}: gradients travel in buckets here, so a compressor's compress() and decompress() "
        "of single tensors are not called. Use Compression.none, Compression.fp16 or a codec, as "
        'Compression.codec("topk(0.01)|quantize(4)")'
    )
