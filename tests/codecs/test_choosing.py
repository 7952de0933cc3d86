"""Choosing a codec for each parameter."""

from __future__ import annotations

import pytest
import torch

from syncline.codecs import build_codec
from syncline.codecs.base import Codec, CodecTraits, RngKey, check_optimizer_momentum
from syncline.codecs.cast import Cast
from syncline.codecs.choosing import BySize, PerLayer
from syncline.codecs.lossless import Lossless
from syncline.codecs.onebit import OneBit
from syncline.codecs.powersgd import PowerSGD
from syncline.codecs.quantize import Quantize
from syncline.codecs.topk import TopK
from syncline.errors import DivergedError, IncompatibleError, ProtocolError, SpecError


def test_the_first_pattern_that_matches_decides() -> None:
    codec = PerLayer({"*.bias": None, "0.*": TopK(0.1), "*": "quantize(4)", "2.*": "onebit"})
    assert codec.codec_for("0.bias", 5) is None
    assert codec.codec_for("0.weight", 5) == TopK(0.1)
    assert codec.codec_for("2.weight", 5) == Quantize(4)


def test_without_a_match_it_goes_as_it_is() -> None:
    codec = PerLayer({"conv?.*": "onebit"})
    assert codec.codec_for("conv1.weight", 5) == OneBit()
    assert codec.codec_for("conv10.weight", 5) is None
    assert codec.codec_for("Conv1.weight", 5) is None, "names differ by case"


def test_the_size_decides() -> None:
    codec = BySize(100, None, "onebit")
    assert codec.codec_for("any", 99) is None
    assert codec.codec_for("any", 100) == OneBit()


def test_choosers_within_choosers() -> None:
    codec = PerLayer({"*.bias": None, "*": BySize(100, "cast('fp16')", PerLayer({"0.*": "topk(0.1)"}))})
    assert codec.codec_for("0.weight", 99) == Cast("fp16")
    assert codec.codec_for("0.weight", 100) == TopK(0.1)
    assert codec.codec_for("1.weight", 100) is None
    assert codec.codec_for("1.bias", 10**6) is None


@pytest.mark.parametrize(
    "spec",
    [
        "per_layer({'*.bias': None, '*': 'topk(0.01)|quantize(4)'})",
        "by_size(4096, None, 'onebit')",
        "by_size(4096, 'onebit', None)",
        "per_layer({'0.*': \"by_size(10, None, \\\"cast('fp16')\\\")\"})",
    ],
)
def test_specs_read_back(spec: str) -> None:
    codec = build_codec(spec)
    assert codec is not None
    again = build_codec(repr(codec))
    assert again == codec
    assert hash(again) == hash(codec)
    assert repr(again) == repr(codec)
    if "by_size(10" not in spec:
        assert repr(codec) == spec


def test_codecs_and_specs_make_the_same_chooser() -> None:
    assert PerLayer({"*": TopK(0.01) | Quantize(4)}) == PerLayer({"*": "topk(0.01)|quantize(4)"})
    assert BySize(9, "none", OneBit()) == BySize(9, None, "onebit")


@pytest.mark.parametrize("codec", [PerLayer({"*": "onebit"}), BySize(10, "lossless", "onebit")], ids=repr)
def test_a_tensor_alone(codec: Codec) -> None:
    sent = torch.randn(100, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros(100)
    payload = codec.encode(sent, RngKey(), residual)
    assert payload.numel() <= codec.max_bytes(100)
    out = codec.decode(payload, torch.empty(100))
    assert torch.equal(out, OneBit().decode(OneBit().encode(sent), torch.empty(100)))
    assert torch.equal(residual, sent - out)


@pytest.mark.parametrize("codec", [PerLayer({"x": "onebit"}), BySize(10**6, None, "onebit")], ids=repr)
def test_a_tensor_alone_that_goes_as_it_is(codec: Codec) -> None:
    sent = torch.randn(100, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(sent)
    assert payload.numel() == codec.max_bytes(100) == 16 + 400
    assert torch.equal(codec.decode(payload, torch.empty(100)), sent)
    with pytest.raises(ProtocolError, match="another codec"):
        OneBit().decode(payload, torch.empty(100))
    with pytest.raises(DivergedError):
        codec.encode(torch.tensor([1.0, float("nan")]))


def test_what_it_says_of_itself_holds_for_any_of_its_choices() -> None:
    mixed, plain = BySize(10, Lossless(), PowerSGD()), BySize(10, None, Lossless())
    assert mixed.traits == CodecTraits(allreducible=True, residual_needs_sum=True)
    assert plain.traits == CodecTraits(biased=False, exact=True)
    assert mixed.keeps_residual
    assert not plain.keeps_residual


def test_the_momentum_of_every_choice_is_checked() -> None:
    check_optimizer_momentum(PerLayer({"a": None, "*": OneBit()}), 0.9)
    with pytest.raises(IncompatibleError, match=r"applies 0\.9 again"):
        check_optimizer_momentum(PerLayer({"a": None, "b": BySize(5, TopK(0.1, momentum=0.9), None)}), 0.9)


@pytest.mark.parametrize("rules", [{}, None, "topk(0.1)", [("*", None)], 3])
def test_rules_that_cannot_be(rules: object) -> None:
    with pytest.raises(SpecError, match="give patterns and their codecs"):
        PerLayer(rules)  # type: ignore[arg-type]


def test_patterns_and_codecs_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="a pattern is a string"):
        PerLayer({3: None})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match=r"per_layer, '\*': unknown codec 'topp'; did you mean 'topk'"):
        PerLayer({"*": "topp(0.1)"})
    with pytest.raises(SpecError, match=r"by_size, large: .*not 3"):
        BySize(3, None, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [0, -1, 1.5, True, "9", None])
def test_thresholds_that_cannot_be(threshold: object) -> None:
    with pytest.raises(SpecError, match="number of elements, at least 1"):
        BySize(threshold, None, "onebit")  # type: ignore[arg-type]


def test_a_chooser_is_no_link_of_a_chain() -> None:
    with pytest.raises(SpecError, match="put the chain inside it"):
        build_codec("topk(0.1)|by_size(10, None, 'onebit')")


def test_the_former_name_of_codec_for_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="codec_for"):
        assert BySize(10, None, "onebit").pick("weight", 10) == OneBit()
