"""Which way a compressed bucket takes."""

from __future__ import annotations

import pytest

from syncline.codecs.base import HEADER
from syncline.codecs.quantize import Quantize
from syncline.codecs.raw import Raw
from syncline.codecs.threshold import Threshold
from syncline.codecs.topk import TopK
from syncline.collectives.compressed.cost import choose, codec_advice, expected_density
from syncline.errors import SpecError
from syncline.transports import Link, Network

GIGABIT = Network(latency=50e-6, bandwidth=125e6, per_message=20e-6)
SLOW = Network(latency=200e-6, bandwidth=12.5e6, per_message=20e-6)


def test_two_ranks_gather() -> None:
    for codec in (Raw(), Quantize(4)):
        choice = choose(codec, [1_000_000], GIGABIT, 2)
        assert choice.collective == "gather"
        assert set(choice.seconds) == {"gather", "split"}


def test_many_ranks_with_much_to_send_split() -> None:
    assert choose(Quantize(8), [5_000_000], GIGABIT, 16).collective == "split"
    assert choose(Quantize(4), [1000], GIGABIT, 16).collective == "gather"


def test_the_formulas_of_the_dense_ways() -> None:
    network = Network(latency=1.0, bandwidth=1.0, per_message=0.5, combine=0.25)
    seconds = choose(Raw(), [100], network, 4).seconds
    payload, shard = HEADER.size + 400, HEADER.size + 100
    assert seconds["gather"] == pytest.approx(3 * (1 + 0.5 + payload) + 0.25 * 4 * 4 * 100)
    assert seconds["split"] == pytest.approx((1 + 3 * (0.5 + shard)) + 3 * (1.5 + shard) + 0.25 * 8 * 100)


def test_one_rank_pays_nothing() -> None:
    for codec in (Quantize(4), TopK(0.01)):
        choice = choose(codec, [1000], Network(latency=1.0, bandwidth=1.0), 1)
        assert choice.collective == "gather"
        assert set(choice.seconds.values()) == {0.0}


def test_the_sparse_ways() -> None:
    ways = {"gather", "sparse_doubling", "sparse_split", "sparse_split_dense"}
    choice = choose(TopK(0.01), [1_800_000], SLOW, 2)
    assert set(choice.seconds) == ways
    assert choice.seconds["gather"] == pytest.approx(choice.seconds["sparse_doubling"])
    assert choice.collective == "gather"


def test_little_data_on_many_ranks_doubles() -> None:
    assert choose(TopK(0.001), [20_000], GIGABIT, 64).collective == "sparse_doubling"


def test_much_sparse_data_on_many_ranks_splits() -> None:
    assert choose(TopK(0.02), [50_000_000], SLOW, 32).collective == "sparse_split"


def test_a_sum_that_will_be_dense_travels_dense() -> None:
    choice = choose(TopK(0.1), [4_000_000], SLOW, 32, quantize=Quantize(4))
    assert expected_density(0.1, 32) > 0.9
    assert choice.collective == "sparse_split_dense"
    assert choice.seconds["sparse_split_dense"] < choice.seconds["sparse_split"] / 2


def test_the_dense_phase_costs_what_its_codec_sends() -> None:
    plain = choose(TopK(0.1), [4_000_000], SLOW, 8).seconds["sparse_split_dense"]
    quantized = choose(TopK(0.1), [4_000_000], SLOW, 8, quantize=Quantize(4)).seconds["sparse_split_dense"]
    assert quantized < plain / 2


def test_density_tells_what_a_threshold_sends() -> None:
    unknown = choose(Threshold(1.0), [1_000_000], SLOW, 8)
    sparse = choose(Threshold(1.0), [1_000_000], SLOW, 8, density=0.001)
    assert all(sparse.seconds[way] <= unknown.seconds[way] for way in sparse.seconds)
    assert sparse.seconds["sparse_split"] < unknown.seconds["sparse_split"] / 20
    with pytest.raises(SpecError, match=r"density=1\.5"):
        choose(Threshold(1.0), [1000], SLOW, 8, density=1.5)


def test_ranks_of_one_host_pay_their_own_link() -> None:
    inside = Link(latency=1e-6, bandwidth=10e9)
    hosts = Network(latency=1e-3, bandwidth=1e6, ranks_per_host=4, inside=inside)
    alone = Network(latency=1e-6, bandwidth=10e9)
    assert choose(Raw(), [1000], hosts, 4).seconds == choose(Raw(), [1000], alone, 4).seconds
    assert choose(Raw(), [1000], hosts, 8).seconds["gather"] > 100 * choose(Raw(), [1000], alone, 8).seconds["gather"]


def test_nothing_to_send() -> None:
    for codec in (Raw(), TopK(0.01)):
        choice = choose(codec, [], GIGABIT, 4)
        assert all(0 < seconds < 0.01 for seconds in choice.seconds.values()), "headers travel all the same"


def test_a_codec_that_does_not_pay_is_told() -> None:
    said = codec_advice(0.031, 0.044, "topk(0.01)")
    assert said is not None
    assert "31 ms" in said
    assert "44 ms with topk(0.01)" in said
    assert "codec=None" in said
    assert codec_advice(0.044, 0.031, "topk(0.01)") is None
    assert codec_advice(0.01, 0.01, "raw") is not None, "no gain is no reason"
