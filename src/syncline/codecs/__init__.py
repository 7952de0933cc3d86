"""How tensors look on the wire: one codec a file, chains of them, and codecs that choose one for each parameter."""

from syncline.codecs.base import Codec, Draw, Part, PayloadCodec
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
    "Draw",
    "Lossless",
    "OneBit",
    "Part",
    "PayloadCodec",
    "PerLayer",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Raw",
    "SparseCodec",
    "Ternary",
    "Threshold",
    "TopK",
    "build_codec",
    "codec_names",
]
