"""Faults, one-sided windows and hunts on the simulator."""

from __future__ import annotations

import os

import pytest
import torch

import syncline as sl
from syncline.testing import hunt


def steps(world: sl.World, count: int = 5) -> torch.Tensor:
    x = torch.full((64,), float(world.rank))
    for _ in range(count):
        world.compute(1e-4)
        x = sl.allreduce(x, op="sum", algorithm="ring")
    return x


def test_every_survivor_names_the_rank_that_was_killed() -> None:
    for seed in range(20):
        run = sl.simulate(steps, 5, faults=[sl.faults.Kill(2, at=6e-4)], seed=seed, return_exceptions=True)
        assert run.killed == (2,)
        assert run.results[2] is None
        for rank in (0, 1, 3, 4):
            assert isinstance(run.results[rank], sl.errors.PeerLostError), (seed, run.results[rank])
            assert run.results[rank].peer == 2
            assert "rank 2" in str(run.results[rank])


def test_a_send_that_waits_for_its_receive_ends_with_the_receiver() -> None:
    def send(world: sl.World) -> str:
        if world.rank == 1:
            world.compute(2.0)
        handle = world.transport.send(torch.ones(4, dtype=torch.uint8), to=1)
        if world.rank == 2:
            world.compute(3.0)  # the receiver is gone before this rank waits
        with pytest.raises(sl.errors.PeerLostError, match="rank 1 to receive 4 B") as caught:
            handle.wait()
        assert caught.value.peer == 1
        return "lost"

    found = sl.simulate(
        send, 3, network=sl.Network(eager=0), faults=[sl.faults.Kill(1, at=1.0)], return_exceptions=True
    )
    assert found.results == ("lost", None, "lost")
    assert found.time == pytest.approx(3.0), "nobody waits for the timeout"


def test_a_second_loss_is_not_blamed_on_the_first() -> None:
    """Those who go on after a loss and lose another later name that one."""

    def go_on(world: sl.World) -> list[int | None]:
        lost: list[int | None] = []
        for source in (1, 2) if world.rank == 0 else ():
            try:
                sl.recv(torch.zeros(1), source)
            except sl.errors.PeerLostError as error:
                lost.append(error.peer)
        world.compute(10.0)
        return lost

    run = sl.simulate(go_on, 3, faults=[sl.faults.Kill(1, at=1.0), sl.faults.Kill(2, at=2.0)])
    assert run.results[0] == [1, 2]


def test_a_killed_rank_is_gone_even_while_it_sleeps() -> None:
    woke = []

    def sleeper(world: sl.World) -> None:
        if world.rank == 1:
            world.compute(100.0)
            woke.append(world.rank)

    run = sl.simulate(sleeper, 2, faults=[sl.faults.Kill(1, at=1.0)])
    assert not woke
    assert run.time == 1.0


def test_a_receive_from_anyone_ends_at_the_timeout() -> None:
    def serve(world: sl.World) -> None:
        if world.rank == 0:
            sl.recv(torch.zeros(1))
        else:
            world.compute(1.0)

    run = sl.simulate(serve, 2, faults=[sl.faults.Kill(1, at=0.5)], timeout=30.0, return_exceptions=True)
    assert isinstance(run.results[0], sl.errors.PeerLostError)
    assert run.time == pytest.approx(30.0)


def test_a_receive_ends_with_the_rank_that_passes_the_request_on() -> None:
    def ask(world: sl.World) -> tuple[float, int | None]:
        if world.rank:
            world.compute(2.0)
            return 0.0, None
        for _ in range(2):  # it is lost meanwhile, and before
            reply = world.transport.recv_bytes(8, 1, 5, via=2)
            with pytest.raises(sl.errors.PeerLostError) as caught:
                reply.wait()
        cancelled = world.transport.recv_bytes(8, 1, 5)
        cancelled.cancel()
        with pytest.raises(sl.errors.PeerLostError, match="was cancelled"):
            cancelled.wait()
        return world.runtime.now(), caught.value.peer

    run = sl.simulate(ask, 3, faults=[sl.faults.Kill(2, at=0.5)], timeout=30.0)
    assert run.results[0] == (0.5, 2)


def test_slow_ranks_take_longer() -> None:
    quick = sl.simulate(steps, 4).time
    slow = sl.simulate(steps, 4, faults=[sl.faults.Slow(1, 10.0)]).time
    permanent = sl.simulate(steps, 4, network=sl.Network(slow={1: 10.0})).time
    assert slow > 3 * quick
    assert permanent == pytest.approx(slow)
    assert sl.simulate(steps, 4, faults=[sl.faults.Slow(1, 10.0, start=1e3)]).time == quick


def test_delays_and_a_partition_that_heals_change_the_time_alone() -> None:
    plain = sl.simulate(steps, 4)
    late = sl.simulate(steps, 4, faults=[sl.faults.Delay(1e-3, source=0, to=1)])
    apart = sl.simulate(steps, 4, faults=[sl.faults.Partition((0, 1), start=2e-4, stop=0.5)])
    for run in (late, apart):
        assert all(torch.equal(a, b) for a, b in zip(run.results, plain.results, strict=True))
    assert late.time > plain.time
    assert apart.time > 0.5


def test_a_permanent_partition_ends_in_lost_peers() -> None:
    run = sl.simulate(steps, 4, faults=[sl.faults.Partition((0, 1), start=2e-4)], timeout=10.0, return_exceptions=True)
    assert all(isinstance(result, sl.errors.PeerLostError) for result in run.results)
    assert len({result.peer for result in run.results}) == 1


def count_lossy(world: sl.World) -> int:
    if world.rank == 0:
        for _ in range(200):
            world.transport.send(torch.ones(1), 1, tag=1, lossy=True)
            world.transport.send(torch.ones(1), 1, tag=2).wait()
        sl.send(torch.ones(1), to=1)
        return 0
    sl.recv(torch.zeros(1), source=0)
    counted = []
    for tag in (1, 2):
        handles = [world.transport.recv(torch.zeros(1), 0, tag) for _ in range(500)]
        counted.append(sum(handle.done() for handle in handles))  # type: ignore[attr-defined]
    assert counted[1] == 200, "a message that was not sent as lossy was lost or doubled"
    return counted[0]


def test_only_lossy_messages_are_dropped_and_duplicated() -> None:
    assert sl.simulate(count_lossy, 2).results[1] == 200
    assert 100 < sl.simulate(count_lossy, 2, faults=[sl.faults.Drop(0.2)]).results[1] < 200
    assert 200 < sl.simulate(count_lossy, 2, faults=[sl.faults.Duplicate(0.2)]).results[1] < 300


def test_a_put_lands_while_the_target_computes() -> None:
    def put(world: sl.World) -> tuple[float, float]:
        window = world.transport.memory.window(4, torch.float32)
        if world.rank == 0:
            window.put(torch.full((4,), 7.0), to=1)
            window.flush(1)
            return world.runtime.now(), 0.0
        before = float(window.local[0])
        world.compute(1.0)
        return before, float(window.local[0])

    run = sl.simulate(put, 2)
    assert run.results[0][0] < 1e-3, "the flush waited for the target"
    assert run.results[1] == (0.0, 7.0)


def test_accumulates_of_all_add_up_in_any_order() -> None:
    def add(world: sl.World) -> list[float]:
        window = world.transport.memory.window(2, torch.float64)
        for step in range(10):
            window.accumulate(torch.tensor([1.0, float(step)], dtype=torch.float64), to=step % world.size)
        window.flush()
        world.barrier()
        return window.local.tolist()

    for seed in range(20):
        results = sl.simulate(add, 3, seed=seed, chaos=True).results
        assert [sum(column) for column in zip(*results, strict=True)] == [30.0, 135.0]


def test_windows_must_agree() -> None:
    with pytest.raises(sl.errors.WorldError, match="different windows"):
        sl.simulate(lambda world: world.transport.memory.window(2 + world.rank, torch.float32), 2)


FAULTS = (sl.faults.Slow(1, 3.0), sl.faults.Delay(1e-3, probability=0.2), sl.faults.Kill(2, at=3e-4))


def survivors_agree(run: sl.Simulation) -> None:
    for rank, result in enumerate(run.results):
        if rank in run.killed:
            assert result is None
        elif isinstance(result, Exception):
            assert isinstance(result, sl.errors.PeerLostError)
            assert result.peer == 2, (rank, result)
        else:
            assert torch.equal(result, torch.full((64,), 6.0 * 4 ** (3 - 1)))


@pytest.mark.hunt
def test_any_order_with_faults() -> None:
    """Whatever the order: the right sum, or the right rank named."""
    seeds = range(20_000 if os.environ.get("SYNCLINE_HUNT") else 1000)
    assert hunt(
        lambda world: steps(world, 3), 4, seeds, faults=FAULTS, invariant=survivors_agree, return_exceptions=True
    ) == len(seeds)


def test_a_hunt_says_how_to_replay() -> None:
    def unlucky(run: sl.Simulation) -> None:
        assert run.results[0] != run.seed or run.seed < 3, "unlucky"

    with pytest.raises(AssertionError, match=r"seed 3 breaks it: unlucky[\s\S]*seed=3, chaos=True"):
        hunt(lambda world: 3, 1, range(10), invariant=unlucky)


def test_faults_outside_the_world_are_refused() -> None:
    with pytest.raises(sl.errors.WorldError, match="outside the world of 2"):
        sl.simulate(lambda world: None, 2, faults=[sl.faults.Kill(2)])
