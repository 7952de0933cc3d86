"""Sums of tensors over the ranks of a run."""

from __future__ import annotations

import pytest
import torch

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import Communicator


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
