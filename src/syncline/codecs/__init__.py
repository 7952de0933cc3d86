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
from syncline.codecs.catalog import build_codec, codec_names
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

_FORMER_NAMES = {"Draw": "RngKey", "Part": "TensorSlice"}


def __getattr__(name: str) -> Any:
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {_FORMER_NAMES[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_FORMER_NAMES[name]]
