"""The all-reduce of payloads that do not sum on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.codecs.base import CodecTraits, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.cast import Cast
from syncline.codecs.lossless import Lossless
from syncline.codecs.onebit import OneBit
from syncline.codecs.quantize import Quantize
from syncline.codecs.raw import Raw
from syncline.codecs.ternary import Ternary
from syncline.collectives.compressed.gather_split import (
    OwnerResiduals,
    gather,
    reclaim_residuals,
    shard_edges,
    shards,
    split,
)
from syncline.collectives.compressed.requests import Reduction
from syncline.errors import DivergedError, ProtocolError
from tests.collectives.compressed.lockstep import failing, lockstep

Way = Literal["gather", "split"]
COMPRESSED_COLLECTIVES: tuple[Way, ...] = ("gather", "split")


@dataclass(frozen=True, repr=False)
class Coarse(PayloadCodec):
    """Whole numbers from −100 to 100, a byte each: loses what is between and beyond."""

    name: ClassVar[str] = "coarse"
    codec_id: ClassVar[int] = 200

    def body_bytes(self, numel: int, step: int = 0) -> int:
        return numel

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        whole = part.flat if part.residual is None else part.residual + part.flat
        levels = whole.round().clamp(-100, 100)
        if part.residual is not None:
            part.residual.copy_(whole - levels)
        body.view(torch.int8).copy_(levels)
        return body.numel()

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        out.copy_(body.view(torch.int8) + (out if accumulate else 0))


@dataclass(frozen=True, repr=False)
class Trimmed(Raw):
    """Exact, without the zeros at the end: its length varies."""

    name: ClassVar[str] = "trimmed"
    codec_id: ClassVar[int] = 201

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(biased=False, exact=True, fixed_length=False)

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        places = part.flat.nonzero()
        used = 4 * (int(places.max()) + 1 if len(places) else 0)
        body[:used] = part.flat.view(torch.uint8)[:used]
        return used

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        values = torch.zeros(out.numel())
        values.view(torch.uint8)[: body.numel()] = body
        out.copy_(values + out if accumulate else values)


@dataclass(frozen=True, repr=False)
class Listening(Raw):
    """Exact; records the keys it was called with."""

    heard: ClassVar[list[RngKey]] = []

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        self.heard.append(rng)
        return super().write(part, body, rng)


class Ranks:
    """Some ranks with the same parameters."""

    def __init__(self, codec: PayloadCodec, way: Way, size: int, sizes: tuple[int, ...] = (1500, 3, 2000)) -> None:
        self.codec, self.way, self.size, self.sizes = codec, way, size, sizes
        self.residuals = [[torch.zeros(numel) for numel in sizes] for _ in range(size)]
        self.owned: list[OwnerResiduals] = [{} for _ in range(size)]
        self.step = 0

    def parts(self, rank: int, flats: list[Tensor]) -> list[TensorSlice]:
        kept = self.residuals[rank] if self.codec.keeps_residual else [None] * len(flats)
        return [
            TensorSlice(flat, f"p{index}", residual=left)
            for index, (flat, left) in enumerate(zip(flats, kept, strict=True))
        ]

    def reduction(self, rank: int, flats: list[Tensor]) -> Reduction[Tensor]:
        parts, rng = self.parts(rank, flats), RngKey(3, self.step, rank)
        extra = torch.tensor([rank, 7, 9], dtype=torch.uint8)
        if self.way == "gather":
            return gather(self.codec, parts, rng, self.size, extra)
        return split(self.codec, parts, rng, self.size, extra, self.owned[rank])

    def reductions(self, inputs: list[list[Tensor]]) -> list[Reduction[Tensor]]:
        self.step += 1
        return [self.reduction(rank, flats) for rank, flats in enumerate(inputs)]

    def whole_numbers(self, seed: int = 0) -> list[list[Tensor]]:
        source = torch.Generator().manual_seed(seed)
        return [
            [torch.randint(-9, 10, (numel,), generator=source).float() for numel in self.sizes]
            for _ in range(self.size)
        ]

    def fractions(self, seed: int) -> list[list[Tensor]]:
        source = torch.Generator().manual_seed(seed)
        return [[torch.randn(numel, generator=source) * 3 for numel in self.sizes] for _ in range(self.size)]

    def left(self) -> list[Tensor]:
        """What no rank has sent yet, by parameter."""
        total = [torch.zeros(numel, dtype=torch.float64) for numel in self.sizes]
        for index, each in enumerate(total):
            for rank in range(self.size):
                each += self.residuals[rank][index]
        for owned in self.owned:
            for (name, start), residual in owned.items():
                total[int(name[1:])][start : start + residual.numel()] += residual
        return total


def summed(inputs: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(flats).double().sum(0) for flats in zip(*inputs, strict=True)]


def check_same(inputs: list[list[Tensor]]) -> None:
    for flats in inputs[1:]:
        for mine, first in zip(flats, inputs[0], strict=True):
            assert torch.equal(mine.view(torch.int32), first.view(torch.int32))


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("codec", [Raw(), Coarse(), Trimmed()], ids=repr)
@pytest.mark.parametrize("way", COMPRESSED_COLLECTIVES)
def test_every_rank_has_the_exact_sum_of_whole_numbers(way: Way, codec: PayloadCodec, size: int) -> None:
    ranks = Ranks(codec, way, size)
    inputs = ranks.whole_numbers()
    expected = summed(inputs)
    run = lockstep(ranks.reductions(inputs))
    for flats in inputs:
        for flat, want in zip(flats, expected, strict=True):
            assert torch.equal(flat.double(), want)
    for extras in run.results:
        assert extras.tolist() == [[rank, 7, 9] for rank in range(size)]


@pytest.mark.parametrize(
    ("way", "codec", "rounds"),
    [
        ("gather", Coarse(), ["AllGatherRequest"]),
        ("gather", Trimmed(), ["AllGatherRequest", "AllGatherRequest"]),
        ("split", Coarse(), ["AllToAllRequest", "AllGatherRequest"]),
        ("split", Trimmed(), ["AllGatherRequest", "AllToAllRequest", "AllGatherRequest", "AllGatherRequest"]),
    ],
)
def test_few_rounds(way: Way, codec: PayloadCodec, rounds: list[str]) -> None:
    ranks = Ranks(codec, way, 4)
    assert lockstep(ranks.reductions(ranks.whole_numbers())).rounds == rounds


def test_split_sends_two_payloads_and_gather_one_to_each() -> None:
    size, numel = 8, 16 * 1024
    sent = {}
    for way in COMPRESSED_COLLECTIVES:
        ranks = Ranks(Coarse(), way, size, (numel,))
        sent[way] = max(lockstep(ranks.reductions(ranks.whole_numbers())).sent)
    assert (size - 1) * numel <= sent["gather"] < (size - 1) * (numel + 64)
    assert sent["split"] < 2 * (numel + size * 64)


def test_a_varying_length_is_paid_for_as_it_is() -> None:
    ranks = Ranks(Trimmed(), "gather", 2, (10_000,))
    inputs = [[torch.zeros(10_000)], [torch.zeros(10_000)]]
    inputs[1][0][9] = 5.0
    assert max(lockstep(ranks.reductions(inputs)).sent) < 128
    assert inputs[0][0].nonzero().tolist() == [[9]]


@pytest.mark.parametrize("way", COMPRESSED_COLLECTIVES)
def test_ranks_hold_the_same_bits_where_the_codec_loses_some(way: Way) -> None:
    ranks = Ranks(Coarse(), way, 5)
    inputs = ranks.fractions(1)
    lockstep(ranks.reductions(inputs))
    check_same(inputs)


def test_the_own_payload_is_decoded_like_the_others() -> None:
    ranks = Ranks(Coarse(), "gather", 3, (2,))
    inputs = [[torch.tensor([0.4, 1.6])] for _ in range(3)]
    lockstep(ranks.reductions(inputs))
    assert [flats[0].tolist() for flats in inputs] == [[0.0, 6.0]] * 3


@pytest.mark.parametrize("way", COMPRESSED_COLLECTIVES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_was_given_is_what_came_out_and_what_is_left(way: Way, size: int) -> None:
    ranks = Ranks(Coarse(), way, size)
    given = [torch.zeros(numel, dtype=torch.float64) for numel in ranks.sizes]
    came = [torch.zeros(numel, dtype=torch.float64) for numel in ranks.sizes]
    for step in range(30):
        inputs = ranks.fractions(step)
        inputs[0][0][:5] *= 40  # beyond what the codec, and the owner's sum, can say at once
        for total, each in zip(given, summed(inputs), strict=True):
            total += each
        lockstep(ranks.reductions(inputs))
        check_same(inputs)
        for total, flat in zip(came, inputs[0], strict=True):
            total += flat
    for want, got, left in zip(given, came, ranks.left(), strict=True):
        torch.testing.assert_close(got + left, want, rtol=0, atol=1e-3)
        assert float((got - want).abs().max()) > 1e-2, "nothing was lost: the test tests nothing"


@pytest.mark.parametrize(
    "codec",
    [
        Quantize(4, feedback=True),
        OneBit(),
        Ternary(clip=2.5),
        Lossless(),
        Cast("fp16", feedback=True),
        Quantize(2, feedback=True) | Lossless(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("way", COMPRESSED_COLLECTIVES)
def test_with_the_codecs_that_there_are(way: Way, codec: PayloadCodec) -> None:
    ranks = Ranks(codec, way, 3)
    given_in, came = torch.zeros(1500, dtype=torch.float64), torch.zeros(1500, dtype=torch.float64)
    for step in range(10):
        inputs = ranks.fractions(step)
        given_in += summed(inputs)[0]
        run = lockstep(ranks.reductions(inputs))
        assert run.results[0].tolist() == [[0, 7, 9], [1, 7, 9], [2, 7, 9]]
        check_same(inputs)
        came += inputs[0][0]
    torch.testing.assert_close(came + ranks.left()[0], given_in, rtol=0, atol=1e-3)


def test_other_cuts_in_the_middle_lose_nothing() -> None:
    given, came = torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64)
    ranks = Ranks(Coarse(), "split", 3, (5000,))
    for step in range(8):
        inputs = ranks.fractions(step)
        for flats in inputs:
            flats[0][2000:2100] += 90  # the owner's sum is beyond the codec: it keeps a residual
        given += summed(inputs)[0]
        if step >= 4:  # the same parameter, now in one bucket with another: its shards begin elsewhere
            for flats in inputs:
                flats.insert(0, torch.zeros(3000))
        extra = torch.zeros(0, dtype=torch.uint8)
        reductions = []
        for rank, flats in enumerate(inputs):
            parts = [TensorSlice(flat, "before") for flat in flats[:-1]]
            parts.append(TensorSlice(flats[-1], "p0", residual=ranks.residuals[rank][0]))
            reductions.append(split(Coarse(), parts, RngKey(0, step, rank), 3, extra, ranks.owned[rank]))
        lockstep(reductions)
        came += inputs[0][-1]
        for owned in ranks.owned:
            for key in [key for key in owned if key[0] == "before"]:
                assert not owned.pop(key).any()
        assert any(residual.any() for owned in ranks.owned for residual in owned.values())
    torch.testing.assert_close(came + ranks.left()[0], given, rtol=0, atol=1e-2)


def test_settling_leaves_the_pieces_of_other_buckets_alone() -> None:
    owned = {("a", 0): torch.ones(4), ("b", 0): torch.ones(4), ("a", 4): torch.ones(2)}
    part = TensorSlice(torch.zeros(10), "a")
    reclaim_residuals(owned, [part], [TensorSlice(part.flat[:4], "a")])
    assert set(owned) == {("a", 0), ("b", 0)}
    assert part.flat.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_the_second_encoding_has_other_random_bits() -> None:
    Listening.heard.clear()
    ranks = Ranks(Listening(), "split", 3, (4096,))
    lockstep(ranks.reductions(ranks.whole_numbers()))
    keys = {(rng.key, rng.start) for rng in Listening.heard}
    assert len(Listening.heard) == 3 * 3 + 3
    assert len(keys) == len(Listening.heard)


def test_a_sum_that_overflows_is_told_to_all() -> None:
    ranks = Ranks(Raw(), "split", 3, (4096,))
    inputs = [[torch.full((4096,), 3e38)] for _ in range(3)]
    run = failing(ranks.reductions(inputs))
    assert [type(result) for result in run.results] == [DivergedError] * 3
    assert len({str(result) for result in run.results}) == 1
    assert "ranks [0, 1, 2]" in str(run.results[0])


@pytest.mark.parametrize("way", COMPRESSED_COLLECTIVES)
def test_a_length_that_cannot_be_names_the_rank(way: Way) -> None:
    def lie(rank: int, answer: Any) -> Any:
        answer = answer.clone()
        answer[1, :8] = 255
        return answer

    ranks = Ranks(Trimmed(), way, 2)
    with pytest.raises(ProtocolError, match="rank 1 announces a payload of -1 B") as caught:
        lockstep(ranks.reductions(ranks.whole_numbers()), lie)
    assert caught.value.peer == 1


@pytest.mark.parametrize("way", COMPRESSED_COLLECTIVES)
def test_another_codecs_payload_is_refused(way: Way) -> None:
    mine, other = Ranks(Raw(), way, 2, (8,)), Ranks(Raw(), way, 2, (8,))
    inputs = mine.whole_numbers()
    other.codec = type("Foreign", (Raw,), {"codec_id": 203})()
    with pytest.raises(ProtocolError, match="from rank 1 is of another codec"):
        lockstep([mine.reduction(0, inputs[0]), other.reduction(1, inputs[1])])


@given(st.lists(st.integers(0, 5000), max_size=5), st.integers(1, 9))
def test_every_element_has_one_owner(sizes: list[int], size: int) -> None:
    parts = [
        TensorSlice(torch.zeros(numel), str(index), residual=torch.zeros(numel)) for index, numel in enumerate(sizes)
    ]
    for shard in shards(parts, size):
        for piece in shard:
            piece.flat += 1
            assert piece.residual is not None
            piece.residual += 1
    for part in parts:
        assert bool((part.flat == 1).all())
        assert part.residual is not None
        assert bool((part.residual == 1).all())
    cuts = shard_edges(sum(sizes), size)
    assert all(cut % 1024 == 0 for cut in cuts[:-1])
    assert max(b - a for a, b in pairwise(cuts)) <= sum(sizes) / size + 1024
