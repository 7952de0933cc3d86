"""Described models beside the numbers of torchvision and of the papers."""

from __future__ import annotations

import pytest

from syncline.errors import SpecError
from syncline.planner.models import build_model


@pytest.mark.parametrize(
    ("text", "parameters", "gflops"),
    [
        ("vgg(16)", 138_357_544, 30.94),
        ("vgg(11)", 132_863_336, 15.2),
        ("resnet(50)", 25_557_032, 8.18),
        ("resnet(101)", 44_549_160, 15.6),
        ("resnet(152)", 60_192_808, 23.0),
        ("inception", 23_834_568, 11.4),
        ("mlp([784, 300, 10])", 784 * 300 + 300 + 300 * 10 + 10, 0.000476),
        ('cnn([("conv", 8, 3, 1), ("pool", 2), ("linear", 10)], image=8)', 8 * 27 + 16 + 8 * 16 * 10 + 10, None),
    ],
)
def test_parameters_and_flops(text: str, parameters: int, gflops: float | None) -> None:
    model = build_model(text)
    assert model.parameters == parameters
    if gflops is not None:
        assert model.flops / 1e9 == pytest.approx(gflops, rel=0.01)


def test_flops_of_a_transformer_are_those_of_the_formula() -> None:
    """96·s·L·h²·(1 + s/6h + V/16Lh) with recomputation (Narayanan et al., 2021) is four forwards of the blocks."""
    s, h, layers, v = 2048, 12288, 96, 51200
    model = build_model(f"gpt({layers}, {h}, heads=96)")
    blocks = 24 * s * layers * h**2 * (1 + s / (6 * h))
    assert model.flops == pytest.approx(blocks + 2 * s * h * v)
    assert 4 * blocks + 6 * s * h * v == pytest.approx(96 * s * layers * h**2 * (1 + s / 6 / h + v / 16 / layers / h))
    assert model.parameters == pytest.approx(175e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt(layers=0, hidden=64)", "layers is 0"),
        ("gpt(layers=2, hidden=100, heads=3)", "3 heads do not divide"),
        ("gpt(2, 64, attention='sparse')", "attention is 'sparse'"),
        ("llama(2, 64)", "did you mean 'gpt'"),
        ("resnet(18)", "depth is 18"),
        ("mlp([10])", "write at least two"),
        ('cnn([("dense", 3)])', "layer 0 is"),
        ('cnn([("linear", 3), ("conv", 3, 3)])', "layer 1 is"),
        ("gpt(layers=2, width=64)", "no argument 'width'"),
    ],
)
def test_impossible_models_are_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_model(text)
