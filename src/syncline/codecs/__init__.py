"""Codecs: how tensors are encoded for the wire. One file per codec; chains; codecs chosen per parameter."""

import warnings
from typing import Any

from syncline.codecs.base import (
    Codec,
    CodecTraits,
    PayloadCodec,
    RngKey,
    TensorSlice,
    check_no_gradient_options,
    check_optimizer_momentum,
)
from syncline.codecs.cast import Cast
from syncline.codecs.chain import Chain
from syncline.codecs.choosing import BySize, Chooser, PerLayer
from syncline.codecs.lossless import Lossless
from syncline.codecs.onebit import OneBit
from syncline.codecs.powersgd import PowerSGD
from syncline.codecs.quantize import Quantize
from syncline.codecs.randomk import RandomK
from syncline.codecs.raw import Raw
from syncline.codecs.sparse import SparseCodec
from syncline.codecs.ternary import Ternary
from syncline.codecs.threshold import Threshold
from syncline.codecs.topk import TopK
from syncline.errors import SpecError
from syncline.specs import Registry

__all__ = [
    "BySize",
    "Cast",
    "Chain",
    "Chooser",
    "Codec",
    "CodecTraits",
    "Lossless",
    "OneBit",
    "PayloadCodec",
    "PerLayer",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Raw",
    "RngKey",
    "SparseCodec",
    "TensorSlice",
    "Ternary",
    "Threshold",
    "TopK",
    "build_codec",
    "check_no_gradient_options",
    "check_optimizer_momentum",
    "codec_names",
]

NO_CODEC = "none"
"""The spec that means no codec."""
OTHER_NAMES = {
    **dict.fromkeys(("fp16", "float16", "half"), "cast('fp16')"),
    **dict.fromkeys(("bf16", "bfloat16"), "cast('bf16')"),
    **dict.fromkeys(("int8", "8bit", "uint8"), "quantize(8)"),
    **dict.fromkeys(("int4", "4bit"), "quantize(4)"),
    "qsgd": "quantize(4, norm='l2')",
    **dict.fromkeys(("1bit", "1bitsgd", "1bitadam", "onebitsgd", "sign", "signsgd", "efsignsgd"), "onebit"),
    "terngrad": "ternary",
    **dict.fromkeys(("dgc", "deepgradientcompression"), "topk(0.001, momentum=0.9)"),
    **dict.fromkeys(("sparse", "sparsify", "topksgd"), "topk(0.01)"),
    **dict.fromkeys(("randk", "randomsparsification"), "randomk(0.01)"),
    **dict.fromkeys(("lowrank", "psgd"), "powersgd(2)"),
    **dict.fromkeys(("zlib", "gzip", "deflate", "zstd", "lz4", "compress"), "lossless"),
    **dict.fromkeys(("identity", "dense", "noop", "nothing"), "none"),
}
"""Names of codecs in other libraries, and our specs for them."""
_REGISTRY = Registry[Codec]("codec", OTHER_NAMES)
for _codec in (Cast, Quantize, OneBit, Ternary, Lossless, Raw, TopK, RandomK, Threshold, PowerSGD, PerLayer, BySize):
    _REGISTRY.add(_codec.name, _codec)


def build_codec(spec: str | Codec | None) -> Codec | None:
    """The codec, or chain of codecs, that a spec describes; None for None and 'none'.

    >>> build_codec("topk(0.01)|quantize(4)")
    topk(0.01)|quantize(4)
    >>> build_codec("none") is None
    True
    """
    if spec is None or isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a codec is a spec such as 'topk(0.01)|quantize(4)', a codec or None, not {spec!r}")
    links = _REGISTRY.read(spec)
    if len(links) == 1 and links[0].name == NO_CODEC and not links[0].args and not links[0].kwargs:
        return None
    if any(link.name == NO_CODEC for link in links):
        raise SpecError(f"{spec!r}: 'none' stands alone, without arguments: it means that nothing is encoded")
    built: tuple[Any, ...] = tuple(_REGISTRY.make(link) for link in links)
    return built[0] if len(built) == 1 else Chain(built)


def codec_names() -> list[str]:
    """The names of all codecs."""
    return _REGISTRY.names()


_FORMER_NAMES = {"Draw": "RngKey", "Part": "TensorSlice"}


def __getattr__(name: str) -> Any:
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {_FORMER_NAMES[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_FORMER_NAMES[name]]
