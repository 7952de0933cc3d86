"""Sums, comparisons and broadcasts between the ranks of a run."""

from __future__ import annotations

import pytest
import torch

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import Communicator, broadcast_tensors, broadcast_tree, check_same


@pytest.mark.parametrize("collective", ["auto", "native", "ring", "tree"])
def test_launch_sum_sums_in_place(collective: str) -> None:
    def case(world: sl.World) -> list[float]:
        communicator = Communicator(world, collective)
        rows = [torch.full((5,), float(world.rank + step)) for step in range(2)]
        pending = [communicator.launch_sum(row, "a row") for row in rows]  # the second reuses the decided schedule
        for each in pending:
            each.wait()
        return [float(row[0]) for row in rows]

    assert sl.simulate(case, ranks=3).results == ([3.0, 6.0],) * 3


def test_one_rank_sends_nothing() -> None:
    def case(world: sl.World) -> tuple[float, int, int]:
        communicator = Communicator(world, "auto")
        row = torch.ones(4)
        communicator.launch_sum(row, "a row").wait()
        communicator.sum_now(row, "a row")
        return float(row.sum()), communicator.stats.bytes_logical, communicator.stats.bytes_wire

    assert sl.simulate(case, ranks=1).results == ((4.0, 32, 0),)


def test_mean_and_broadcast_from_root() -> None:
    def case(world: sl.World) -> tuple[float, list[int]]:
        communicator = Communicator(world, "auto")
        return communicator.mean(float(world.rank)), communicator.from_root(torch.tensor([world.rank]), 1).tolist()

    assert sl.simulate(case, ranks=3).results == ((1.0, [1]),) * 3


def test_adopted_choices_replace_earlier_ones() -> None:
    def case(world: sl.World) -> tuple[bool, dict[str, str]]:
        communicator = Communicator(world, "auto")
        communicator.prepare([(8, torch.float32, torch.device("cpu"))])
        (key,) = communicator.choices
        communicator.adopt({key: "tree"})
        row = torch.ones(8)
        communicator.launch_sum(row, "a row").wait()
        return bool((row == 2).all()), communicator.choices

    results = sl.simulate(case, ranks=2).results
    assert all(summed and set(choices.values()) == {"tree"} for summed, choices in results)


def test_stats_of_a_run_count_its_part() -> None:
    def case(world: sl.World) -> int:
        whole = Communicator(world, "ring")
        part = Communicator(world, "ring", group=world.group(), stats=whole.stats)
        part.launch_sum(torch.zeros(3), "a row").wait()
        return whole.stats.bytes_wire

    assert sl.simulate(case, ranks=2).results == (12, 12)


def test_unknown_collectives_and_missing_codecs_are_refused() -> None:
    def case(world: sl.World) -> None:
        with pytest.raises(SpecError, match="'auto' and 'native'"):
            Communicator(world, "rings")
        with pytest.raises(IncompatibleError, match="there is no codec"):
            Communicator(world, "split")

    sl.simulate(case, ranks=1)


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
