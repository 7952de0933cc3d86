"""The coordinator's table, without any exchange."""

from __future__ import annotations

import torch

from syncline.compat.horovod.messages import OperationRequest, TensorInfo
from syncline.compat.horovod.negotiation import NegotiationTable


def summed(name: str, *shape: int, op: str = "sum") -> OperationRequest:
    return OperationRequest("allreduce", f"allreduce.{name}", (TensorInfo(torch.float32, shape),), op)


def gathered(name: str, rows: int) -> OperationRequest:
    return OperationRequest("allgather", f"allgather.{name}", (TensorInfo(torch.float32, (rows, 2)),))


def ask_all(table: NegotiationTable, requests: list[OperationRequest]) -> None:
    for rank, request in enumerate(requests):
        table.request(rank, 0, [request], 0.0)


def test_an_operation_is_ready_when_the_last_rank_has_asked() -> None:
    table = NegotiationTable(3, 8)
    for rank in (2, 0):
        table.request(rank, 0, [summed("w", 4)], 0.0)
        assert not table.settle()
    table.request(1, 0, [summed("w", 4)], 0.0)
    (plan,) = table.settle().plans
    assert plan.request.name == "allreduce.w"
    assert plan.number == 0
    assert not table.waiting


def test_known_operations_are_requested_by_bits() -> None:
    table = NegotiationTable(2, 8)
    for name in "abc":
        ask_all(table, [summed(name, 2), summed(name, 2)])
    assert [plan.number for plan in table.settle().plans] == [0, 1, 2]
    table.request(0, 0b101, [], 0.0)
    table.request(1, 0b110, [], 0.0)
    assert table.settle().mask == 0b100
    table.request(1, 0b001, [], 0.0)
    assert table.settle().mask == 0b001
    table.request(0, 0b010, [], 0.0)
    assert table.settle().mask == 0b010
    assert not table.waiting


def test_a_bit_means_what_was_asked_for_the_last_time() -> None:
    """One rank asks as before, the other for another number of rows: both orders of arrival."""
    for bit_first in (True, False):
        table = NegotiationTable(2, 8)
        ask_all(table, [gathered("g", 3), gathered("g", 4)])
        assert table.settle().plans[0].rows == ((3,), (4,))
        if bit_first:
            table.request(0, 0b1, [], 0.0)
            table.request(1, 0, [gathered("g", 9)], 0.0)
        else:
            table.request(1, 0, [gathered("g", 9)], 0.0)
            table.request(0, 0b1, [], 0.0)
        (plan,) = table.settle().plans
        assert plan.rows == ((3,), (9,))
        assert plan.number == 0
        table.request(0, 0b1, [], 0.0)
        table.request(1, 0b1, [], 0.0)
        assert table.settle().mask == 1


def test_changed_shape_on_one_rank_is_a_mismatch() -> None:
    table = NegotiationTable(2, 8)
    ask_all(table, [summed("w", 4), summed("w", 4)])
    table.settle()
    table.request(0, 0b1, [], 0.0)
    table.request(1, 0, [summed("w", 5)], 0.0)
    (failure,) = table.settle().failures
    assert failure.why == "the ranks differ in shape: [4] on rank 0, [5] on rank 1"
    assert not table.waiting


def test_what_differs_is_named_with_its_ranks() -> None:
    table = NegotiationTable(3, 8)
    ask_all(table, [summed("w", 4), summed("w", 4, op="min"), summed("w", 4)])
    assert table.settle().failures[0].why == "the ranks differ in op: sum on ranks 0, 2, min on rank 1"


def test_unnamed_operations_are_not_cached() -> None:
    table = NegotiationTable(2, 1)
    for name in ("noname.0", "a", "b"):
        ask_all(table, [summed(name, 2), summed(name, 2)])
    assert [plan.number for plan in table.settle().plans] == [-1, 0, -1]


def test_a_rank_that_has_joined_takes_part_in_sums_known_or_new() -> None:
    table = NegotiationTable(2, 8)
    ask_all(table, [summed("a", 2), summed("a", 2)])
    table.settle()
    table.request(1, 0, [OperationRequest("join", "join.noname.0")], 0.0)
    assert not table.settle()
    table.request(0, 0b1, [summed("new", 3)], 0.0)
    answer = table.settle()
    assert answer.mask == 0b1
    assert [plan.number for plan in answer.plans] == [-1]
    table.request(0, 0, [gathered("g", 1)], 0.0)
    assert "after ranks [1] have joined" in table.settle().failures[0].why
    table.request(0, 0, [OperationRequest("join", "join.noname.0")], 0.0)
    (plan,) = table.settle().plans
    assert plan.rows == ((0,),)
    assert not table.waiting


def test_known_gathers_fail_after_a_join() -> None:
    table = NegotiationTable(2, 8)
    ask_all(table, [gathered("g", 1), gathered("g", 1)])
    table.settle()
    table.request(1, 0b1, [OperationRequest("join", "join.noname.0")], 0.0)
    table.request(0, 0b1, [], 0.0)
    assert table.settle().mask == 0b1
    table.request(0, 0b1, [], 0.0)
    assert "after ranks [1] have joined" in table.settle().failures[0].why


def test_who_has_left_is_named_to_those_who_ask() -> None:
    table = NegotiationTable(3, 8)
    ask_all(table, [summed("a", 2)] * 3)
    table.settle()
    table.request(0, 0b1, [summed("b", 2)], 0.0)
    table.leave(2, "rank 2 has shut down")
    told = table.settle().failures  # those who wait, at once
    assert {(failure.name, failure.only) for failure in told} == {("allreduce.a", (0,)), ("allreduce.b", (0,))}
    assert {failure.why for failure in told} == {"rank 2 has shut down"}
    for rank in (1, 0):  # the others when they request, and so is who asks again
        table.request(rank, 0b1, [summed("b", 2)], 0.0)
        told = table.settle().failures
        assert {(failure.name, failure.only) for failure in told} == {
            ("allreduce.a", (rank,)),
            ("allreduce.b", (rank,)),
        }
    assert not table.waiting


def test_join_fails_after_a_rank_has_left() -> None:
    table = NegotiationTable(3, 8)
    table.request(0, 0, [OperationRequest("join", "join.noname.0")], 0.0)
    assert not table.settle()
    table.leave(2, "rank 2 has shut down")
    (failure,) = table.settle().failures
    assert (failure.name, failure.why, failure.only) == ("join.noname.0", "rank 2 has shut down", (0,))
    table.request(1, 0, [OperationRequest("join", "join.noname.0")], 0.0)
    assert [failure.only for failure in table.settle().failures] == [(1,)]
    assert not table.waiting


def test_what_a_rank_has_asked_for_before_it_left_is_carried_out() -> None:
    table = NegotiationTable(3, 8)
    ask_all(table, [summed("a", 2)] * 3)
    table.settle()
    for rank in (2, 0):
        table.request(rank, 0b1, [summed("b", 2)], 0.0)
    table.leave(2, "rank 2 has shut down")
    table.request(1, 0b1, [summed("b", 2)], 0.0)
    answer = table.settle()
    assert {plan.request.name for plan in answer.plans} == {"allreduce.a", "allreduce.b"}
    assert not answer.failures


def test_stalled_operations_name_the_missing_ranks() -> None:
    table = NegotiationTable(3, 8)
    ask_all(table, [summed("a", 2)] * 3)
    table.settle()
    table.request(0, 0b1, [], 10.0)
    table.request(1, 0, [summed("b", 2)], 12.0)
    assert table.stalled(12.0, 5.0) == []
    found = {stalled.name: stalled for stalled in table.stalled(20.0, 5.0)}
    assert found["allreduce.a"].missing == (1, 2)
    assert found["allreduce.a"].seconds == 10.0
    assert found["allreduce.b"].missing == (0, 2)
    failure = table.give_up(found["allreduce.a"])
    assert failure.why == "stalled for 10 s: not submitted by ranks 1, 2"
    assert failure.late == (1, 2)
    table.give_up(found["allreduce.b"])
    assert not table.waiting


def refused(name: str, why: str = "bad") -> OperationRequest:
    return OperationRequest("allreduce", f"allreduce.{name}", refusal=why)


def test_who_waits_for_a_call_that_was_refused_is_told_at_once() -> None:
    table = NegotiationTable(3, 8)
    ask_all(table, [summed("a", 2)] * 3)
    table.settle()
    table.request(0, 0b1, [], 0.0)
    table.request(1, 0, [refused("a")], 0.0)
    (failure,) = table.settle().failures
    assert (failure.why, failure.only) == ("rank 1 refused it: bad", (0,))
    table.request(2, 0b1, [], 0.0)  # comes late
    (failure,) = table.settle().failures
    assert failure.only == (2,)
    assert not table.waiting


def test_the_next_time_waits_until_all_know_of_the_refusal() -> None:
    table = NegotiationTable(3, 8)
    table.request(1, 0, [refused("a")], 0.0)
    table.request(1, 0, [summed("a", 2)], 0.0)
    table.request(0, 0, [summed("a", 2)], 0.0)
    assert [failure.only for failure in table.settle().failures] == [(0,)]
    table.request(0, 0, [summed("a", 2)], 0.0)
    table.request(2, 0, [summed("a", 2)], 0.0)
    answer = table.settle()
    assert [failure.only for failure in answer.failures] == [(2,)]
    assert not answer.plans
    table.request(2, 0, [summed("a", 2)], 0.0)
    assert [plan.request.name for plan in table.settle().plans] == ["allreduce.a"]
    assert not table.waiting


def test_what_every_rank_refuses_is_forgotten() -> None:
    table = NegotiationTable(2, 8)
    for _ in range(2):
        ask_all(table, [refused("a")] * 2)
        assert not table.settle()
    assert not table.waiting
    assert table.stalled(100.0, 5.0) == []
