"""Collectives of a team: what they give in forward, and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.parallel.team import (
    LayerTeam,
    copy_to_team,
    gather,
    gather_and_reduce,
    reduce_own_part,
    sum_over_team,
    take_own_part,
)
from syncline.testing import Pool
from syncline.world import World
from tests.parallel.team_cases import check_collectives, check_exchange, exchange_rows, run_collectives
from tests.strategies.cases import on_gloo


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_and_their_gradients(size: int) -> None:
    for rank, found in enumerate(sl.simulate(run_collectives, size).results):
        check_collectives(found, rank, size)


@pytest.mark.xdist_group("gloo")
def test_collectives_on_gloo(gloo: Pool) -> None:
    for rank, found in enumerate(gloo.run(on_gloo, 3, run_collectives)):
        check_collectives(found, rank, 3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_exchange_sends_rows_and_gradients_back(size: int) -> None:
    for rank, found in enumerate(sl.simulate(exchange_rows, size).results):
        check_exchange(found, rank, size)


@pytest.mark.xdist_group("gloo")
def test_exchange_on_gloo(gloo: Pool) -> None:
    for rank, found in enumerate(gloo.run(on_gloo, 3, exchange_rows)):
        check_exchange(found, rank, 3)


def test_a_gradient_of_a_gradient_passes_collectives() -> None:
    """f = Σ (Σ_workers x)³ / 3 of three workers with the same function: f'' = 2·(Σ x)·3 with copies and sums."""

    def work(world: World) -> Tensor:
        team = LayerTeam(world.group())
        x = torch.tensor([2.0], requires_grad=True)
        y = sum_over_team(copy_to_team(x, team) * (world.rank + 1), team)  # 6·x
        (first,) = torch.autograd.grad((y**3 / 3).sum(), x, create_graph=True)  # 6·(6x)²
        (second,) = torch.autograd.grad(first.sum(), x)  # 6·2·36·x
        return torch.stack([first.detach(), second])

    for found in sl.simulate(work, 3).results:
        assert found.flatten().tolist() == [6 * 144, 6 * 2 * 36 * 2]


def test_what_follows_may_change_outputs_in_place() -> None:
    """Such as `nn.ReLU(inplace=True)`. torch refuses this for views that a function returns."""

    def work(world: World) -> list[Tensor]:
        team = LayerTeam(world.group())
        found = []
        for dim in (0, 1):
            functions: list[Callable[[Tensor], Tensor]] = [
                lambda x: sum_over_team(x, team),
                lambda x: gather(x, team, dim),  # noqa: B023
                lambda x: take_own_part(x, team, dim),  # noqa: B023
                lambda x: reduce_own_part(x, team, dim),  # noqa: B023
                lambda x: gather_and_reduce(x, team, dim, 8),  # noqa: B023
            ]
            for function in functions:
                x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
                output: Tensor = function(x * 1)
                assert output.is_contiguous()
                torch.autograd.backward(torch.relu_(output).sum())
                assert x.grad is not None
                found.append(x.grad)
        return found

    for gradients in sl.simulate(work, 2).results:
        assert all(gradient.max() > 0 and gradient.min() == 0 for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex64])
def test_reductions_keep_the_dtype(dtype: torch.dtype) -> None:
    def work(world: World) -> Tensor:
        return LayerTeam(world.group()).reduce(torch.ones(3, 2, dtype=dtype).t())

    for found in sl.simulate(work, 2).results:
        assert torch.equal(found, torch.full((2, 3), 2, dtype=dtype))


def test_the_largest_value_and_single_numbers() -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        team = LayerTeam(world.group())
        return team.reduce(torch.tensor([-3.0, world.rank]), "max"), team.reduce(torch.tensor(2.0))

    for largest, total in sl.simulate(work, 3).results:
        assert (largest.tolist(), total.item()) == ([-3.0, 2.0], 6.0)


def test_parts_may_be_empty() -> None:
    def work(world: World) -> list[Any]:
        team = LayerTeam(world.group())
        x = torch.arange(2.0, requires_grad=True)
        part = take_own_part(x * 1, team, 0)
        again = gather(part, team, 0, team.lengths(2))
        total = reduce_own_part(again, team, 0)
        torch.autograd.backward(total.sum() + again.sum())
        assert x.grad is not None
        none = team.reduce(torch.empty(0, 3)).shape, team.reduce_scatter(torch.empty(0, 3), 0).shape
        return [len(part), again.tolist(), total.tolist(), none == ((0, 3), (0, 3))]

    results = sl.simulate(work, 3).results
    assert [each[0] for each in results] == [0, 1, 1]
    assert all(each[1] == [0.0, 1.0] and each[3] for each in results)
    assert [each[2] for each in results] == [[], [0.0], [3.0]]


def test_calls_and_bytes_are_counted() -> None:
    def work(world: World) -> tuple[dict[str, int], int]:
        team = LayerTeam(world.group())
        x = torch.ones(4, 3, requires_grad=True)
        torch.autograd.backward(gather_and_reduce(sum_over_team(copy_to_team(x, team), team), team, 0, 8).sum())
        return dict(team.calls), team.sent_bytes

    # forward: a sum of 48 bytes, a gather of this worker's 48; backward: a sum of 96 to a part, a sum of 48
    calls = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1}
    assert sl.simulate(work, 2).results == ((calls, 48 + 48 + 96 + 48),) * 2


def test_a_world_of_one_communicates_nothing() -> None:
    def work(world: World) -> int:
        team = LayerTeam(world.group())
        x = torch.ones(2, 2, requires_grad=True)
        y = reduce_own_part(gather(sum_over_team(copy_to_team(x, team), team), team, 0), team, 0)
        torch.autograd.backward(take_own_part(y, team, 0).sum())
        return sum(team.calls.values())

    assert sl.simulate(work, 1).results == (0,)


def test_different_shapes_are_refused() -> None:
    def work(world: World) -> None:
        LayerTeam(world.group()).reduce(torch.ones(2 + world.rank))

    with pytest.raises(IncompatibleError, match=r"disagree.*allreduce\(torch.float32\[2\], sum\)"):
        sl.simulate(work, 2)


def test_copies_of_a_team_are_the_team() -> None:
    def work(world: World) -> bool:
        team = LayerTeam(world.group())
        return copy.deepcopy([team, team]) == [team, team]

    assert sl.simulate(work, 2).results == (True, True)
