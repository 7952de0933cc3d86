"""Sparse streams: merged, cut, joined, packed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.codecs.kernels.dispatch import reference_only
from syncline.collectives.compressed.sparse import SparseStream, max_sparse_count, packed_bytes
from syncline.errors import ProtocolError

repeatable = settings(derandomize=True, deadline=None, max_examples=100)


def _stream(numel: int, items: dict[int, float]) -> SparseStream:
    return SparseStream(
        numel, torch.tensor(sorted(items), dtype=torch.int32), torch.tensor([items[i] for i in sorted(items)])
    )


def _random(seed: int, numel: int, count: int) -> SparseStream:
    rng = random.Random(seed)
    return _stream(numel, {i: rng.gauss(0, 1) for i in rng.sample(range(numel), count)})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({1: 1.0, 5: 2.0}, {0: 3.0, 7: 4.0}, {0: 3.0, 1: 1.0, 5: 2.0, 7: 4.0}),
        ({1: 1.0, 5: 2.0}, {1: 3.0, 5: 4.0}, {1: 4.0, 5: 6.0}),
        ({}, {}, {}),
        ({}, {2: 1.0}, {2: 1.0}),
        ({2: 1.0}, {}, {2: 1.0}),
        ({1: 1.0, 4: 2.0}, {4: 0.5, 8: 3.0}, {1: 1.0, 4: 2.5, 8: 3.0}),
        ({3: 1.0}, {3: -1.0}, {3: 0.0}),  # a sum of 0 stays an element: every rank sees the same indices
    ],
    ids=["disjoint", "identical", "both empty", "one empty", "other empty", "overlap at one index", "cancel"],
)
def test_merge(a: dict[int, float], b: dict[int, float], expected: dict[int, float]) -> None:
    for one, two in ((a, b), (b, a)):
        for plain in (False, True):
            if plain:
                with reference_only():
                    found = _stream(9, one).merge(_stream(9, two))
            else:
                found = _stream(9, one).merge(_stream(9, two))
            assert dict(zip(found.indices.tolist(), found.values.tolist(), strict=True)) == expected
            assert found.indices.tolist() == sorted(expected)


@repeatable
@given(st.integers(0, 2**30), st.integers(1, 300), st.floats(0, 1), st.floats(0, 1))
def test_merge_is_the_dense_sum_in_both_kernels(seed: int, numel: int, left: float, right: float) -> None:
    a, b = _random(seed, numel, round(left * numel)), _random(seed + 1, numel, round(right * numel))
    found = a.merge(b)
    with reference_only():
        plain = a.merge(b)
    assert torch.equal(found.indices, plain.indices)
    assert torch.equal(found.values.view(torch.int32), plain.values.view(torch.int32))
    assert torch.equal(found.to_dense(), a.to_dense() + b.to_dense())


@repeatable
@given(st.integers(0, 2**30), st.integers(1, 300), st.lists(st.integers(0, 300), max_size=6))
def test_stretches_join_to_the_whole(seed: int, numel: int, cuts: list[int]) -> None:
    whole = _random(seed, numel, numel // 3)
    edges = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    parts = whole.split(edges)
    assert [part.numel for part in parts] == [b - a for a, b in pairwise(edges)]
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), whole.to_dense())
    assert torch.equal(SparseStream.join(parts).indices, whole.indices)
    assert torch.equal(SparseStream.join(parts).values, whole.values)


@pytest.mark.parametrize(("numel", "count"), [(0, 0), (1, 0), (1, 1), (1000, 10), (100, 90), (40_000, 400)])
def test_packed_streams_come_back(numel: int, count: int) -> None:
    stream = _random(count, numel, count)
    packed = stream.to_bytes()
    found = SparseStream.from_bytes(packed, numel)
    assert packed.numel() == packed_bytes(numel, count)
    assert (found.numel, found.count) == (numel, count)
    assert torch.equal(found.indices, stream.indices)
    assert torch.equal(found.values, stream.values)
    with reference_only():
        assert torch.equal(stream.to_bytes(), packed)


def test_a_stream_over_other_elements_is_refused() -> None:
    with pytest.raises(ProtocolError, match="over 10 elements, and 11 are expected"):
        SparseStream.from_bytes(_random(0, 10, 3).to_bytes(), 11)


def test_fuzzed_streams_are_streams_or_refused() -> None:
    rng, right, refused = random.Random(0), _random(0, 500, 20).to_bytes(), 0
    for trial in range(5000):
        packed = right[: right.numel() if trial % 3 else rng.randrange(right.numel())].clone()
        for _ in range(trial % 4):
            if packed.numel():
                packed[rng.randrange(packed.numel())] ^= 1 << rng.randrange(8)
        try:
            found = SparseStream.from_bytes(packed, 500)
        except ProtocolError:
            refused += 1
        else:
            assert bool(torch.isfinite(found.to_dense()).all())
            assert bool((found.indices[1:] > found.indices[:-1]).all())
    assert 1500 < refused < 5000


def test_beyond_the_limit_dense_is_shorter() -> None:
    """δ = N·v / (i + v)."""
    assert max_sparse_count(1_000_000) == 500_000
    assert max_sparse_count(0) == 0
