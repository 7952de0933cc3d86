"""Predicted time of a step with a codec and without it."""

from __future__ import annotations

import torch
from torch import nn

import syncline as sl
from syncline.codecs import Codec
from syncline.reduction import Communicator
from syncline.reduction.codec_cost import codec_advice, compressed_seconds, dense_seconds, slowdown_warning

SLOW = sl.Network(latency=1e-3, bandwidth=1e6)


def seconds(codec: Codec) -> tuple[float, float]:
    """Predicted seconds of a gradient of a million elements on a slow network: unencoded, and with a codec."""

    def case(world: sl.World) -> tuple[float, float]:
        communicator = Communicator(world, "auto", codec)
        parameter = nn.Parameter(torch.zeros(1000, 1000))
        buckets: list[tuple[Codec, list[nn.Parameter]]] = [(codec, [parameter])]
        communicator.prepare_compressed([(codec, (1_000_000,))])
        assert slowdown_warning(communicator, buckets) is None, "time is simulated"
        sending, _ = compressed_seconds(communicator, buckets)
        return dense_seconds(communicator, [parameter.nbytes]), sending

    results: tuple[tuple[float, float], ...] = sl.simulate(case, ranks=2, network=SLOW).results
    assert results[0] == results[1]
    return results[0]


def test_a_payload_that_is_a_hundred_times_smaller_is_faster() -> None:
    dense, encoded = seconds(sl.codecs.TopK(0.001))
    assert encoded < dense / 20


def test_half_precision_takes_half_the_time() -> None:
    dense, encoded = seconds(sl.codecs.Cast("fp16"))
    assert 0.45 < encoded / dense < 0.6


def test_a_codec_that_does_not_pay_is_told() -> None:
    said = codec_advice(0.031, 0.044, "topk(0.01)")
    assert said is not None
    assert "31 ms" in said
    assert "44 ms with topk(0.01)" in said
    assert "codec=None" in said
    assert codec_advice(0.044, 0.031, "topk(0.01)") is None
    assert codec_advice(0.01, 0.01, "raw") is not None, "no gain is no reason"
