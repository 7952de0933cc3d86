"""Sub-masters: what they add up, what they send to the root, and who notices when somebody is gone."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.errors import IncompatibleError, PeerLostError, ProtocolError
from syncline.server import ServerNetwork, network_of, serve
from syncline.server.opening import TreeClient, groups_of, open_tree
from syncline.server.shard import Push
from syncline.server.space import SpaceDescription
from syncline.server.sub_master import AggregatingShard
from syncline.testing import hunt
from syncline.transports import SingleTransport, Transport
from syncline.transports.faults import Drop, Duplicate, Fault, Kill, Slow
from syncline.world import Simulation

SEEDS = 1000 if os.environ.get("SYNCLINE_HUNT") else 3
"""For each of the hunts below: about sixty in all in a plain run."""
WORKERS, STEPS = 4, 4
Tag = tuple[int, int]


def tag_of(worker: int, step: int) -> int:
    return worker * STEPS + step


class Journal:
    """What workers have pushed, and what they were told is in. It is the workers' own, not the servers'."""

    def __init__(self) -> None:
        self.pushed: set[Tag] = set()
        self.acknowledged: set[Tag] = set()
        self.late: set[Tag] = set()
        self.last: Tensor | None = None

    def check_read(self, values: Tensor, own: set[Tag]) -> None:
        """Each update is in once or not at all, was pushed by somebody, and one's own are all there."""
        assert set(values.tolist()) <= {0.0, 1.0}, f"an update counts twice: {values}"
        seen = {divmod(int(key), STEPS) for key in values.nonzero().view(-1)}
        assert seen <= self.pushed, f"{seen - self.pushed} were never pushed"
        assert own <= seen, f"a read lacks this worker's own {own - seen}"
        assert not self.late & seen, f"{self.late & seen} came late, and count"

    def check_end(self, found: Simulation) -> None:
        """Nothing that was acknowledged is lost."""
        assert self.last is not None
        self.check_read(self.last, self.acknowledged)
        done = set(range(WORKERS)) - set(found.killed)
        assert {(worker, STEPS - 1) for worker in done} <= self.acknowledged | self.late


def tagged(
    journal: Journal, synchronous: bool, masters: int = 2, deaths: bool = False, **options: Any
) -> Callable[[sl.World], None]:
    """Every worker pushes a one at a key of its own in each step, and looks at what it reads."""

    def work(world: sl.World) -> None:
        client = open_tree(
            world, "tags", WORKERS * STEPS, masters, torch.zeros(WORKERS * STEPS), synchronous=synchronous, **options
        )
        own: set[Tag] = set()
        draw, gone = random.Random(world.rank), world.transport.lost
        for step in range(STEPS):
            world.compute(draw.choice([0.1, 0.2, 1.0]))
            values = torch.zeros(WORKERS * STEPS)
            values[tag_of(world.rank, step)] = 1.0
            journal.pushed.add((world.rank, step))
            future = client.push_pull(None, values, min_clock=client.clock + 1 if synchronous else -1, tick=True)
            read = future.wait()
            assert read is not None
            (journal.late if future.late else own).add((world.rank, step))
            journal.check_read(read, own)
            journal.acknowledged |= own
        client.finish_training()
        while deaths and any(count < STEPS for rank, count in enumerate(client.steps()) if rank not in gone()):
            world.runtime.sleep(0.05)  # who may be killed must not be in a barrier
        if not deaths:
            world.barrier()
        journal.last = client.get()
        client.close()

    return work


def servers(count: int) -> list[Callable[[Transport], None]]:
    return [lambda channel: serve(network_of(channel, WORKERS, count))] * count


def network(workers: int, servers: int = 0) -> ServerNetwork:
    first = workers if servers else 0
    return ServerNetwork(
        SingleTransport(), tuple(range(workers)), tuple(range(first, first + (servers or workers))), 0, servers > 0
    )


# Who is whose sub-master.


def test_groups_are_neighbours_and_even() -> None:
    found = groups_of(network(7), 3)
    assert [group.workers for group in found] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [group.master for group in found] == [0, 3, 5]


def test_dedicated_servers_after_the_root_are_sub_masters() -> None:
    assert [group.master for group in groups_of(network(6, 4), 2)] == [7, 8]


def test_more_groups_than_workers_or_servers_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="masters=5 for 4 workers"):
        groups_of(network(4), 5)
    with pytest.raises(IncompatibleError, match=r"masters=2 on 2 dedicated servers.*--servers 3"):
        groups_of(network(4, 2), 2)


# The space of a sub-master.


def gathering(synchronous: bool, quorum: float = 1.0, mean: bool = False) -> AggregatingShard:
    parent = SpaceDescription(name="top 1", numel=2, servers=(0,), workers=(0, 2), synchronous=synchronous, mean=mean)
    return AggregatingShard(
        SpaceDescription(
            name="group 1", numel=2, servers=(0,), workers=(0, 1), synchronous=synchronous, quorum=quorum, mean=mean,
            parent=parent.to_json().decode(),
        ),
        0,
    )  # fmt: skip


def test_a_worker_reads_after_its_whole_step() -> None:
    """A child's first part is not in the weights before its step has gone up and come back."""
    space = gathering(synchronous=False)
    space.push(0, -1, Push(0, torch.ones(1)))
    assert not space.may_read(-1, 0)
    assert space.may_read(-1, 1)
    space.push(0, 0, Push(1, torch.ones(1)))
    space.tick(0, 0)
    assert not space.may_read(-1, 0)
    space.finish_sum([(0, torch.tensor([1.0, 1.0]))])
    assert space.may_read(-1, 0)


def bring(space: AggregatingShard, worker: int, clock: int, value: float) -> None:
    space.push(worker, clock, Push(0, torch.full((2,), value)))
    space.tick(worker, clock, weight=1.0)


def test_a_sum_is_relayed_when_all_have_pushed() -> None:
    space = gathering(synchronous=True, mean=True)
    bring(space, 1, 0, 2.0)
    assert not space.sums
    bring(space, 0, 0, 1.0)
    (push,) = space.sums[0].pushes
    assert push.values.tolist() == [3.0, 3.0]
    assert push.scale == 2.0
    assert not space.may_read(1)
    space.finish_sum([(0, torch.tensor([7.0, 8.0]))])
    assert space.may_read(1)
    assert space.weights.tolist() == [7.0, 8.0]
    assert not space.sums


def test_pushes_during_a_relay_make_the_next_sum() -> None:
    space = gathering(synchronous=False)
    bring(space, 0, 0, 1.0)
    assert len(space.sums) == 1
    bring(space, 1, 0, 2.0)
    space.push(1, 1, Push(0, torch.full((2,), 4.0)))  # half a step: it waits for its end
    assert len(space.sums) == 1
    assert not space.may_read(-1, 0)
    assert not space.may_read(-1, 1)
    space.finish_sum([(0, torch.ones(2))])
    assert space.may_read(-1, 0)
    assert not space.may_read(-1, 1)
    assert space.sums[0].pushes[0].values.tolist() == [2.0, 2.0]
    space.leave(1)
    space.finish_sum([(0, torch.ones(2))])
    assert not space.sums, "half a step of a lost child is no step"


def test_a_sub_master_of_another_model_is_refused() -> None:
    parent = SpaceDescription(name="top 1", numel=3, servers=(0,), workers=(0,))
    child = SpaceDescription(name="group 1", numel=2, servers=(0,), workers=(0,), parent=parent.to_json().decode())
    with pytest.raises(ProtocolError, match="a sub-master has 2 keys, and its parent has 3"):
        SpaceDescription.from_json(child.to_json())


# Bytes, faults.


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_sub_master_relays_less_than_it_receives(synchronous: bool) -> None:
    """Four children, one sum: about a quarter goes up; where nobody waits, at most as much as came together."""
    numel = 100_000

    def work(world: sl.World) -> None:
        client = open_tree(world, "big", numel, 2, torch.zeros(numel), synchronous=synchronous)
        for _ in range(3):
            client.push_pull(
                None, torch.ones(numel), tick=True, min_clock=client.clock + 1 if synchronous else -1
            ).wait()
        client.finish_training()
        world.barrier()
        client.close()

    aside: list[Callable[[Transport], None]] = [lambda channel: serve(network_of(channel, 8, 3))] * 3
    found = sl.simulate(work, 8, extra=aside)
    root, subs = 8, (9, 10)
    for sub in subs:
        children = range(4) if sub == subs[0] else range(4, 8)
        up = sum(message.nbytes for message in found.messages if (message.source, message.to) == (sub, root))
        came = sum(message.nbytes for message in found.messages if message.to == sub and message.source in children)
        weights = sum(message.nbytes for message in found.messages if (message.source, message.to) == (root, sub))
        came -= 4 * numel  # the first worker's put of the weights is no gradient
        assert came > 12 * 4 * numel
        assert up < (0.26 if synchronous else 0.76) * came
        assert weights < (0.26 if synchronous else 0.76) * came


def test_a_group_continues_without_a_killed_worker() -> None:
    journal = Journal()
    found = sl.simulate(tagged(journal, synchronous=True, deaths=True), WORKERS, faults=[Kill(3, at=1.15)])
    assert found.killed == (3,)
    journal.check_end(found)
    assert (3, STEPS - 1) not in journal.acknowledged


@pytest.mark.parametrize("synchronous", [True, False])
def test_an_error_names_the_killed_sub_master(synchronous: bool) -> None:
    """Worker 2 is the sub-master of 2 and 3; 0 and 1 go on without them."""
    journal = Journal()
    work = tagged(journal, synchronous, deaths=True)
    found = sl.simulate(work, WORKERS, faults=[Kill(2, at=1.15)], return_exceptions=True)
    assert found.results[0] is None
    assert found.results[1] is None
    error = found.results[3]
    assert isinstance(error, PeerLostError)
    assert error.peer == 2
    assert "rank 2" in str(error)


def test_workers_learn_that_the_root_is_lost() -> None:
    found = sl.simulate(
        tagged(Journal(), synchronous=True),
        WORKERS,
        faults=[Kill(4, at=1.15)],
        extra=servers(3),
        return_exceptions=True,
    )
    for error in found.results:
        assert isinstance(error, PeerLostError)
        assert "has lost its parent" in str(error) or error.peer == 4


def test_stopping_reaches_every_group() -> None:
    def work(world: sl.World) -> int:
        client = open_tree(world, "stop", 2, 2, torch.zeros(2))
        steps = 0
        while not client.status.stop:
            assert steps < 1000
            world.compute(0.1)
            client.push_pull(None, torch.ones(2), tick=True).wait()
            steps += 1
            if world.rank == 3 and steps == 3:
                client.stop()
        client.finish_training()
        world.barrier()
        client.close()
        return steps

    assert max(sl.simulate(work, WORKERS).results) < 8


def test_steps_and_clocks_belong_to_the_whole_tree() -> None:
    def work(world: sl.World) -> tuple[list[int], int]:
        client = open_tree(world, "told", 2, 2, torch.zeros(2), synchronous=True, mean=True)
        assert isinstance(client, TreeClient)
        if world.rank == 0:
            client.control({"do": "clocks", "clocks": [5, 5, 5, 5]})
        client.set_clocks([5, 5, 5, 5])
        world.barrier()
        assert client.steps() == [5] * WORKERS
        client.push_pull(None, torch.ones(2), tick=True, min_clock=client.clock + 1).wait()
        world.barrier()
        told = client.steps(), client.clock
        world.barrier()
        client.close()
        return told

    assert sl.simulate(work, WORKERS).results == (([6] * WORKERS, 6),) * WORKERS


# Hunts.


@pytest.mark.hunt
@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("faults", [(), (Slow(1, 4.0),), (Drop(0.1), Duplicate(0.2))])
def test_every_update_counts_once(synchronous: bool, faults: tuple[Fault, ...]) -> None:
    retry = 0.5 if any(isinstance(fault, Drop) for fault in faults) else None
    for seed in range(SEEDS):
        journal = Journal()
        hunt(tagged(journal, synchronous, retry_s=retry), WORKERS, [seed], faults=faults, invariant=journal.check_end)


@pytest.mark.hunt
@pytest.mark.parametrize("synchronous", [True, False])
def test_every_update_counts_once_with_dedicated_servers(synchronous: bool) -> None:
    for seed in range(SEEDS):
        journal = Journal()
        found = sl.simulate(tagged(journal, synchronous), WORKERS, seed=seed, chaos=True, extra=servers(3 + seed % 2))
        journal.check_end(found)


@pytest.mark.hunt
@pytest.mark.parametrize("masters", [1, 2])
def test_a_late_gradient_does_not_count(masters: int) -> None:
    late = 0
    for seed in range(SEEDS):
        journal = Journal()
        faults = (Slow(1 + seed % 3, 5.0),)
        found = sl.simulate(
            tagged(journal, synchronous=True, masters=masters, quorum=0.5), WORKERS, seed=seed, chaos=seed % 2 == 1,
            faults=faults,
        )  # fmt: skip
        journal.check_end(found)
        late += len(journal.late)
    assert late


@pytest.mark.hunt
@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("dedicated", [0, 3])
def test_a_killed_worker_loses_nothing_acknowledged(synchronous: bool, dedicated: int) -> None:
    """Not in chaos mode, where a kill may strike before there is a tree."""
    for seed in range(SEEDS):
        journal = Journal()
        victims = range(WORKERS) if dedicated else (1, 3)  # the others hold what all need
        victim = victims[seed % len(victims)]
        faults = (Kill(victim, at=random.Random(seed).uniform(0.05, 3.0)), Slow((victim + 1) % WORKERS, 3.0))
        work = tagged(journal, synchronous, deaths=True)
        found = sl.simulate(work, WORKERS, faults=faults, seed=seed, extra=servers(dedicated))
        journal.check_end(found)
