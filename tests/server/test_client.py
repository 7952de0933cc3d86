"""A client by itself: the order of its requests, refused steps, answers that do not come, callbacks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.server import Client, Future, handler, open_space, protocol, store
from syncline.server.protocol import REQUEST_BYTES, ReplyHeader, RequestHeader
from syncline.transports import Transport
from syncline.transports.faults import Delay
from tests.server.test_faults import Watched
from tests.server.test_opening import done, run

LARGE = 20_000
"""Its values are too long to go with their header."""


@handler("refuses_all")
def refuses_all(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
    raise RuntimeError("not today")


# Order.


def test_after_orders_requests_across_servers() -> None:
    def work(world: sl.World) -> list[float]:
        client = open_space(world, "s", 4)
        begun = world.runtime.now()
        first = client.push((0, 2), torch.ones(2))  # server 0, which is slow to hear
        client.push((2, 4), torch.ones(2)).wait()
        moments = [world.runtime.now() - begun]
        second = client.push((2, 4), torch.ones(2), after=[first.timestamp])
        moments.append(world.runtime.now() - begun)
        second.wait()
        client.close()
        return moments

    alone, dependent = run(work, 1, 2, faults=[Delay(50.0, source=0, to=1)])[0]
    assert alone < 50.0 <= dependent


def test_after_waits_for_a_waiting_read() -> None:
    def work(world: sl.World) -> tuple[list[float], float]:
        client = open_space(world, "s", 2)
        if world.rank == 1:
            world.compute(10.0)
            client.push((0, 0), torch.empty(0), tick=True).wait()
            client.close()
            return [], 0.0
        client.push((0, 0), torch.empty(0), tick=True).wait()
        read = client.pull(min_clock=1)
        client.push(None, torch.ones(2), after=[read.timestamp])
        found = done(read).tolist(), world.runtime.now()
        client.close()
        return found

    values, moment = run(work, 2, 1)[0]
    assert values == [0.0, 0.0]
    assert moment >= 10.0


def test_after_works_with_many_requests_and_pieces() -> None:
    def work(world: sl.World) -> list[bool]:
        client = open_space(world, "s", 100, piece=2)
        slow = client.push((0, 2), torch.ones(2))
        for _ in range(200):
            client.push((50, 52), torch.ones(2))
        client.push((50, 52), torch.ones(2), after=[slow.timestamp])
        both = client.push_pull((0, 50), torch.ones(50), tick=True)  # too many for one window
        client.push((60, 62), torch.ones(2), after=[both.timestamp])
        found = [slow.done(), both.done()]
        client.close()
        return found

    assert run(work, 1, 2, faults=[Delay(50.0, source=0, to=1)])[0] == [True, True]


@pytest.mark.parametrize("stamp", [0, -1, 2, 10**6])
def test_an_unknown_timestamp_is_refused(stamp: int) -> None:
    with sl.init(), store(2) as space:
        assert space.push(None, torch.ones(2)).timestamp == 1
        with pytest.raises(sl.errors.ProtocolError, match=rf"after={stamp}: .* has given timestamps 1 to 1"):
            space.push(None, torch.ones(2), after=[stamp])
        assert space.get().tolist() == [1.0, 1.0]


# Steps.


def test_infinite_rates_are_refused_before_sending() -> None:
    with sl.init() as world:
        client = open_space(world, "s", 2)
        for rate, scale in ((math.inf, 1.0), (math.nan, 1.0), (0.1, math.nan), (None, math.inf)):
            with pytest.raises(sl.errors.ProtocolError, match="both are finite numbers"):
                client.push(None, torch.ones(2), rate=rate, scale=scale, tick=True)
            with pytest.raises(sl.errors.ProtocolError, match="both are finite numbers"):
                client.push_pull(None, torch.ones(2), rate=rate, scale=scale, tick=True)
        assert client.clock == 0
        client.push(None, torch.ones(2), tick=True).wait()
        assert (client.clock, client.steps(), client.get().tolist()) == (1, [1], [1.0, 1.0])
        client.close()


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_continues_after_a_refused_step(synchronous: bool, servers: int) -> None:
    """The handler has keys on the first server only: the others must not run ahead of it."""

    def work(world: sl.World) -> tuple[list[int], int, list[float]]:
        client = open_space(world, "s", 4, synchronous=synchronous)
        futures = [client.push(range(1), torch.ones(1), handler="refuses_all", tick=True)]
        futures += [client.push(None, torch.ones(4), tick=True) for _ in range(3)]  # under way before the refusal
        with pytest.raises(sl.errors.ProtocolError, match="not today"):
            futures[0].wait()
        for future in futures[1:]:
            future.wait()
        client.push_pull(None, torch.ones(4), tick=True, min_clock=5).wait()
        world.barrier()
        found = client.steps(), client.clock, client.get().tolist()
        world.barrier()
        client.close()
        return found

    assert run(work, 2, servers) == (([5, 5], 5, [8.0] * 4),) * 2


def test_a_worker_with_a_wrong_clock_gets_the_servers() -> None:
    with sl.init() as world:
        client = open_space(world, "s", 2)
        client.clock = 7
        astray = [client.push(None, torch.ones(2), tick=True) for _ in range(3)]
        for future in astray:
            with pytest.raises(sl.errors.ProtocolError, match="worker 0 is at clock 0"):
                future.wait()
        assert client.clock == 0
        client.push(None, torch.ones(2), tick=True).wait()
        assert client.steps() == [1]
        client.close()


# On the wire.


class Hesitant:
    """A transport that pauses between the first header and its body."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._paused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, buffer: Tensor, to: int, tag: int = 0, **options: Any) -> Any:
        sent = self._transport.send(buffer, to, tag, **options)
        if buffer.numel() == REQUEST_BYTES and not self._paused:
            self._paused = True
            self._transport.runtime.sleep(1.0)
        return sent


def test_no_task_sends_between_a_header_and_its_body() -> None:
    def work(world: sl.World) -> list[float]:
        client = open_space(world, "s", 2 * LARGE)
        sender, line = client.sender, client.sender.connections[0]
        line.transport = Hesitant(line.transport)  # type: ignore[assignment]

        def push(count: int) -> None:
            body = torch.ones(count).view(torch.uint8)
            pending = sender.send(line, RequestHeader(protocol.PUSH, count=count), body)
            sender.finish(pending)
            assert pending.error is None, pending.error

        tasks = [world.runtime.spawn(push, count) for count in (LARGE, 2 * LARGE)]
        for task in tasks:
            task.join()
        found = client.get()[[0, -1]].tolist()
        client.close()
        return found

    assert run(work, 1, 1)[0] == [2.0, 1.0]


def test_a_missing_reply_is_never_acknowledged() -> None:
    watched = Watched(2)

    def work(world: sl.World) -> None:
        client = open_space(world, "s", LARGE)
        if world.rank == 1:
            world.compute(100.0)
            client.push(None, torch.ones(LARGE), tick=True).wait()  # now the other's read is answered
            client.close()
            return
        client.push((0, 0), torch.empty(0), tick=True).wait()
        out = torch.full((LARGE,), -1.0)
        read, other = client.pull(out=out, min_clock=1), client.pull(min_clock=1)
        number = client.sender.connections[0].last_number - 1
        with pytest.raises(sl.errors.PeerLostError):
            read.wait()
        with pytest.raises(sl.errors.PeerLostError, match="nothing is sent to server"):
            other.wait()  # at once: it would be another timeout
        assert world.runtime.now() < 20.0
        with pytest.raises(sl.errors.PeerLostError, match="nothing is sent to server"):
            client.push(None, torch.ones(LARGE))
        world.compute(200.0)
        assert out.eq(-1.0).all(), "a late answer was written to memory that is the caller's again"
        session = watched.server.handler.sessions[client.description.space_id, 0]
        assert number in session.replies, "the server gave an answer's memory away that may still be sent"
        client.close()

    sl.simulate(work, 2, extra=[watched], timeout=10.0)


def test_a_reply_of_another_space_with_the_same_tags_is_ignored() -> None:
    def work(world: sl.World) -> list[int]:
        client = open_space(world, "s", 4)
        space_id, number = client.description.space_id, client.sender.connections[0].last_number + 1
        other = ReplyHeader(protocol.OK, space=space_id ^ protocol.TAG_RANGES, number=number)
        tag = protocol.first_tag(space_id) + protocol.REPLY_TAG + number % protocol.REPLY_SLOTS
        assert protocol.first_tag(space_id) == protocol.first_tag(other.space)
        data = torch.frombuffer(bytearray(other.pack()), dtype=torch.uint8)
        client.network.transport.send(data, client.network.me, tag)
        found = client.steps()
        client.close()
        return found

    assert run(work, 1)[0] == [0]


# Futures and callbacks.


def test_a_future_is_done_when_its_replies_have_arrived() -> None:
    def work(world: sl.World) -> list[bool]:
        client = open_space(world, "s", 2 * LARGE)
        future = client.pull()
        found = [future.done()]
        world.compute(10.0)
        found.append(future.done())
        future.wait()
        found.append(future.done())
        waits = client.pull(min_clock=1)
        world.compute(10.0)
        found.append(waits.done())
        client.push((0, 0), torch.empty(0), tick=True).wait()
        waits.wait()
        client.close()
        return found

    assert run(work, 1, 2)[0] == [False, True, True, False]


def test_the_number_of_running_callbacks_is_limited() -> None:
    def work(world: sl.World) -> tuple[int, int]:
        running, most, called = [0], [0], [0]
        with store(2) as space:

            def back(future: Future) -> None:
                running[0] += 1
                most[0] = max(most[0], running[0])
                world.runtime.sleep(1.0)
                running[0] -= 1
                called[0] += 1

            for _ in range(5 * protocol.MAX_INFLIGHT_REQUESTS):
                space.push(None, torch.ones(2), callback=back)
            while called[0] < 5 * protocol.MAX_INFLIGHT_REQUESTS:
                world.runtime.sleep(1.0)
        return most[0], called[0]

    assert run(work, 1)[0] == (protocol.MAX_INFLIGHT_REQUESTS, 5 * protocol.MAX_INFLIGHT_REQUESTS)


def test_callbacks_that_start_callbacks_do_not_deadlock() -> None:
    def work(world: sl.World) -> float:
        left = [0]
        with store(1) as space:

            def chain(depth: int) -> None:
                def back(future: Future) -> None:
                    world.runtime.sleep(1.0)  # until all of them are busy
                    if depth:
                        chain(depth - 1)
                    else:
                        left[0] -= 1

                space.push(None, torch.ones(1), callback=back)

            for _ in range(protocol.MAX_INFLIGHT_REQUESTS):
                left[0] += 1
                chain(3)
            while left[0]:
                world.runtime.sleep(1.0)
            return float(space.get().item())

    assert run(work, 1)[0] == 4.0 * protocol.MAX_INFLIGHT_REQUESTS


# Filters, and what rules remember.


def test_values_held_back_survive_a_refused_push() -> None:
    with sl.init(), store(2, codec="lossless", filters="significant(3e38)") as space:
        space.push(None, torch.full((2,), 2e38)).wait()
        with pytest.raises(sl.errors.DivergedError):
            space.push(None, torch.tensor([3.3e38, math.nan]))
        with pytest.raises(sl.errors.DivergedError):  # two of these are more than float32 has
            space.push(None, torch.full((2,), 2e38))
        with pytest.raises(sl.errors.ProtocolError, match="has given timestamps"):
            space.push(None, torch.full((2,), 1.2e38), after=[99])
        space.flush()
        assert space.get().tolist() == pytest.approx([2e38] * 2)


def test_no_list_is_sent_if_a_filter_chooses_all_values() -> None:
    with sl.init(), store(1000, filters="significant(0.5)") as space:
        before = space.bytes_wire
        space.push(None, torch.ones(1000)).wait()
        assert space.bytes_wire - before == 4000
        space.push(None, torch.full((1000,), 0.25)).wait()
        assert space.bytes_wire - before == 4000
        assert space.get().tolist() == [1.0] * 1000


@pytest.mark.parametrize("rule", ["assign", "torch('AdamW', lr=0.1)"])
def test_a_filter_is_refused_for_rules_that_need_all_values(rule: str) -> None:
    with sl.init():
        for filters in ("significant(1.0)", "skip(0.5)|cache"):
            with pytest.raises(sl.errors.IncompatibleError, match="sends some keys now"):
                store(4, rule, filters=filters)
        store(4, rule, filters="cache").close()


@pytest.mark.parametrize("optimizer", ["NAdam", "ASGD", "Rprop", "RAdam"])
def test_pieces_without_a_push_start_fresh_after_a_checkpoint(optimizer: str) -> None:
    rule = f"torch('{optimizer}', lr=0.1)"

    def train(client: Client, steps: range, keys: tuple[int, int]) -> None:
        for step in steps:
            client.push(keys, torch.sin(torch.arange(*keys) + 1.0 + step)).wait()

    with sl.init() as world:
        kept = open_space(world, "kept", 9, rules=(rule,), piece=3)
        train(kept, range(3), (0, 3))
        names = kept.optimizer_state()
        saved = [kept.get(), *(kept.read_state(number + 1) for number in range(len(names)))]
        resumed = open_space(world, "resumed", 9, rules=(rule,), piece=3, initial=saved[0])
        train(resumed, range(5), (3, 6))  # a space that has gone on is set back to what was saved
        resumed.put(None, saved[0])
        resumed.optimizer_state(names)
        for number, values in enumerate(saved[1:]):
            resumed.write_state(number + 1, values)
        for client in (kept, resumed):
            train(client, range(3, 6), (0, 9))
        found = kept.get()
        assert torch.equal(found, resumed.get())
        assert found[3:].isfinite().all()
        for client in (kept, resumed):
            client.close()
