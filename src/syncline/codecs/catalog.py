"""Every codec by its name."""

from __future__ import annotations

from syncline.codecs.base import Codec
from syncline.codecs.cast import Cast
from syncline.codecs.chain import Chain
from syncline.codecs.choosing import BySize, PerLayer
from syncline.codecs.lossless import Lossless
from syncline.codecs.onebit import OneBit
from syncline.codecs.powersgd import PowerSGD
from syncline.codecs.quantize import Quantize
from syncline.codecs.randomk import RandomK
from syncline.codecs.raw import Raw
from syncline.codecs.ternary import Ternary
from syncline.codecs.threshold import Threshold
from syncline.codecs.topk import TopK
from syncline.errors import SpecError
from syncline.specs import Registry, parse

__all__ = ["build_codec", "codec_names"]

NOTHING = "none"
"""What stands for no codec where only text can be written."""


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
    links = parse(spec)
    if len(links) == 1 and links[0].name == NOTHING and not links[0].args and not links[0].kwargs:
        return None
    if any(link.name == NOTHING for link in links):
        raise SpecError(f"{spec!r}: 'none' stands alone, without arguments: it means that nothing is encoded")
    registry = _registry()
    built = tuple(registry.make(link) for link in links)
    return built[0] if len(built) == 1 else Chain(built)


def codec_names() -> list[str]:
    """Every name that a link of a codec spec may begin with."""
    return _registry().names()


def _registry() -> Registry[Codec]:
    registry = Registry[Codec]("codec")
    for codec in (
        *(Cast, Quantize, OneBit, Ternary, Lossless, Raw),
        *(TopK, RandomK, Threshold),
        PowerSGD,
        *(PerLayer, BySize),
    ):
        registry.add(codec.name, codec)
    return registry
