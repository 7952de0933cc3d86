"""`Compression.none`, `Compression.fp16`, and any codec of Syncline."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.codecs import Codec, build_codec
from syncline.errors import IncompatibleError, UnsupportedError


class Compressor:
    """A pair of functions that compress a tensor and decompress it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The compressed tensor, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in its original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged.

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
    """Sends floating-point tensors in half precision, and others unchanged.

    >>> FP16Compressor.compress(torch.ones(1))
    (tensor([1.], dtype=torch.float16), torch.float32)
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class CodecCompression:
    """A codec of Syncline, for `DistributedOptimizer`, which sums payloads with the codec.

    >>> CodecCompression("topk(0.01)|quantize(4)")
    Compression.codec('topk(0.01)|quantize(4)')
    """

    def __init__(self, spec: str | Codec) -> None:
        self.codec = build_codec(spec)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Refused: an allreduce of tensors cannot sum the payloads of a codec."""
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
    """The compressors: `none`, `fp16`, and `codec(spec)` for `DistributedOptimizer`.

    >>> Compression.codec("quantize(4)").codec
    quantize(4)
    """

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor

    @staticmethod
    def codec(spec: str | Codec) -> CodecCompression:
        """Any codec of Syncline, as a spec or an object."""
        return CodecCompression(spec)


def codec_of(compression: Any) -> Codec | None:
    """The codec with which `DistributedOptimizer` sends gradients; None if they are not compressed.

    >>> codec_of(Compression.fp16), codec_of("quantize(4)"), codec_of(Compression.none)
    (cast('fp16'), quantize(4), None)
    """
    if isinstance(compression, CodecCompression):
        return compression.codec
    if compression is None or isinstance(compression, (str, Codec)):
        return build_codec(compression)
    compress = getattr(compression, "compress", None)
    if compress is NoneCompressor.compress:
        return None
    if compress is FP16Compressor.compress:
        return build_codec("cast('fp16')")
    raise IncompatibleError(
        f"compression={compression!r}: gradients are sent in buckets, so compress() and decompress() of single "
        "tensors are not called. Use Compression.none, Compression.fp16 or a codec, as "
        'Compression.codec("topk(0.01)|quantize(4)")'
    )
