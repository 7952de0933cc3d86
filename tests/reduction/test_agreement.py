"""Comparing and broadcasting values between the ranks."""

from __future__ import annotations

import pytest
import torch

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, broadcast_tensors, broadcast_tree, check_same


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": "1", "b": "3"}, "b is 2 on rank 0 and 3 on rank 1"),
        ({"a": "1"}, "b is 2 on rank 0 and missing on rank 1"),
        ({"a": "1", "b": "2", "c": "4"}, "c is 4 on rank 1 and missing on rank 0"),
        ({"b": "2", "a": "1"}, "another order"),
    ],
)
def test_every_rank_raises_the_first_difference(other: dict[str, str], message: str) -> None:
    def case(world: sl.World) -> str:
        entries = other if world.rank == 1 else {"a": "1", "b": "2"}
        with pytest.raises(IncompatibleError) as raised:
            check_same(Communicator(world, "auto"), "models", entries)
        return str(raised.value)

    first, *rest = sl.simulate(case, ranks=3).results
    assert message in first
    assert set(rest) == {first}


def test_equal_entries_pass() -> None:
    sl.simulate(lambda world: check_same(Communicator(world, "auto"), "models", {"a": "1"}), ranks=3)


def test_tensors_of_all_shapes_and_dtypes_are_broadcast() -> None:
    def case(world: sl.World) -> list[float]:
        tensors = [
            torch.full((2, 3), float(world.rank)),
            torch.full((), world.rank, dtype=torch.int64),
            torch.full((300_000,), float(world.rank)),
            torch.full((4,), float(world.rank)),
        ]
        broadcast_tensors(Communicator(world, "auto"), tensors, root=1)
        return [float(tensor.double().mean()) for tensor in tensors]

    assert sl.simulate(case, ranks=2).results == ([1.0] * 4,) * 2


def test_a_state_tree_is_broadcast() -> None:
    def case(world: sl.World) -> object:
        return broadcast_tree(Communicator(world, "auto"), {"step": world.rank, "names": ["a"]}, root=1)

    assert sl.simulate(case, ranks=2).results == ({"step": 1, "names": ["a"]},) * 2
