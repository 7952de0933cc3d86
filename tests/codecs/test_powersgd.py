"""PowerSGD: what the contract does not know of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import HEADER, RngKey, TensorSlice
from syncline.codecs.cast import Cast
from syncline.codecs.powersgd import PowerSGD
from syncline.errors import DivergedError, ProtocolError, SpecError
from syncline.testing import sum_in_lockstep


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(matrix: Tensor, name: str = "w", feedback: bool = True) -> TensorSlice:
    flat = matrix.flatten().clone()
    return TensorSlice(flat, name, shape=tuple(matrix.shape), residual=torch.zeros_like(flat) if feedback else None)


def decoded(codec: PowerSGD, matrix: Tensor, rng: RngKey | None = None) -> Tensor:
    return codec.decode(codec.encode(matrix, rng), torch.empty(matrix.shape))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_matrix_of_low_rank_comes_back(rank: int) -> None:
    """With a warm start at its own row space; one power iteration a step."""
    matrix = normal(60, rank) @ normal(rank, 40, seed=1)
    one = part(matrix)
    one.memory["q"] = torch.linalg.qr(matrix.T @ normal(60, rank, seed=2)).Q.contiguous()
    sum_in_lockstep(PowerSGD(rank), [[one]])
    torch.testing.assert_close(one.flat.view(60, 40), matrix, rtol=1e-5, atol=1e-5)
    assert one.residual is not None
    assert one.residual.abs().max() < 1e-5


def test_a_rank_below_the_codecs_comes_back_too() -> None:
    """A column that the others span is rounding error alone, and does no harm."""
    matrix = torch.outer(normal(60), normal(40, seed=1))
    for codec in (PowerSGD(2), PowerSGD(4)):
        torch.testing.assert_close(decoded(codec, matrix), matrix, rtol=1e-5, atol=1e-5)


def test_it_closes_in_on_the_best_approximation() -> None:
    """The same gradient again and again, without feedback: the warm start makes each step one more iteration."""
    u, v = torch.linalg.qr(normal(64, 64)).Q, torch.linalg.qr(normal(48, 48, seed=1)).Q
    values = torch.tensor([0.7**k for k in range(48)])
    matrix = u[:, :48] @ values.diag() @ v.T
    best = math.sqrt(float(values[2:].square().sum()))
    one = part(matrix, feedback=False)
    errors = []
    for step in range(40):
        one.flat.copy_(matrix.flatten())
        sum_in_lockstep(PowerSGD(2), [[one]], RngKey(step=step))
        errors.append(float((one.flat.view(64, 48) - matrix).norm()))
    assert errors[0] > 1.02 * best
    assert errors[-1] == pytest.approx(best, rel=1e-4)


def test_two_rounds_for_a_bucket_and_one_without_matrices() -> None:
    bucket = [part(normal(60, 40), "a"), part(normal(40), "b"), part(normal(8, 3, 10), "c")]
    yielded = [tensor.numel() for tensor in PowerSGD(2).reduce_rounds(bucket, RngKey(), 1)]
    assert yielded == [2 * 60 + 40 + 2 * 8, 2 * 40 + 2 * 30]
    assert [
        tensor.numel() for tensor in PowerSGD(2).reduce_rounds([part(normal(40)), part(normal(3, 4))], RngKey(), 1)
    ] == [52]
    assert [tensor.numel() for tensor in PowerSGD(2).reduce_rounds([], RngKey(), 1)] == []


def test_small_ones_slices_and_vectors_are_summed_as_they_are() -> None:
    small, vector, slice_ = normal(3, 4), normal(9), normal(500)
    ranks = [[part(small), part(vector), TensorSlice(slice_.clone(), "s", 500, (50, 20))] for _ in range(2)]
    sum_in_lockstep(PowerSGD(2), ranks)
    for found, given in zip(ranks[1], (small, vector, slice_), strict=True):
        assert torch.equal(found.flat, 2 * given.flatten())
        assert found.memory == {}


def test_the_start_differs_between_parameters_not_ranks() -> None:
    first = next(PowerSGD(1).reduce_rounds([part(normal(60, 40), "a")], RngKey(rank=0), 2))
    again = next(PowerSGD(1).reduce_rounds([part(normal(60, 40), "a")], RngKey(rank=1), 2))
    other = next(PowerSGD(1).reduce_rounds([part(normal(60, 40), "b")], RngKey(rank=0), 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_direction_that_has_vanished_is_drawn_anew() -> None:
    """All zero in one step, and the factors are zero; they must not stay so."""
    one = part(torch.zeros(60, 40))
    sum_in_lockstep(PowerSGD(2), [[one]])
    assert not one.flat.any()
    assert not one.memory["q"].any()
    matrix = normal(60, 2) @ normal(2, 40, seed=1)
    one.flat.copy_(matrix.flatten())
    sum_in_lockstep(PowerSGD(2), [[one]], RngKey(step=1))
    torch.testing.assert_close(one.flat.view(60, 40), matrix, rtol=1e-5, atol=1e-5)


def test_a_start_kept_for_another_rank_is_not_used() -> None:
    one = part(normal(60, 40))
    one.memory["q"] = torch.ones(40, 3)
    sum_in_lockstep(PowerSGD(2), [[one]])
    assert one.memory["q"].shape == (40, 2)


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    """What every rank computes from the same sums: ranks with other threads must come to the same parameters."""
    had = torch.get_num_threads()
    p, q = normal(70_000, 2), normal(20, 2, seed=1)
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            one = part(torch.zeros(70_000, 20), feedback=False)
            rounds = PowerSGD(2).reduce_rounds([one], RngKey(), 2)
            next(rounds).copy_(p.flatten())
            next(rounds).copy_(q.flatten())
            assert next(rounds, None) is None
            found.append(one.flat)
    finally:
        torch.set_num_threads(had)
    assert found[0].any()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_factors_in_half_precision(dtype: str, scale: float) -> None:
    """Small gradients do not vanish, large ones do not become Inf, and what was cut off stays in the residual."""
    codec = PowerSGD(2) | Cast(dtype)
    assert codec.traits.allreducible
    matrices = [scale * normal(60, 2, seed=rank) @ normal(2, 40, seed=9) for rank in range(3)]
    ranks = [[part(matrix)] for matrix in matrices]
    dtypes = sum_in_lockstep(codec, ranks)
    assert set(dtypes) == {torch.float16 if dtype == "fp16" else torch.bfloat16}
    whole = sum(matrices, torch.zeros(60, 40))
    left = sum((parts[0].residual for parts in ranks if parts[0].residual is not None), torch.zeros(2400))
    assert torch.equal(ranks[0][0].flat, ranks[2][0].flat)
    assert bool(torch.isfinite(ranks[0][0].flat).all())
    off = (ranks[0][0].flat + left).view(60, 40) - whole
    assert off.abs().max() < 0.03 * whole.abs().max()
    if scale < 1e3:
        assert (ranks[0][0].flat.view(60, 40) - whole).norm() < 0.02 * whole.norm()


def test_a_sum_that_is_no_number_is_told_on_every_rank() -> None:
    ranks = [[part(torch.full((60, 40), 3e38)), part(torch.full((9,), 3e38))] for _ in range(2)]
    with pytest.raises(DivergedError, match="sum over the ranks"):
        sum_in_lockstep(PowerSGD(2), ranks)


def test_a_payload_alone_has_the_factors_of_the_matrix_it_was() -> None:
    matrix = normal(60, 2) @ normal(2, 40, seed=1)
    payload = PowerSGD(2).encode(matrix)
    assert payload.numel() == HEADER.size + 4 + 4 + 4 * 2 * (60 + 40)
    flat = PowerSGD(2).decode(payload, torch.empty(2400))
    torch.testing.assert_close(flat.view(60, 40), matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [7, 2400, 1, 61, 2**32 - 1])
def test_rows_that_cannot_be_are_refused(rows: int) -> None:
    payload = PowerSGD(2).encode(normal(60, 40))
    payload[HEADER.size + 4 : HEADER.size + 8] = torch.tensor(list(rows.to_bytes(4, "little")), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match=r"rows|B are due"):
        PowerSGD(2).decode(payload, torch.empty(60, 40))


def test_factors_that_are_no_numbers_are_refused() -> None:
    payload = PowerSGD(2).encode(normal(60, 40))
    payload[-4:] = torch.tensor([float("nan")]).view(torch.uint8)
    out = torch.ones(60, 40)
    with pytest.raises(ProtocolError, match="NaN or Inf"):
        PowerSGD(2).decode(payload, out)
    assert bool((out == 1).all())


def test_a_product_past_the_range_is_cut_off_there() -> None:
    """Terms of +1e60 and -1e60 are no NaN either."""
    payload = PowerSGD(2).encode(normal(60, 40))
    factors = torch.full((200,), 1e30)
    factors[1] = -1e30
    payload[HEADER.size + 8 :] = factors.view(torch.uint8)
    out = PowerSGD(2).decode(payload, torch.empty(60, 40))
    assert not out[0].any()
    assert bool((out[1:] == torch.finfo(torch.float32).max).all())


@pytest.mark.parametrize("rank", [0, -1, True, 2.0, "2", None])
def test_ranks_that_cannot_be(rank: object) -> None:
    with pytest.raises(SpecError, match="rank is a whole number"):
        PowerSGD(rank)  # type: ignore[arg-type]


def test_feedback_is_a_choice() -> None:
    assert PowerSGD().keeps_residual
    assert not PowerSGD(feedback=False).keeps_residual
    assert repr(PowerSGD(4, feedback=False)) == "powersgd(4, feedback=False)"
    with pytest.raises(SpecError, match="feedback"):
        PowerSGD(feedback=1)  # type: ignore[arg-type]
