"""The executor of requests, on a simulated network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.collectives.compressed import Request
from syncline.collectives.compressed.requests import (
    IDLE,
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    SendRecvRequest,
)
from syncline.reduction import Communicator


def answers(make: Callable[[int], Request], ranks: int, in_comm_task: bool) -> tuple[Any, ...]:
    def case(world: sl.World) -> Any:
        requests = Communicator(world, "auto").requests
        pending = requests.launch(make(world.rank), "a bucket", in_comm_task)
        found = pending.wait()
        return (None if found is None else found.tolist()), pending.sent_bytes

    return sl.simulate(case, ranks=ranks).results


def row(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("in_comm_task", [False, True])
def test_all_gather_returns_all_rows(in_comm_task: bool) -> None:
    found = answers(lambda rank: AllGatherRequest(row(rank, rank)), 3, in_comm_task)
    assert found == (([[0, 0], [1, 1], [2, 2]], 2),) * 3


@pytest.mark.parametrize("in_comm_task", [False, True])
def test_all_to_all_transposes_rows(in_comm_task: bool) -> None:
    found = answers(
        lambda rank: AllToAllRequest(torch.stack([row(10 * rank + to) for to in range(3)])), 3, in_comm_task
    )
    assert [rows for rows, _ in found] == [[[to], [10 + to], [20 + to]] for to in range(3)]
    assert {sent for _, sent in found} == {2}


@pytest.mark.parametrize("in_comm_task", [False, True])
def test_send_recv_may_differ_in_length_or_be_idle(in_comm_task: bool) -> None:
    def make(rank: int) -> Request:
        return IDLE if rank == 2 else SendRecvRequest(1 - rank, row(7, 8) if rank else row(9), 4)

    assert answers(make, 3, in_comm_task) == (([7, 8], 1), ([9], 2), ([], 0))


def test_a_swap_of_one_direction() -> None:
    def make(rank: int) -> Request:
        return SendRecvRequest(1, row(5), 0) if rank == 0 else SendRecvRequest(0, None, 1)

    assert answers(make, 2, False) == (([], 1), ([5], 0))


def test_sum_is_in_place() -> None:
    def case(world: sl.World) -> list[float]:
        tensor = torch.full((2,), float(world.rank))
        pending = Communicator(world, "auto").requests.launch(AllReduceRequest(tensor), "a bucket", False)
        assert pending.wait() is None
        assert pending.sent_bytes == 8
        return [float(each) for each in tensor]

    assert sl.simulate(case, ranks=3).results == ([3.0, 3.0],) * 3
