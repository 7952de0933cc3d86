"""Chains: every option of every link is obeyed, also where the chain sums on the wire."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from syncline.codecs import Codec, RngKey, TensorSlice, build_codec
from syncline.testing.codecs import sum_in_lockstep

LOW_RANK = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) @ torch.randn(
    2, 40, generator=torch.Generator().manual_seed(1)
)
"""Powersgd of rank 2 loses nothing of it but by rounding."""


def built(spec: str) -> Codec:
    codec = build_codec(spec)
    assert codec is not None
    return codec


def summed(codec: Codec, values: Tensor, seed: int, ranks: int = 1) -> Tensor:
    """The sum of so many ranks that have the same values."""
    parts = [[TensorSlice(values.flatten().clone(), "w", shape=tuple(values.shape))] for _ in range(ranks)]
    sum_in_lockstep(codec, parts, RngKey(seed))
    return parts[0][0].flat.view(values.shape)


def sent(codec: Codec, values: Tensor, rank: int) -> Tensor:
    """What a rank sends first."""
    part = TensorSlice(values.flatten().clone(), "w", shape=tuple(values.shape))
    return next(codec.reduce_rounds([part], RngKey(rank=rank), 1)).float()


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("first", ["randomk(1.0)", "powersgd(2)"])
@pytest.mark.parametrize("values", [LOW_RANK, LOW_RANK[0]], ids=["matrix", "vector"])
def test_stochastic_rounding_is_right_on_average(first: str, to: str, values: Tensor) -> None:
    nearest = sent(built(f"{first}|cast('{to}')"), values, 0)
    codec = built(f"{first}|cast('{to}', stochastic=True)")
    drawn = torch.stack([sent(codec, values, rank) for rank in range(100)]).mean(dim=0)
    exact = sent(built(first), values, 0)
    exact *= (nearest @ exact / (exact @ exact)).log2().round().exp2()  # fp16 takes factors as large as they are
    assert (drawn - exact).norm() < 0.5 * (nearest - exact).norm()


@pytest.mark.parametrize("first", ["randomk(1.0)", "powersgd(2)"])
def test_ranks_round_with_random_bits_of_their_own(first: str) -> None:
    codec = built(f"{first}|cast('bf16', stochastic=True)")
    assert not torch.equal(summed(codec, LOW_RANK[0], 0, ranks=2), 2 * summed(codec, LOW_RANK[0], 0))


@pytest.mark.parametrize("first", ["randomk(1.0)", "powersgd(2)"])
def test_what_stochastic_rounding_loses_stays_in_the_residual(first: str) -> None:
    codec = built(f"{first}|cast('bf16', stochastic=True)")
    part = TensorSlice(LOW_RANK.flatten().clone(), "w", shape=(60, 40), residual=torch.zeros(2400))
    sum_in_lockstep(codec, [[part]])
    assert part.residual is not None
    torch.testing.assert_close(part.flat + part.residual, LOW_RANK.flatten(), rtol=0, atol=1e-5)


def test_lossless_compresses_codes_at_its_level() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).sign()
    fast, slow = (built(f"onebit(64)|lossless(level={level})").encode(values.cumsum(0)) for level in (1, 19))
    assert slow.numel() < fast.numel()
