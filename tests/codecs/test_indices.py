"""Indices in bytes: every set comes back, in as many bytes as were promised, and no other bytes are believed."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.codecs.kernels import sparse_fused
from syncline.codecs.kernels.dispatch import reference_only
from syncline.codecs.kernels.indices import BITMAP, layout
from syncline.codecs.sparse import index_dtype, read_indices, write_indices
from syncline.errors import ProtocolError

repeatable = settings(derandomize=True, deadline=None, max_examples=150)


def _written(numel: int, indices: list[int]) -> Tensor:
    """By both kernels, which must agree."""
    places = torch.tensor(indices, dtype=index_dtype(numel))
    ours, plain = (torch.full((layout(numel, len(indices)).nbytes,), 0xAA, dtype=torch.uint8) for _ in range(2))
    write_indices(ours, numel, places)
    with reference_only():
        write_indices(plain, numel, places)
    assert torch.equal(ours, plain)
    return ours


def _read(packed: Tensor, numel: int, count: int) -> list[int] | None:
    """By both kernels: None where both refuse."""
    found: list[list[int] | None] = []
    for context in (nullcontext(), reference_only()):
        with context:
            try:
                found.append(read_indices(packed, numel, count).tolist())
            except ProtocolError:
                found.append(None)
    assert found[0] == found[1]
    return found[0]


@st.composite
def subsets(rng: st.DrawFn) -> tuple[int, list[int]]:
    numel = rng(st.one_of(st.integers(1, 70), st.integers(1, 3000), st.integers(2**31 - 2, 2**40)))
    return numel, sorted(rng(st.sets(st.integers(0, numel - 1), max_size=80)))


@repeatable
@given(subsets())
def test_every_set_comes_back(case: tuple[int, list[int]]) -> None:
    numel, indices = case
    assert _read(_written(numel, indices), numel, len(indices)) == indices


@pytest.mark.parametrize("numel", [1, 8, 9, 1000])
def test_all_of_them(numel: int) -> None:
    assert _read(_written(numel, list(range(numel))), numel, numel) == list(range(numel))


def test_the_drawing() -> None:
    """The example in the docstring, bit for bit."""
    plan = layout(20, 4)
    assert plan.nbytes <= 3
    out = torch.zeros(2, dtype=torch.uint8)
    sparse_fused.pack_indices(torch.tensor([3, 5, 6, 17], dtype=torch.int32), 2, 1, out)
    assert out.tolist() == [0b10001101, 0b01_10_01_11]


@repeatable
@given(st.integers(1, 10**6), st.floats(0.0, 1.0))
def test_never_longer_than_a_bitmap_or_the_bound(numel: int, ratio: float) -> None:
    count = round(ratio * numel)
    nbytes = layout(numel, count).nbytes
    assert nbytes <= (numel + 7) // 8
    for low in range(1, 21):
        assert nbytes <= (count * (1 + low) + numel // 2**low) / 8 + 2


def test_one_in_a_hundred_takes_a_byte_or_so() -> None:
    assert layout(1_860_000, 18_600).nbytes / 18_600 == pytest.approx(8.56 / 8, abs=0.01)
    assert layout(100, 60).low == BITMAP


@pytest.mark.parametrize(("numel", "count"), [(1000, 10), (64, 30), (50_000, 500), (9, 1)])
def test_fuzzed_bytes_are_indices_or_refused(numel: int, count: int) -> None:
    """Any bytes of the right length: what is read is sorted, in range and as many as were said, or is refused."""
    rng, size, believed = random.Random(numel), layout(numel, count).nbytes, 0
    right = _written(numel, sorted(rng.sample(range(numel), count)))
    for trial in range(1000):
        packed = right.clone()
        if trial % 3 == 0:
            packed = torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8)
        for _ in range(trial % 3):
            packed[rng.randrange(size)] ^= 1 << rng.randrange(8)
        found = _read(packed, numel, count)
        if found is not None:
            believed += 1
            assert len(found) == count
            assert found == sorted(set(found))
            assert 0 <= found[0] <= found[-1] < numel
    assert 0 < believed < 1000
    with pytest.raises(ProtocolError, match="are not the"):
        read_indices(right[:-1], numel, count)


def test_equal_and_falling_indices_are_refused() -> None:
    """The low bits may say that an index is not larger than the one before it."""
    plan = layout(4000, 2)
    assert plan.low > 0
    for low_bits in (0b0, 0b1):
        packed = torch.zeros(plan.nbytes, dtype=torch.uint8)
        packed[0] = 0b11  # both have the same upper part
        packed[plan.first] = low_bits
        with pytest.raises(ProtocolError, match="2 increasing numbers below 4000"):
            read_indices(packed, 4000, 2)
