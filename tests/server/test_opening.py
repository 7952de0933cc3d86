"""The store on the simulator: what users and strategies do with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.server import (
    Client,
    Future,
    handler,
    network_of,
    open_space,
    protocol,
    serve,
    server_network,
    store,
    watch_space,
)
from syncline.transports import Transport
from syncline.world.simulation import ExtraProcess


@handler("largest_of_both")
def largest(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
    torch.maximum(weights, values, out=weights)


def serves(workers: int, servers: int, evaluators: int = 0) -> list[ExtraProcess | Callable[[Transport], Any]]:
    return [lambda transport: serve(network_of(transport, workers, servers, evaluators))] * servers


def run(work: Callable[[sl.World], Any], workers: int = 3, servers: int = 0, **options: Any) -> tuple[Any, ...]:
    return sl.simulate(work, workers, extra=serves(workers, servers), **options).results


def done(future: Future) -> Tensor:
    found = future.wait()
    assert found is not None
    return found


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_ranges_and_lists(workers: int, servers: int) -> None:
    def work(world: sl.World) -> list[Tensor]:
        with store(10) as space:
            space.push(range(2, 7), torch.ones(5)).wait()
            space.push((0, 1), torch.ones(1)).wait()
            space.push(torch.tensor([1, 5, 9]), torch.ones(3)).wait()
            world.barrier()
            return [done(space.pull()), done(space.pull(slice(-2, None))), done(space.pull(torch.tensor([0, 5])))]

    for whole, end, picked in run(work, workers, servers):
        assert (whole / workers).tolist() == [1, 1, 1, 1, 1, 2, 1, 0, 0, 1]
        assert (end / workers).tolist() == [0, 1]
        assert (picked / workers).tolist() == [1, 2]


@pytest.mark.parametrize("piece", [3, 7, protocol.MAX_PIECE_ELEMENTS])
def test_many_in_flight_over_several_servers(piece: int) -> None:
    """More pieces than a window has room for, and more requests than there are slots."""

    def work(world: sl.World) -> Tensor:
        client = open_space(world, "s", 100, piece=piece)
        futures = [client.push_pull(None, torch.ones(100)) for _ in range(80)]
        for future in reversed(futures):
            assert done(future).min() >= 1
        world.barrier()
        found = client.get()
        client.close()
        return found

    for found in run(work, 2, 3):
        assert found.tolist() == [160.0] * 100


def test_reads_that_wait_for_a_step_of_many_pieces() -> None:
    """Seen as a deadlock: the reads filled the window before the last piece could end the step."""

    def work(world: sl.World) -> Tensor:
        client = open_space(world, "s", 200, piece=2, synchronous=True)
        found = done(client.push_pull(None, torch.ones(200), tick=True, min_clock=1))
        client.close()
        return found

    for found in run(work, 2, 1):
        assert found.tolist() == [2.0] * 200


def test_a_waiting_read_keeps_numbers_within_the_slots() -> None:
    """Seen as a refusal: answers are kept for so many requests, counted from the first that is not answered."""

    def work(world: sl.World) -> float:
        client = open_space(world, "s", 4)
        world.compute(100.0 * world.rank)
        client.push((0, 0), torch.empty(0), tick=True).wait()
        waiting = client.pull(min_clock=1)
        for _ in range(2 * protocol.REPLY_SLOTS if world.rank == 0 else 0):
            client.push(None, torch.ones(4)).wait()
        waiting.wait()
        world.barrier()
        found = client.get().sum().item()
        client.close()
        return float(found)

    assert run(work, 2, 1) == (4.0 * 2 * protocol.REPLY_SLOTS,) * 2


def test_timestamps_and_dependencies() -> None:
    def work(world: sl.World) -> list[float]:
        with store(4, rule="assign") as space:
            first = space.push(None, torch.full((4,), 1.0))
            second = space.push(None, torch.full((4,), 2.0), after=[first.timestamp])
            found = space.pull(after=[first.timestamp, second.timestamp])
            assert first.timestamp < second.timestamp < found.timestamp
            return done(found).tolist()

    assert run(work, 1, 2)[0] == [2.0] * 4


def test_callbacks_get_their_future_once_and_may_use_the_store() -> None:
    def work(world: sl.World) -> list[list[float]]:
        seen: list[list[float]] = []
        ended = world.runtime.event()
        with store(2) as space:

            def back(future: Future) -> None:
                seen.append(done(future).tolist())
                space.push(None, torch.ones(2)).wait()
                ended.set()

            space.push_pull(None, torch.ones(2), callback=back)
            assert ended.wait(60)
            seen.append(space.get().tolist())
        return seen

    assert run(work, 1)[0] == [[1.0, 1.0], [2.0, 2.0]]


def test_get_put_and_add_ignore_the_rule() -> None:
    def work(world: sl.World) -> list[float]:
        with store(3, rule="sgd(1.0)", initial=torch.tensor([5.0, 5.0, 5.0])) as space:
            if world.rank == 0:
                space.put(range(1), torch.tensor([7.0]))
                space.add(torch.tensor([1, 2]), torch.tensor([1.0, 2.0]))
                space.push(None, torch.ones(3)).wait()
            world.barrier()
            return space.get().tolist()

    assert run(work, 2) == ([6.0, 5.0, 6.0], [6.0, 5.0, 6.0])


def test_handlers_by_name() -> None:
    def work(world: sl.World) -> list[float]:
        with store(3, rule="handler('largest_of_both')") as space, store(3) as other:
            space.push(None, torch.tensor([1.0, 2.0, 3.0]) * (-1) ** world.rank).wait()
            other.push(torch.tensor([0, 2]), torch.tensor([4.0, 5.0 + world.rank]), handler="largest_of_both").wait()
            world.barrier()
            return [*space.get().tolist(), *other.get().tolist()]

    assert run(work, 2, 1)[0] == [1.0, 2.0, 3.0, 4.0, 0.0, 6.0]


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_a_fast_worker_waits_at_the_bound(slack: int) -> None:
    """One worker stands at clock 0: the others finish slack + 1 steps, and then wait for it."""

    def work(world: sl.World) -> int:
        client = open_space(world, "ssp", 4)
        if world.rank == 0:
            world.compute(1000.0)
            seen = min(client.steps()[1:])
            for _ in range(10):
                client.push((0, 0), torch.empty(0), tick=True).wait()
        else:
            for _ in range(10):
                client.push(None, torch.ones(4), tick=True)
                client.pull(min_clock=client.clock - slack).wait()
                world.compute(1.0)
            seen = client.clock
        client.close()
        return seen

    results = run(work, 3, 1, timeout=10_000.0)
    assert results == (slack + 1, 10, 10)


def test_staleness_of_a_read_is_how_far_the_slowest_is_behind() -> None:
    def work(world: sl.World) -> list[int]:
        client = open_space(world, "ssp", 4)
        found = []
        for _ in range(4):
            world.compute(1.0 if world.rank == 0 else 0.1)
            client.push(None, torch.ones(4), tick=True)
            future = client.pull(min_clock=max(0, client.clock - 2))
            future.wait()
            found.append(future.staleness)
        client.close()
        return found

    slow, fast = run(work, 2, 1)
    assert set(slow) == {0}
    assert max(fast) == 2


def test_observers_before_and_after_the_space_is_there() -> None:
    seen: dict[str, Any] = {}

    def evaluate(transport: Transport) -> None:
        network = network_of(transport, workers=2, evaluators=1)
        early = watch_space(network, "watched", 1)
        seen["first"] = early.numel
        while min(early.steps()) < 3:
            transport.runtime.sleep(0.01)
        late = watch_space(network, "later", 1)
        seen["values"] = [early.get().tolist(), late.get().tolist()]
        with pytest.raises(sl.errors.ProtocolError, match="has no clock"):
            early.push(None, torch.ones(5), tick=True).wait()
        early.close()
        late.close()

    def work(world: sl.World) -> None:
        world.compute(1.0)
        client = open_space(world, "watched", 5)
        other = open_space(world, "later", 2, initial=torch.ones(2))
        for _ in range(3):
            client.push(None, torch.ones(5), tick=True).wait()
        client.close()
        other.close()

    sl.simulate(work, 2, extra=[ExtraProcess(evaluate, "evaluator")])
    assert seen == {"first": 5, "values": [[6.0] * 5, [1.0, 1.0]]}


def test_successive_spaces_start_fresh_and_leave_nothing() -> None:
    def work(world: sl.World) -> list[float]:
        found = []
        for _ in range(3):
            with store(2) as space:
                space.push(None, torch.ones(2)).wait()
                world.barrier()
                found.append(space.get().sum().item())
                world.barrier()
        return found

    assert run(work, 2) == ([4.0] * 3, [4.0] * 3)


def test_closing_in_any_order() -> None:
    def work(world: sl.World) -> float:
        one, two = store(2), store(2)
        one.push(None, torch.ones(2)).wait()
        world.compute(float(world.rank))
        first, second = (one, two) if world.rank % 2 else (two, one)
        first.close()
        first.close()
        second.close()
        with pytest.raises(sl.errors.WorldError, match="is closed here"):
            one.get()
        return 1.0

    assert run(work, 2, 1) == (1.0, 1.0)


def test_closing_waits_for_pending_requests() -> None:
    def work(world: sl.World) -> list[float]:
        watching = store(4)
        space = store(4)
        space.push(None, torch.ones(4), callback=None)
        space.close()
        watching.close()
        return [1.0]

    assert run(work, 3) == ([1.0],) * 3


@pytest.mark.parametrize("rule", ["momentum(0.1, mu=0.9)", "adam(0.1)", "torch('Adam', lr=0.1)"])
def test_a_rules_state_is_saved_and_restored(rule: str) -> None:
    def train(client: Client, steps: range) -> None:
        for step in steps:
            client.push(None, torch.sin(torch.arange(10.0) + step)).wait()

    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        kept = open_space(world, "whole", 10, rules=(rule,), piece=3)
        train(kept, range(6))
        first = open_space(world, "first", 10, rules=(rule,), piece=3)
        train(first, range(3))
        names = first.optimizer_state()
        saved = [first.get(), *(first.read_state(number + 1) for number in range(len(names)))]
        second = open_space(world, "second", 10, rules=(rule,), piece=3, initial=saved[0])
        assert second.optimizer_state(names) == names
        for number, values in enumerate(saved[1:]):
            second.write_state(number + 1, values)
        train(second, range(3, 6))
        found = kept.get(), second.get()
        for client in (kept, first, second):
            client.close()
        return found

    for servers in (1, 2):
        whole, resumed = run(work, 1, servers)[0]
        assert torch.equal(whole, resumed)


def test_clocks_continue_from_a_checkpoint() -> None:
    def work(world: sl.World) -> list[int]:
        client = open_space(world, "synchronous", 4, synchronous=True)
        if world.rank == 0:
            client.control({"do": "clocks", "clocks": [7, 7]}, everywhere=True)
        client.clock = 7
        world.barrier()
        assert done(client.push_pull(None, torch.ones(4), tick=True, min_clock=8)).tolist() == [2.0] * 4
        found = client.steps()
        world.barrier()
        client.close()
        return found

    assert run(work, 2, 2) == ([8, 8], [8, 8])


def test_two_clients_of_one_process_stop_and_finish() -> None:
    def work(world: sl.World) -> tuple[bool, int]:
        client = open_space(world, "s", 4)
        if world.rank == 0:
            client.finish_training()
        else:
            client.push(None, torch.ones(4), tick=True)
            client.pull(min_clock=1).wait()  # worker 0 holds nobody back
            client.stop()
        world.barrier()
        client.pull(min_clock=10**6).wait()  # reads wait no longer
        found = client.status.stop, client.status.live
        world.barrier()
        client.close()
        return found

    assert run(work, 2, 1) == ((True, 1), (True, 1))


def test_a_member_of_the_network_that_serves_no_shard_of_a_space() -> None:
    def work(world: sl.World) -> list[float]:
        network = server_network(world)
        client = open_space(world, "one", 6, servers=network.servers[1:2])
        client.push(None, torch.ones(6)).wait()
        world.barrier()
        found = client.get().tolist()
        client.close()
        return found

    assert run(work, 3) == ([3.0] * 6,) * 3
