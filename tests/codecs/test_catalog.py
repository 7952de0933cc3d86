"""Codecs by their names."""

from __future__ import annotations

import pytest

from syncline.codecs import build_codec, codec_names
from syncline.codecs.chain import Chain
from syncline.codecs.quantize import Quantize
from syncline.codecs.topk import TopK
from syncline.errors import SpecError


def test_every_name() -> None:
    assert codec_names() == [
        *("by_size", "cast", "lossless", "onebit", "per_layer", "powersgd", "quantize", "randomk", "raw", "ternary"),
        *("threshold", "topk"),
    ]


def test_every_kind_is_given_once() -> None:
    """Numbers on the wire are for ever: each has one meaning."""
    built = [
        build_codec(spec)
        for spec in (
            *("cast('fp16')", "quantize(4)", "onebit", "ternary", "topk(0.1)", "randomk(0.1)", "threshold(0.1)"),
            *("powersgd(2)", "lossless", "raw", "topk(0.1)|quantize(4)"),
        )
    ]
    assert [each.codec_id for each in built if each is not None] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15]


def test_nothing_is_none() -> None:
    assert build_codec(None) is None
    assert build_codec("none") is None
    assert build_codec(" none ") is None


def test_a_codec_is_given_back() -> None:
    codec = TopK(0.01)
    assert build_codec(codec) is codec


def test_chains() -> None:
    assert build_codec("topk(0.01) | quantize(4)") == Chain((TopK(0.01), Quantize(4))) == TopK(0.01) | Quantize(4)
    assert repr(build_codec("topk(0.01)|quantize(4)|lossless")) == "topk(0.01)|quantize(4)|lossless"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("topp(0.1)", "did you mean 'topk'"),
        ("topk(0.01)|quantise(4)", "did you mean 'quantize'"),
        ("topk(ratoi=0.1)", "ratoi"),
        ("topk(0.01)|none", "'none' stands alone"),
        ("none(3)", "'none' stands alone"),
        ("topk(__import__('os'))", "not a literal"),
        ("quantize(4)|topk(0.01)", "comes first"),
        ("onebit|quantize(4)", "only lossless may follow"),
        ("lossless|lossless", "only lossless may follow"),
        ("powersgd(2)|quantize(4)", "only cast may follow"),
        ("topk(0.1)|powersgd(2)", "comes first"),
        ("topk(0.1)|raw", "cannot be part of a chain"),
        ("", "the codec is empty; available"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(spec: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        build_codec(spec)


@pytest.mark.parametrize("wrong", [3, 0.1, True, ["topk"], b"topk(0.1)"])
def test_what_is_no_spec_is_refused(wrong: object) -> None:
    with pytest.raises(SpecError, match="a codec is a spec such as"):
        build_codec(wrong)  # type: ignore[arg-type]
