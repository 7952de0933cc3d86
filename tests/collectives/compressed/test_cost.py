"""Which way a compressed bucket takes."""

from __future__ import annotations

import pytest

from syncline.codecs.base import HEADER
from syncline.codecs.quantize import Quantize
from syncline.codecs.raw import Raw
from syncline.codecs.topk import TopK
from syncline.collectives.compressed.cost import predict_collectives
from syncline.transports import Link, Network

GIGABIT = Network(latency=50e-6, bandwidth=125e6, per_message=20e-6)
SLOW = Network(latency=200e-6, bandwidth=12.5e6, per_message=20e-6)


def fastest(seconds: dict[str, float]) -> str:
    return min(seconds, key=lambda name: seconds[name])


def test_two_ranks_gather() -> None:
    for codec in (Raw(), Quantize(4)):
        seconds = predict_collectives(codec, [1_000_000], GIGABIT, 2)
        assert fastest(seconds) == "gather"
        assert set(seconds) == {"gather", "split"}


def test_many_ranks_with_much_to_send_split() -> None:
    assert fastest(predict_collectives(Quantize(8), [5_000_000], GIGABIT, 16)) == "split"
    assert fastest(predict_collectives(Quantize(4), [1000], GIGABIT, 16)) == "gather"


def test_the_formulas_of_the_dense_ways() -> None:
    network = Network(latency=1.0, bandwidth=1.0, per_message=0.5, combine=0.25)
    seconds = predict_collectives(Raw(), [100], network, 4)
    payload, shard = HEADER.size + 400, HEADER.size + 100
    assert seconds["gather"] == pytest.approx(3 * (1 + 0.5 + payload) + 0.25 * 4 * 4 * 100)
    assert seconds["split"] == pytest.approx((1 + 3 * (0.5 + shard)) + 3 * (1.5 + shard) + 0.25 * 8 * 100)


def test_one_rank_pays_nothing() -> None:
    for codec in (Quantize(4), TopK(0.01)):
        seconds = predict_collectives(codec, [1000], Network(latency=1.0, bandwidth=1.0), 1)
        assert fastest(seconds) == "gather"
        assert set(seconds.values()) == {0.0}


def test_the_sparse_ways() -> None:
    ways = {"gather", "sparse_doubling", "sparse_split", "sparse_split_dense"}
    seconds = predict_collectives(TopK(0.01), [1_800_000], SLOW, 2)
    assert set(seconds) == ways
    assert seconds["gather"] == pytest.approx(seconds["sparse_doubling"])
    assert fastest(seconds) == "gather"


def test_little_data_on_many_ranks_doubles() -> None:
    assert fastest(predict_collectives(TopK(0.001), [20_000], GIGABIT, 64)) == "sparse_doubling"


def test_much_sparse_data_on_many_ranks_splits() -> None:
    assert fastest(predict_collectives(TopK(0.02), [50_000_000], SLOW, 32)) == "sparse_split"


def test_a_sum_that_will_be_dense_travels_dense() -> None:
    seconds = predict_collectives(TopK(0.1), [4_000_000], SLOW, 32, quantize=Quantize(4))
    assert fastest(seconds) == "sparse_split_dense"
    assert seconds["sparse_split_dense"] < seconds["sparse_split"] / 2


def test_the_dense_phase_costs_what_its_codec_sends() -> None:
    plain = predict_collectives(TopK(0.1), [4_000_000], SLOW, 8)["sparse_split_dense"]
    quantized = predict_collectives(TopK(0.1), [4_000_000], SLOW, 8, quantize=Quantize(4))["sparse_split_dense"]
    assert quantized < plain / 2


def test_ranks_of_one_host_pay_their_own_link() -> None:
    inside = Link(latency=1e-6, bandwidth=10e9)
    hosts = Network(latency=1e-3, bandwidth=1e6, ranks_per_host=4, inside=inside)
    alone = Network(latency=1e-6, bandwidth=10e9)
    assert predict_collectives(Raw(), [1000], hosts, 4) == predict_collectives(Raw(), [1000], alone, 4)
    assert (
        predict_collectives(Raw(), [1000], hosts, 8)["gather"]
        > 100 * predict_collectives(Raw(), [1000], alone, 8)["gather"]
    )


def test_nothing_to_send() -> None:
    for codec in (Raw(), TopK(0.01)):
        seconds = predict_collectives(codec, [], GIGABIT, 4)
        assert all(0 < seconds < 0.01 for seconds in seconds.values()), "headers travel all the same"
