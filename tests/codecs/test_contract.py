"""Every codec keeps the contract: one line each."""

from __future__ import annotations

import pytest

from syncline.codecs import build_codec
from syncline.codecs.base import Codec
from syncline.testing import CodecContract

STEADY = [
    "raw",
    "lossless",
    "quantize(4, stochastic=False)",
    "quantize(3, bucket=100, norm='l2', stochastic=False)",
    "onebit",
    "onebit(64)",
    "topk(0.01)",
    "topk(0.3)",
    "topk(1.0)",
    "topk(16, bucket=512)",
    "topk(0.05, momentum=0.9)",
    "randomk(0.1)",
    "threshold(0.5)",
    "powersgd(1)",
    "powersgd(2)",
    "topk(0.1)|cast('fp16')",
    "topk(0.1)|lossless",
    "topk(0.1)|onebit",
    "randomk(0.1)|cast('fp16')",
    "onebit|lossless",
]
"""The same on every rank, whatever its random bits."""

HALF = ["cast('fp16')", "cast('bf16')", "cast('fp16')|lossless", "cast('bf16')|lossless"]
"""Rounded to nearest, with 8 bits at least."""

STOCHASTIC = [
    "cast('fp16', stochastic=True)",
    "cast('bf16', stochastic=True)",
    "quantize(2)",
    "quantize(4)",
    "quantize(5)",
    "quantize(8)",
    "quantize(4, bucket=100)",
    "quantize(4, norm='l2')",
    "ternary",
    "ternary(clip=2.5)",
    "topk(0.01)|quantize(4)",
    "topk(0.3)|quantize(4)",
    "topk(16, bucket=512)|quantize(4)",
    "topk(0.1)|ternary",
    "topk(0.1)|quantize(4)|lossless",
    "randomk(0.1)|quantize(4)",
    "quantize(4)|lossless",
    "threshold(0.5)|quantize(4)",
]


class TestSteady(CodecContract):
    @pytest.fixture(params=STEADY)
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return _built(request.param)


class TestHalf(CodecContract):
    rounding = 2**-8

    @pytest.fixture(params=HALF)
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return _built(request.param)


class TestStochastic(CodecContract):
    stochastic = True

    @pytest.fixture(params=STOCHASTIC)
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return _built(request.param)


def _built(spec: str) -> Codec:
    codec = build_codec(spec)
    assert codec is not None
    return codec
