"""A shard without transport and requests: synchronous steps, quorums, clocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.errors import ProtocolError
from syncline.server.shard import (
    MAX_KEPT_SHARDS,
    MAX_STEPS_AHEAD,
    MIN_SHARD_BYTES,
    NO_CLOCK,
    ParameterShard,
    Push,
    WorkerClocks,
)
from tests.server.handler_client import describe


def synchronous(**options: Any) -> ParameterShard:
    return ParameterShard(describe(synchronous=True, **options), 0)


def push(values: torch.Tensor, first: int = 0, **options: Any) -> Push:
    return Push(first, values.clone(), **options)


def test_synchronous_pushes_are_added_in_the_order_of_workers() -> None:
    torch.manual_seed(1)
    rows = [torch.randn(8) * 10.0**power for power in (0, 6, -3)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        space = synchronous(workers=(0, 1, 2), rules=("sgd(0.1)",))
        for worker in order:
            assert not space.weights.any()
            space.push(worker, 0, push(rows[worker], scale=1 / 3))
            space.tick(worker, 0)
        wanted = torch.zeros(8).add_(((rows[0] + rows[1]) + rows[2]).mul_(1 / 3), alpha=-0.1)
        assert torch.equal(space.weights, wanted)


def test_different_splits_are_added_and_each_key_applied_once() -> None:
    space = synchronous(rules=("momentum(1.0, mu=0.5)",))
    space.push(0, 0, push(torch.ones(8)))
    space.push(1, 0, push(torch.ones(3)))
    space.push(1, 0, push(torch.ones(5), first=3))
    for worker in (0, 1):
        space.tick(worker, 0)
    assert space.weights.tolist() == [-2.0] * 8  # twice would be -3 somewhere
    space.push(0, 1, push(torch.ones(2), keys=torch.tensor([1, 6])))
    space.push(1, 1, push(torch.zeros(8)))
    for worker in (0, 1):
        space.tick(worker, 1)
    assert space.weights.tolist() == [-3.0, -4.0, -3.0, -3.0, -3.0, -3.0, -4.0, -3.0]


def test_a_mean_is_over_gradients_not_over_workers() -> None:
    """The second worker's batch is half as large: a gradient and a half."""
    space = synchronous(mean=True)
    for worker, weight in ((0, 1.0), (1, 0.5)):
        space.push(worker, 0, push(torch.full((8,), weight)))
        space.tick(worker, 0, weight)
    assert space.weights.tolist() == [1.0] * 8


def test_an_incomplete_step_of_a_lost_worker_is_dropped() -> None:
    space = synchronous()
    space.push(1, 0, push(torch.ones(8)))
    space.push(0, 0, push(torch.ones(8)))
    space.tick(0, 0)
    assert space.open_step == 0
    space.leave(1)
    assert space.open_step == 1
    assert space.weights.tolist() == [1.0] * 8


def test_a_complete_step_of_a_lost_worker_counts() -> None:
    space = synchronous()
    space.push(1, 0, push(torch.ones(8)))
    space.tick(1, 0)
    space.leave(1)
    space.push(0, 0, push(torch.ones(8)))
    space.tick(0, 0)
    assert space.weights.tolist() == [2.0] * 8


def test_a_push_after_the_quorum_is_late() -> None:
    space = synchronous(workers=(0, 1, 2), quorum=0.5)
    for worker in (0, 1):
        space.push(worker, 0, push(torch.ones(8)))
        space.tick(worker, 0)
    assert space.open_step == 1
    assert space.is_late(2, 0)
    space.skip(2)
    assert space.clocks.of == {0: 1, 1: 1, 2: 1}
    assert space.late_steps == {2: 1}


def test_a_worker_skips_steps_it_was_late_for_elsewhere() -> None:
    space = synchronous(workers=(0, 1, 2), quorum=0.5)
    space.check_step(2, 3)  # another server is at step 3 already
    assert space.clocks.of[2] == 3
    assert space.open_step == 0, "a worker that skips a step has not pushed it"
    for worker in (0, 1):
        space.tick(worker, 0)
    assert space.open_step == 1
    with pytest.raises(ProtocolError, match="worker 2 is at clock 3, and sends a step of clock 1"):
        space.check_step(2, 1)
    full = synchronous(workers=(0, 1, 2))
    with pytest.raises(ProtocolError, match="worker 2 is at clock 0, and sends a step of clock 3"):
        full.check_step(2, 3)


def test_a_step_that_no_worker_can_push_is_closed() -> None:
    """Seed 132 of the hunt: the one who had pushed it elsewhere is dead, the other skipped it."""
    space = synchronous(quorum=0.5)
    space.check_step(0, 1)
    space.tick(0, 1)
    assert space.open_step == 0
    space.leave(1)
    assert space.open_step == 2


def test_kept_pushes_of_one_worker_are_bounded() -> None:
    numel = MIN_SHARD_BYTES // 8  # half of the size from which the limit grows with the shard
    space = synchronous(numel=numel)
    most = MAX_KEPT_SHARDS * MIN_SHARD_BYTES // (4 * numel)
    for _ in range(most):
        space.push(0, 0, push(torch.ones(numel)))
    with pytest.raises(ProtocolError, match="wait for their steps to close"):
        space.push(0, 0, push(torch.ones(numel)))
    space.push(1, 0, push(torch.ones(numel)))  # others may
    with pytest.raises(ProtocolError, match="and step 0 is open"):
        space.push(1, MAX_STEPS_AHEAD + 1, push(torch.ones(numel)))
    for worker in (0, 1):
        space.tick(worker, 0)
    assert space.weights[0] == most + 1
    space.push(0, 1, push(torch.ones(numel)))  # there is room again


def test_clocks_of_a_checkpoint_are_set() -> None:
    space = synchronous()
    space.set_clocks([3, 5])
    assert space.open_step == 3
    for clock in (3, 4):
        space.push(0, clock, push(torch.ones(8)))
        space.tick(0, clock)
    assert space.open_step == 5, "worker 1 had pushed both before"
    with pytest.raises(ProtocolError, match="may differ by at most"):
        space.set_clocks([0, MAX_STEPS_AHEAD + 1])


def test_reads_wait_for_the_slowest_training_worker() -> None:
    space = ParameterShard(describe(), 0)
    space.tick(0, 0)
    assert space.may_read(0)
    assert not space.may_read(1)
    space.leave(1)
    assert space.may_read(1)
    space.leave(0)
    assert space.min_clock == NO_CLOCK
    other = ParameterShard(describe(), 0)
    other.stopping = True
    assert other.may_read(10**6)


def test_staleness_counts_steps_of_others_since_the_last_read() -> None:
    space = ParameterShard(describe(damped=True, rules=("sgd(1.0)",)), 0)
    space.note_read(0)
    for clock in range(4):
        space.tick(1, clock)
    assert space.staleness(0) == 4
    space.push(0, -1, push(torch.ones(8)))
    assert space.weights.tolist() == [-0.25] * 8


def test_a_clock_that_jumps_is_refused() -> None:
    clocks = WorkerClocks([0, 1])
    with pytest.raises(ProtocolError, match="worker 0 is at clock 0, and sends a step of clock 1"):
        clocks.tick(0, 1)
    with pytest.raises(ProtocolError, match="member 7 has no clock here"):
        clocks.tick(7, 0)
    assert clocks.leave(1)
    assert not clocks.leave(1)


def test_asking_for_state_names_changes_no_numbers() -> None:
    """Another worker may ask what a shard remembers while one writes or reads by numbers."""
    space = ParameterShard(describe(rules=("momentum(1.0, mu=0.5)",)), 0)
    space.number_state(["first", "second"])
    space.state_names()
    assert space.read(2, 0, 3).tolist() == [0.0] * 3


def test_a_worker_joins_at_the_slowest_clock() -> None:
    space = ParameterShard(describe(workers=(0, 1)), 0)
    for clock in range(3):
        space.tick(0, clock)
    space.tick(1, 0)
    assert space.join(5, 0) == 1
    assert (space.clocks.slowest, space.clocks.total_steps, space.clocks.live) == (1, 4, 3)
    assert space.join(5, 2) == 2, "another server has a later clock"
    space.leave(1, lost=True)
    assert not space.may_read(3), "the newcomer is the slowest"
    space.pause(5)
    assert space.may_read(3)
    assert (space.clocks.live, space.clocks.present) == (1, 2)
    assert space.join(5, 0) == 3, "after a pause it continues with the others"
    space.leave(0)
    space.leave(5)
    assert space.join(6, 0) == 3, "alone, it continues at the last clock"


def test_no_step_waits_for_a_worker_that_joins_later() -> None:
    space = synchronous(workers=(0, 1))
    space.tick(0, 0)
    assert space.join(5, 1) == 1
    space.tick(1, 0)
    assert space.open_step == 1, "the newcomer takes no part in step 0"
    for worker in (0, 1):
        space.tick(worker, 1)
    assert space.open_step == 1
    space.tick(5, 1)
    assert space.open_step == 2
    with pytest.raises(ProtocolError, match="joins at clock"):
        space.join(6, 3 + MAX_STEPS_AHEAD)


def test_a_snapshot_has_workers_that_joined_and_that_pause() -> None:
    space, copy = (ParameterShard(describe(workers=(0, 1)), 0) for _ in range(2))
    for worker in (0, 1):
        space.tick(worker, 0)
    space.join(5, 0)
    space.pause(1)
    copy.load_snapshot(space.snapshot())
    for clocks in (space.clocks, copy.clocks):
        clocks.tick(5, 1)
        assert (clocks.slowest, clocks.total_steps, clocks.live, clocks.present) == (1, 3, 2, 3)
