"""SparCML's sparse all-reduce: the same sum on every rank, whatever the ranks have chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice, pack, unpack
from syncline.codecs.quantize import Quantize
from syncline.codecs.randomk import RandomK
from syncline.codecs.raw import Raw
from syncline.codecs.threshold import Threshold
from syncline.codecs.topk import TopK
from syncline.collectives.compressed.gather_split import OwnerResiduals, gather
from syncline.collectives.compressed.requests import Reduction
from syncline.collectives.compressed.sparse import (
    DENSE,
    SPARSE,
    TRAILER,
    SparseStream,
    max_sparse_count,
    sparse_doubling,
    sparse_split,
    sparse_split_dense,
    stream_bytes,
)
from syncline.errors import DivergedError, IncompatibleError, ProtocolError
from tests.collectives.compressed.lockstep import failing, lockstep
from tests.pairwise import parametrize_pairwise

CompressedCollective = Literal["gather", "doubling", "split", "split_dense"]
COMPRESSED_COLLECTIVES: tuple[CompressedCollective, ...] = ("gather", "doubling", "split", "split_dense")
ANY = Threshold(0.5, feedback=False)
"""Sends every whole number but 0, exactly."""


def cut(whole: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The parameters of a bucket, as views."""
    return [whole[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]


class Ranks:
    """Some ranks with the same parameters."""

    def __init__(
        self,
        codec: PayloadCodec,
        way: CompressedCollective,
        size: int,
        sizes: tuple[int, ...] = (1700, 0, 3, 2500),
        quantize: PayloadCodec | None = None,
    ) -> None:
        self.codec, self.way, self.size, self.sizes, self.quantize = codec, way, size, sizes, quantize
        self.residuals = [[torch.zeros(numel) for numel in sizes] for _ in range(size)]
        self.owned: list[OwnerResiduals] = [{} for _ in range(size)]
        self.memories: list[list[dict[str, Tensor]]] = [[{} for _ in sizes] for _ in range(size)]
        self.step = 0

    def parts(self, rank: int, whole: Tensor) -> list[TensorSlice]:
        flats = cut(whole, self.sizes)
        kept = self.residuals[rank] if self.codec.keeps_residual else [None] * len(flats)
        return [
            TensorSlice(flat, f"p{index}", residual=kept[index], memory=self.memories[rank][index])
            for index, flat in enumerate(flats)
        ]

    def reduction(self, rank: int, whole: Tensor) -> Reduction[Tensor]:
        parts, rng = self.parts(rank, whole), RngKey(3, self.step, rank)
        extra = torch.tensor([rank, 7, 9], dtype=torch.uint8)
        if self.way == "gather":
            return gather(self.codec, parts, rng, self.size, extra)
        if self.way == "doubling":
            return sparse_doubling(self.codec, parts, rng, self.size, extra)
        if self.way == "split":
            return sparse_split(self.codec, parts, rng, self.size, extra)
        return sparse_split_dense(self.codec, parts, rng, self.size, extra, self.owned[rank], self.quantize)

    def reductions(self, inputs: list[Tensor]) -> list[Reduction[Tensor]]:
        self.step += 1
        return [self.reduction(rank, whole) for rank, whole in enumerate(inputs)]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def fractions(self, seed: int) -> list[Tensor]:
        source = torch.Generator().manual_seed(seed)
        return [torch.randn(self.numel, generator=source) for _ in range(self.size)]

    def left(self) -> Tensor:
        """What no rank has sent yet."""
        total = torch.stack([torch.cat(kept) for kept in self.residuals]).double().sum(0)
        pieces = cut(total, self.sizes)
        for owned in self.owned:
            for (name, start), residual in owned.items():
                pieces[int(name[1:])][start : start + residual.numel()] += residual
        return total


def check_same(inputs: list[Tensor]) -> None:
    for whole in inputs[1:]:
        assert torch.equal(whole.view(torch.int32), inputs[0].view(torch.int32))


def chosen(kind: str, size: int, numel: int) -> list[Tensor]:
    """Whole numbers at the places that each rank has chosen."""
    source = torch.Generator().manual_seed(size)
    found = []
    for rank in range(size):
        whole = torch.zeros(numel)
        values = torch.randint(1, 50, (numel,), generator=source).float()
        if kind == "disjoint":
            where = torch.arange(rank, numel, size * 9)
        elif kind == "identical":
            where = torch.arange(5, numel, 31)
        elif kind == "empty":
            where = torch.arange(0)
        elif kind == "one has some":
            where = torch.arange(3 if rank == size - 1 else numel, numel, 11)
        elif kind == "one shared":
            where = torch.tensor([rank, 77, numel - 1 - rank])
        else:
            where = torch.randperm(numel, generator=source)[: numel // 7]
        whole[where] = values[where]
        found.append(whole)
    return found


KINDS = ("disjoint", "identical", "empty", "one has some", "one shared", "random: dense in the end")


@parametrize_pairwise(way=COMPRESSED_COLLECTIVES, kind=KINDS, size=range(1, 10))
def test_the_sum_is_the_dense_sum(way: CompressedCollective, kind: str, size: int) -> None:
    ranks = Ranks(ANY, way, size)
    inputs = chosen(kind, size, ranks.numel)
    expected = torch.stack(inputs).sum(0)
    run = lockstep(ranks.reductions(inputs))
    for whole in inputs:
        assert torch.equal(whole, expected)
    for extras in run.results:
        assert extras.tolist() == [[rank, 7, 9] for rank in range(size)]


@pytest.mark.parametrize("way", COMPRESSED_COLLECTIVES)
def test_an_overlap_at_one_index_sums(way: CompressedCollective) -> None:
    ranks = Ranks(ANY, way, 3, (10,))
    inputs = [torch.zeros(10) for _ in range(3)]
    for rank, whole in enumerate(inputs):
        whole[4] = 10.0**rank
        whole[rank] = 5.0
    lockstep(ranks.reductions(inputs))
    assert [whole.tolist() for whole in inputs] == [[5, 5, 5, 0, 111, 0, 0, 0, 0, 0]] * 3


def kinds_of(ranks: Ranks, inputs: list[Tensor], numel: int) -> list[set[int]]:
    """Which kinds of bodies arrive, round by round."""
    seen: list[set[int]] = []

    def look(rank: int, answer: Any) -> Any:
        if rank == 0:
            seen.append(set())
        rows = answer if answer.dim() == 2 else answer.view(1, -1)
        for row in rows if rows.shape[1] >= 16 else ():
            seen[-1].add(int(row[-TRAILER.size + 8]))
        return answer

    lockstep(ranks.reductions(inputs), look)
    return seen


def test_a_sum_becomes_dense_above_delta() -> None:
    numel = 4096
    inputs = [torch.zeros(numel) for _ in range(8)]
    for rank, whole in enumerate(inputs):
        whole[rank::10] = rank + 1.0
    assert 2 * 410 < max_sparse_count(numel) < 8 * 409
    expected = torch.stack(inputs).sum(0)
    seen = kinds_of(Ranks(ANY, "doubling", 8, (numel,)), inputs, numel)
    assert seen[1] == {SPARSE}, "the sum of two ranks is a stream"
    assert (seen[2], len(seen)) == ({SPARSE if max_sparse_count(numel) >= 4 * 410 else DENSE}, 3)
    check_same(inputs)
    assert torch.equal(inputs[0], expected)


def test_ranks_of_which_some_are_dense_and_some_sparse_agree() -> None:
    numel = 4096
    inputs = [torch.zeros(numel) for _ in range(8)]
    for rank, whole in enumerate(inputs[:4]):
        whole[rank::5] = rank + 1.0
    inputs[6][17] = inputs[7][17] = 3.0
    expected = torch.stack(inputs).sum(0)
    seen = kinds_of(Ranks(ANY, "doubling", 8, (numel,)), inputs, numel)
    assert seen[2] == {SPARSE, DENSE}
    check_same(inputs)
    assert torch.equal(inputs[0], expected)


def test_shards_turn_dense_each_for_itself() -> None:
    numel = 4096
    inputs = [torch.zeros(numel) for _ in range(4)]
    for rank, whole in enumerate(inputs):
        whole[rank:1024:5] = rank + 1.0  # the first shard ends with four fifths of its elements
        whole[2000] = 1.0
    expected = torch.stack(inputs).sum(0)
    seen = kinds_of(Ranks(ANY, "split", 4, (numel,)), inputs, numel)
    assert seen[-1] == {SPARSE, DENSE}
    check_same(inputs)
    assert torch.equal(inputs[0], expected)


@parametrize_pairwise(
    codec=[TopK(0.03), TopK(16, bucket=512), TopK(0.05) | Quantize(4), Threshold(2.0), TopK(0.9), RandomK(0.1)],
    size=[2, 5, 8],
    way=COMPRESSED_COLLECTIVES,
)
def test_all_ranks_decode_the_same_bits(way: CompressedCollective, size: int, codec: PayloadCodec) -> None:
    ranks, again = Ranks(codec, way, size), Ranks(codec, way, size)
    inputs = ranks.fractions(size)
    expected = torch.zeros(ranks.numel, dtype=torch.float64)
    for rank, whole in enumerate(inputs):
        said = torch.empty(ranks.numel)
        payload = pack(codec, again.parts(rank, whole.clone()), RngKey(3, 1, rank))
        unpack(codec, payload, cut(said, ranks.sizes), False, step=1)
        expected += said
    lockstep(ranks.reductions(inputs))
    check_same(inputs)
    torch.testing.assert_close(inputs[0].double(), expected, rtol=1e-5, atol=1e-5)
    for mine, kept in zip(ranks.residuals, again.residuals, strict=True):
        assert torch.equal(torch.cat(mine), torch.cat(kept)), "the way has no part in what is left"


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    ("way", "codec", "quantize"),
    [
        ("gather", TopK(0.02), None),
        ("doubling", TopK(0.02), None),
        ("doubling", TopK(0.02, warmup=9) | Quantize(4), None),
        ("split", TopK(16, bucket=512), None),
        ("split", TopK(0.02) | Quantize(4), None),
        ("split_dense", TopK(0.02, warmup=9), None),
        ("split_dense", TopK(0.1), Quantize(4, feedback=True)),
    ],
    ids=str,
)
def test_what_was_given_is_what_came_out_and_what_is_left(
    way: CompressedCollective, codec: PayloadCodec, quantize: PayloadCodec | None, size: int
) -> None:
    ranks = Ranks(codec, way, size, quantize=quantize)
    given_in, came = torch.zeros(ranks.numel, dtype=torch.float64), torch.zeros(ranks.numel, dtype=torch.float64)
    for step in range(30):
        inputs = ranks.fractions(step)
        given_in += torch.stack(inputs).double().sum(0)
        lockstep(ranks.reductions(inputs))
        check_same(inputs)
        came += inputs[0]
    assert any(owned for owned in ranks.owned) == (quantize is not None)
    torch.testing.assert_close(came + ranks.left(), given_in, rtol=0, atol=2e-3)
    assert float(ranks.left().abs().max()) > 1, "nothing was held back: the test tests nothing"


@pytest.mark.parametrize(
    ("way", "size", "rounds"),
    [
        ("doubling", 1, []),
        ("doubling", 2, ["SendRecvRequest"]),
        ("doubling", 8, ["SendRecvRequest"] * 3),
        ("doubling", 5, ["SendRecvRequest"] * 4),
        ("split", 8, ["AllGatherRequest", "AllToAllRequest", "AllGatherRequest"]),
        ("split_dense", 8, ["AllGatherRequest", "AllToAllRequest", "AllGatherRequest"]),
    ],
)
def test_few_rounds(way: CompressedCollective, size: int, rounds: list[str]) -> None:
    ranks = Ranks(TopK(0.01), way, size, (20_000,))
    assert lockstep(ranks.reductions(ranks.fractions(0))).rounds == rounds


def test_large_sums_are_asked_for_their_length_first() -> None:
    ranks = Ranks(ANY, "split", 4, (80_000,))
    inputs = chosen("identical", 4, 80_000 // 31 * 31)
    inputs = [torch.cat([whole, torch.zeros(80_000 - whole.numel())]) for whole in inputs]
    for whole in inputs:
        whole[:20_000:3] = 1.0
    expected = torch.stack(inputs).sum(0)
    run = lockstep(ranks.reductions(inputs))
    assert run.rounds == ["AllGatherRequest", "AllToAllRequest", "AllGatherRequest", "AllGatherRequest"]
    assert torch.equal(inputs[3], expected)


def test_a_split_sends_less_than_a_gather_where_ranks_are_many() -> None:
    sent = {}
    for way in COMPRESSED_COLLECTIVES:
        ranks = Ranks(TopK(0.01), way, 9, (120_000,))
        source = ranks.fractions(0)
        same = [source[0] + 0.01 * whole for whole in source]  # much the same places on every rank
        sent[way] = max(lockstep(ranks.reductions(same)).sent)
    assert sent["split"] < sent["gather"] / 2
    assert sent["doubling"] < sent["gather"]
    assert sent["split_dense"] > sent["split"]


@pytest.mark.parametrize("way", ["doubling", "split", "split_dense"])
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_a_sum_that_overflows_is_told_to_all(way: CompressedCollective, size: int) -> None:
    ranks = Ranks(ANY, way, size, (5000,))
    inputs = [torch.zeros(5000) for _ in range(size)]
    inputs[1][40] = inputs[2][40] = 3e38
    run = failing(ranks.reductions(inputs))
    assert [type(result) for result in run.results] == [DivergedError] * size


@pytest.mark.parametrize("way", ["doubling", "split", "split_dense"])
def test_a_dense_codec_is_refused(way: CompressedCollective) -> None:
    with pytest.raises(IncompatibleError, match="raw does not choose elements"):
        lockstep([Ranks(Raw(), way, 2).reduction(rank, torch.zeros(4203)) for rank in range(2)])


def test_another_codecs_payload_names_the_rank() -> None:
    mine, other = Ranks(TopK(0.1), "doubling", 2, (4000,)), Ranks(TopK(0.2), "doubling", 2, (4000,))
    other.codec = TopK(0.1, momentum=0.5)
    with pytest.raises(ProtocolError, match=r"from rank 1.*another codec or bucket") as caught:
        lockstep([mine.reduction(0, torch.randn(4000)), other.reduction(1, torch.randn(4000))])
    assert caught.value.peer == 1


@pytest.mark.parametrize("way", ["split", "split_dense"])
def test_a_stream_over_other_elements_names_the_rank(way: CompressedCollective) -> None:
    def enlarge(rank: int, answer: Any) -> Any:
        if answer.numel() > 100:  # streams, not counts
            answer = answer.clone()
            answer[1, 4] += 1
        return answer

    ranks = Ranks(TopK(0.1), way, 2, (4096,))
    with pytest.raises(ProtocolError, match=r"2048 are expected \(from rank 1\)") as caught:
        lockstep(ranks.reductions(ranks.fractions(0)), enlarge)
    assert caught.value.peer == 1


def flipped(source: torch.Generator, size: int) -> Callable[[int, Any], Any]:
    """Changes some bytes of one rank's answer in one round."""
    victim = int(torch.randint(size, (1,), generator=source))
    wait = int(torch.randint(4, (1,), generator=source))
    rounds = [0]

    def meddle(rank: int, answer: Any) -> Any:
        if rank != victim:
            return answer
        rounds[0] += 1
        if rounds[0] != wait + 1 or not answer.numel():
            return answer
        answer = answer.clone()
        row = answer.view(-1)
        many = int(torch.randint(1, 6, (1,), generator=source))
        places = torch.randint(row.numel(), (many,), generator=source)
        if many == 5 and answer.dim() == 1:
            return answer[: int(places[0])]
        row[places] = torch.randint(256, (many,), generator=source).to(torch.uint8)
        return answer

    return meddle


@pytest.mark.parametrize("way", ["doubling", "split", "split_dense"])
@pytest.mark.parametrize("codec", [TopK(0.05), Threshold(1.5)], ids=repr)
def test_broken_bytes_are_a_protocol_error_or_numbers(way: CompressedCollective, codec: PayloadCodec) -> None:
    source = torch.Generator().manual_seed(5)
    caught = 0
    for attempt in range(45):
        size = 2 + attempt % 3
        ranks = Ranks(codec, way, size, (700, 50))
        inputs = ranks.fractions(attempt)
        try:
            lockstep(ranks.reductions(inputs), flipped(source, size))
        except (ProtocolError, DivergedError):
            caught += 1
        except AssertionError as error:  # the others wait for the rank that has raised
            assert "ranks have ended" in str(error) or "ask for different things" in str(error)  # noqa: PT017
            caught += 1
        except RuntimeError as error:  # a table that this rank alone has read wrong: its rows are of another length
            assert "stack expects" in str(error)  # noqa: PT017
            caught += 1
        else:
            assert all(bool(torch.isfinite(whole).all()) for whole in inputs)
    assert caught > 6


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_supports_on_any_number_of_ranks(data: st.DataObject) -> None:
    size, numel = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 60))
    cut = data.draw(st.integers(0, numel))
    rows = data.draw(
        st.lists(st.lists(st.integers(-3, 3), min_size=numel, max_size=numel), min_size=size, max_size=size)
    )
    for way in COMPRESSED_COLLECTIVES:
        inputs = [torch.tensor(row, dtype=torch.float32) for row in rows]
        expected = torch.stack(inputs).sum(0)
        lockstep(Ranks(ANY, way, size, (cut, numel - cut)).reductions(inputs))
        for whole in inputs:
            assert torch.equal(whole, expected)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_more_elements_never_need_less_room(numel: int, a: int, b: int) -> None:
    low, high = sorted((min(a, numel), min(b, numel)))
    assert stream_bytes(numel, low) <= stream_bytes(numel, high)
    where = torch.arange(low, dtype=torch.int32)
    if low <= max_sparse_count(numel):
        packed = SparseStream(numel, where, torch.ones(low)).to_bytes()
        assert packed.numel() <= stream_bytes(numel, low)
