"""Kernels of the sparse codecs: exact against torch, and the fused ones give the bits of the plain ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from syncline.codecs.kernels import sparse_fused, sparse_reference
from syncline.codecs.kernels.dispatch import SparseKernels, reference_only, sparse_kernels

SIZES = [0, 1, 7, 8, 9, 511, 512, 2049, 8193, 20_000]
Select = Callable[[SparseKernels, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def _normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def _few(numel: int) -> Tensor:
    """Mostly zero: fewer than are to be kept have a magnitude."""
    return _normal(numel) * (torch.arange(numel) % 997 == 0)


DATA: dict[str, Callable[[int], Tensor]] = {
    "normal": _normal,
    "zero": torch.zeros,
    "minus zero": lambda numel: -torch.zeros(numel),
    "equal": lambda numel: torch.full((numel,), -2.5),
    "two values": lambda numel: torch.where(_normal(numel) > 1.5, 1.0, -0.5),
    "denormal": lambda numel: _normal(numel) * 1e-41,
    "huge": lambda numel: (
        _normal(numel).sign() * 3.4e38 * torch.rand(numel, generator=torch.Generator().manual_seed(1))
    ),
    "wide": lambda numel: _normal(numel) * 10.0 ** (_normal(numel + 1)[1:] * 9),
    "sorted": lambda numel: _normal(numel).sort().values,
    "few": _few,
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("ratio", [0.001, 0.3, 1.0])
def test_largest_is_exact(data: str, ratio: float) -> None:
    """The magnitudes are those of torch.topk; of equal ones the first are chosen."""
    for numel in SIZES:
        flat = DATA[data](numel)
        k = min(numel, max(1, round(ratio * numel)))
        indices, values = sparse_fused.largest(flat, None, k)
        order = flat.abs().sort(descending=True, stable=True).indices[:k].sort().values
        assert torch.equal(indices.long(), order)
        assert _same(values, flat[order])
        assert torch.equal(values.abs().sort().values, flat.abs().topk(k).values.sort().values)


def _top(ratio: float) -> Select:
    return lambda run, flat, residual: run.largest(
        flat, residual, min(flat.numel(), max(1, round(ratio * flat.numel())))
    )


def _bucket(k: int, bucket: int) -> Select:
    return lambda run, flat, residual: run.largest_of_buckets(flat, residual, k, bucket)


def _threshold(least: float) -> Select:
    return lambda run, flat, residual: run.at_least(flat, residual, least)


SELECTIONS: dict[str, Select] = {
    "top 1%": _top(0.01),
    "top half": _top(0.5),
    "16 of 512": _bucket(16, 512),
    "1 of 3": _bucket(1, 3),
    "all of 100": _bucket(100, 100),
    "at least 1": _threshold(1.0),
    "at least 3": _threshold(3.0),
    "at least a denormal": _threshold(2e-38),
}


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("data", DATA)
def test_fused_and_reference_choose_alike(name: str, data: str) -> None:
    """Indices, values and what is left are the same bits, with and without error feedback."""
    for numel in SIZES:
        flat = DATA[data](numel)
        for start in (None, _normal(numel)):
            ours, plain = (None if start is None else start.clone() for _ in range(2))
            kept = flat.clone()
            indices, values = SELECTIONS[name](sparse_fused, flat, ours)
            expected, numbers = SELECTIONS[name](sparse_reference, flat, plain)
            assert indices.dtype == expected.dtype == torch.int32
            assert torch.equal(indices, expected)
            assert _same(values, numbers)
            assert _same(flat, kept)  # never changed
            if ours is not None and plain is not None and start is not None:
                assert _same(ours, plain)
                whole = ours.clone()
                whole[indices] = values
                assert _same(whole, start + flat)  # nothing is lost
                assert not ours[indices].any()


def test_each_bucket_has_its_own_largest() -> None:
    """The last, short bucket keeps what it can."""
    flat = torch.tensor([1.0, -5, 2, 0, 0, 9, 9, 9, 3])
    indices, values = sparse_fused.largest_of_buckets(flat, None, 2, 4)
    assert indices.tolist() == [1, 2, 5, 6, 8]
    assert values.tolist() == [-5.0, 2.0, 9.0, 9.0, 3.0]


@pytest.mark.parametrize("sampled", [1e6, 1e-6])
def test_a_misleading_sample_changes_nothing(sampled: float) -> None:
    """Where all that the sample sees is larger, or smaller, than the rest, the right ones are found all the same."""
    numel, k = 100_000, 20_000
    j = np.arange(sparse_fused.SAMPLE)
    first, last = j * numel // sparse_fused.SAMPLE, (j + 1) * numel // sparse_fused.SAMPLE
    seen = first + ((j * 40503 & 0xFFFF) * (last - first) >> 16)
    flat = _normal(numel)
    flat[seen] *= sampled
    assert torch.equal(sparse_fused.largest(flat, None, k)[0], sparse_reference.largest(flat, None, k)[0])


def test_scatter_sets_or_adds() -> None:
    indices, values = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1.0, 2.0])
    for run in (sparse_fused, sparse_reference):
        out = torch.ones(4)
        run.scatter(out, indices, values, accumulate=True)
        assert out.tolist() == [2.0, 1.0, 1.0, 3.0]
        run.scatter(out, indices, values, accumulate=False)
        assert out.tolist() == [1.0, 1.0, 1.0, 2.0]


def test_reference_only_is_obeyed() -> None:
    assert sparse_kernels(torch.zeros(1)) is sparse_fused
    with reference_only():
        assert sparse_kernels(torch.zeros(1)) is sparse_reference


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, -0.0 included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
