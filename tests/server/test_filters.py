"""Filters choose what goes now, and lose nothing: what was pushed is what was sent and what still waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.codecs.kernels.random_bits import random_bits
from syncline.errors import SpecError
from syncline.server.filters import (
    FILTERS,
    Cache,
    Filter,
    FilterChain,
    Significant,
    Skip,
    build_filter,
    digest_of,
    hash_places,
)

SPECS = [
    *("significant(2.0)", "significant(0.5, relative=True)", "significant(1.5, relative=True)"),
    *("skip(0.0)", "skip(0.5)", "skip(0.9, seed=7)", "cache"),
    *("significant(2.0)|skip(0.5)", "skip(0.5)|significant(2.0)|cache", "cache|skip(0.25)"),
    "significant(1.0, relative=True)|skip(0.3, seed=2)|cache",
]


def built(spec: str) -> Filter:
    found = build_filter(spec)
    assert found is not None
    return found


class Sender:
    """A client as filters see it: it keeps what they do not choose, and adds up what arrives."""

    def __init__(self, filter: Filter, numel: int) -> None:
        self.filter, self.residual, self.arrived, self.number = filter, torch.zeros(numel), torch.zeros(numel), 0

    def push(self, values: Tensor) -> int:
        self.residual += values
        self.number += 1
        places = self.filter.choose(self.residual, self.number)
        places = torch.arange(self.residual.numel()) if places is None else places
        check_places(places, self.residual.numel())
        self.arrived[places] += self.residual[places]
        self.residual[places] = 0.0
        return places.numel()

    def flush(self) -> None:
        self.arrived += self.residual
        self.residual.zero_()


def check_places(places: Tensor, numel: int) -> None:
    assert places.dtype == torch.int64
    assert places.dim() == 1
    assert bool((places[1:] > places[:-1]).all())
    assert not places.numel() or (int(places[0]) >= 0 and int(places[-1]) < numel)


# Names and specs.


def test_every_name() -> None:
    assert FILTERS.names() == ["cache", "significant", "skip"]


@pytest.mark.parametrize("spec", SPECS)
def test_repr_is_the_spec(spec: str) -> None:
    found = built(spec)
    assert repr(found) == spec
    assert build_filter(repr(found)) == found
    assert build_filter(found) is found
    assert hash(built(spec)) == hash(found)


def test_chains() -> None:
    chain = Significant(0.5) | Skip(0.5) | Cache()
    assert (
        chain == FilterChain((Significant(0.5), Skip(0.5), Cache())) == build_filter("significant(0.5)|skip(0.5)|cache")
    )
    assert Significant(0.5) | (Skip(0.5) | Cache()) == chain


def test_none_is_no_filter() -> None:
    assert build_filter(None) is None
    assert build_filter(" none ") is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("signifcant(1)", "did you mean 'significant'"),
        ("significant", "missing a required argument"),
        ("significant(0)", "float32 has, not 0"),
        ("significant(-1.0)", "above 0"),
        ("significant(1e999)", "above 0"),
        ("significant(1e39)", "above 0"),
        ("significant(1e-60)", "that float32 has"),
        ("significant('1')", "above 0"),
        ("significant(True)", "above 0"),
        ("significant(1, relative=1)", "True or False"),
        ("skip(1.0)", "below 1, not 1.0"),
        ("skip(-0.1)", "0 or more"),
        ("skip(0.5, seed=0.5)", "integer"),
        ("skip(0.5)|skip(0.5)", "skip stands there twice"),
        ("cache|none", "'none' stands alone"),
        ("cache(3)", "too many positional"),
    ],
)
def test_bad_specs_are_refused(spec: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        build_filter(spec)


@pytest.mark.parametrize("spec", [3, 0.5, ["cache"]])
def test_objects_that_are_no_specs_are_refused(spec: Any) -> None:
    with pytest.raises(SpecError, match="a filter is a spec"):
        build_filter(spec)


def test_a_chain_has_two_links() -> None:
    with pytest.raises(SpecError, match="at least two"):
        FilterChain((Cache(),))


@pytest.mark.parametrize(
    ("spec", "caches", "chooses"),
    [
        ("cache", True, False),
        ("skip(0.5)", False, True),
        ("cache|skip(0.5)", True, True),
        ("skip(0.5)|cache", True, True),
    ],
)
def test_filters_tell_whether_they_choose_or_cache(spec: str, caches: bool, chooses: bool) -> None:
    assert built(spec).caches is caches
    assert built(spec).chooses is chooses


# Nothing is lost for good.


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(st.lists(st.integers(-5, 5), min_size=12, max_size=12), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
)
def test_pushed_values_are_sent_or_held_back(spec: str, rounds: list[list[int]], seed: int) -> None:
    """Whole numbers, so that sums are exact: after every push, and after the flush nothing waits."""
    found = built(spec)
    if isinstance(found, Skip):
        found = Skip(found.p, seed)
    sender, pushed = Sender(found, 12), torch.zeros(12)
    for values in rounds:
        row = torch.tensor(values, dtype=torch.float32)
        pushed += row
        sender.push(row)
        assert torch.equal(sender.arrived + sender.residual, pushed)
    sender.flush()
    assert torch.equal(sender.arrived, pushed)
    assert not sender.residual.any()


@pytest.mark.parametrize("spec", SPECS)
def test_large_and_empty_tensors(spec: str) -> None:
    random = torch.Generator().manual_seed(5)
    sender, pushed = Sender(built(spec), 20_011), torch.zeros(20_011)
    for _ in range(6):
        row = torch.randint(-4, 5, (20_011,), generator=random).float()
        pushed += row
        sender.push(row)
    assert torch.equal(sender.arrived + sender.residual, pushed)
    assert Sender(built(spec), 0).push(torch.zeros(0)) == 0


# significant


def test_small_changes_add_up_until_they_are_sent() -> None:
    sender = Sender(Significant(1.0), 3)
    sent = [sender.push(torch.tensor([0.5, 0.25, -2.0])) for _ in range(4)]
    assert sent == [1, 2, 1, 3]
    assert sender.arrived.tolist() == [2.0, 1.0, -8.0]
    assert sender.residual.tolist() == [0.0, 0.0, 0.0]


def test_values_at_the_threshold_are_sent() -> None:
    row = torch.tensor([0.5, -0.5, 0.49999997, -0.49999997, 0.0])
    assert Significant(0.5).choose(row, 1).tolist() == [0, 1]  # type: ignore[union-attr]


def test_relative_follows_the_root_mean_square() -> None:
    row = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])  # √(12/5) = 1.55
    for scale in (1e-30, 1e-3, 1.0, 1e30):  # squares of the outer ones leave float32
        assert Significant(1.0, relative=True).choose(row * scale, 1).tolist() == [0]  # type: ignore[union-attr]
        assert Significant(0.5, relative=True).choose(row * scale, 1).tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("relative", [False, True])
def test_zeros_are_held_back_and_nan_is_sent(relative: bool) -> None:
    """A row of zeros is not worth a message; a NaN that stayed would hide for ever."""
    found = Significant(1.0, relative=relative)
    assert found.choose(torch.zeros(5), 1).numel() == 0  # type: ignore[union-attr]
    chosen = found.choose(torch.tensor([0.0, math.nan, 0.25, math.inf]), 1)
    assert chosen is not None
    assert {1, 3} <= set(chosen.tolist())
    assert 0 not in chosen.tolist()


def test_a_choice_of_all_values_is_none() -> None:
    assert Significant(0.5).choose(torch.ones(4), 1) is None
    assert Skip(0.0).choose(torch.ones(4), 1) is None
    assert Cache().choose(torch.ones(4), 1) is None
    assert built("significant(0.5)|skip(0.0)|cache").choose(torch.ones(4), 1) is None


# skip


def test_seed_and_number_determine_a_skip() -> None:
    row = torch.ones(1000)

    def drawn(seed: int, number: int) -> list[int]:
        chosen = Skip(0.5, seed).choose(row, number)
        assert chosen is not None
        return chosen.tolist()

    assert drawn(1, 1) == drawn(1, 1)
    assert drawn(1, 1) != drawn(1, 2) != drawn(2, 2)
    assert drawn(1, 12) != drawn(11, 2)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_skip_has_its_probability(p: float) -> None:
    """Of 200,000 draws, at most five standard deviations off."""
    count, row = 0, torch.ones(20_000)
    for number in range(10):
        chosen = Skip(p, seed=3).choose(row, number)
        assert chosen is not None
        count += chosen.numel()
    expected = 200_000 * (1 - p)
    assert abs(count - expected) < 5 * math.sqrt(expected * p)


def test_skip_uses_the_random_bits_of_codecs() -> None:
    """Computed in 32 bits: the same as where the codecs' kernels draw."""
    for key in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678):
        for start in (0, 2**31 - 7, 2**32 - 7, 2**40):
            mixed = hash_places(torch.arange(5000) + start, key)
            assert torch.equal(mixed.long() + 2**31, random_bits(key, start, 5000))


def test_no_place_is_always_skipped() -> None:
    sender = Sender(Skip(0.8), 5000)
    for _ in range(100):
        sender.push(torch.ones(5000))
    assert float(sender.residual.max()) < 80  # 0.8 to the 80th, 5,000 places: about one in ten thousand runs
    assert float(sender.arrived.min()) > 0


# Chains


def test_each_filter_narrows_the_choice_before() -> None:
    row = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    one, other = Significant(0.5).choose(row, 3), Skip(0.5, 9).choose(row, 3)
    assert one is not None
    assert other is not None
    both = sorted(set(one.tolist()) & set(other.tolist()))
    for chain in (Significant(0.5) | Skip(0.5, 9), Skip(0.5, 9) | Significant(0.5)):
        assert chain.choose(row, 3).tolist() == both  # type: ignore[union-attr]


def test_a_relative_bound_is_of_the_whole_residual() -> None:
    row = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    relative, skip = Significant(1.0, relative=True), Skip(0.5, 9)
    assert (relative | skip).choose(row, 3).tolist() == (skip | relative).choose(row, 3).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", SPECS)
def test_choosing_does_not_change_the_residual(spec: str) -> None:
    row = torch.randn(100, generator=torch.Generator().manual_seed(1))
    before = row.clone()
    built(spec).choose(row, 1)
    assert torch.equal(row, before)


# cache


def test_different_lists_have_different_digests() -> None:
    lists = [[], [0], [1], [0, 1], [0, 2], [1 << 40], list(range(1000)), list(range(1, 1001))]
    digests = [digest_of(torch.tensor(each, dtype=torch.int64)) for each in lists]
    assert len(set(digests)) == len(lists)
    assert all(0 < each < 1 << 64 for each in digests)
    every_other = torch.arange(20)[::2]
    assert digest_of(every_other) == digest_of(every_other.contiguous())
