"""Ranks are arranged in a mesh."""

from __future__ import annotations

import pytest

import syncline as sl
from syncline.errors import SpecError
from syncline.world.mesh import AXES, Mesh


def test_positions_are_in_the_order_of_the_axes() -> None:
    mesh = Mesh(pipeline=2, data=3, shared=2, tensor=2)
    positions = [mesh.position(rank) for rank in range(mesh.size)]
    assert positions == sorted(positions)
    assert [mesh.rank(position) for position in positions] == list(range(24))


@pytest.mark.parametrize("axis", AXES)
def test_teams_along_an_axis_divide_the_ranks(axis: str) -> None:
    mesh = Mesh(pipeline=2, data=3, shared=2, tensor=2)
    teams = mesh.teams(axis)
    assert sorted(rank for team in teams for rank in team) == list(range(mesh.size))
    assert {len(team) for team in teams} == {mesh.sizes[AXES.index(axis)]}
    for team in teams:
        assert all(mesh.team(rank, axis) == team for rank in team)


def test_ranks_that_differ_along_data_have_the_same_part() -> None:
    mesh = Mesh(pipeline=2, data=3, shared=2, tensor=2)
    parts = [mesh.part_number(rank) for rank in range(mesh.size)]
    assert sorted(set(parts)) == list(range(8))
    for rank in range(mesh.size):
        assert {parts[other] for other in mesh.team(rank, "data")} == {parts[rank]}


@pytest.mark.parametrize("sizes", [{"tensor": 3}, {"pipeline": 2, "tensor": 2, "shared": 2}])
def test_a_mesh_that_does_not_fit_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=r"needs a multiple of (3|8) workers, and there are 4"):
        Mesh.fit(4, **sizes)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_size_that_is_no_number_of_ranks_is_refused(count: int) -> None:
    with pytest.raises(SpecError, match="whole number of ranks"):
        Mesh(tensor=count)


def test_the_mesh_of_a_world_without_divided_layers_is_data() -> None:
    assert [str(each) for each in sl.simulate(lambda world: world.mesh, ranks=3).results] == [
        "mesh of 3 ranks: data 3"
    ] * 3
