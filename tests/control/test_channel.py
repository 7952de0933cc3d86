"""The control channel: what one process publishes, all others see, in the same order and whoever is killed."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

import syncline as sl
from syncline.control import ControlBarrier, ControlChannel, MemoryStore, Post, WorkerMembership
from syncline.control.channel import MAX_POST_VALUES, MAX_POSTS
from syncline.errors import IncompatibleError, PeerLostError, SpecError, UnsupportedError
from syncline.runtime import RealRuntime, Runtime
from syncline.testing import Pool, hunt
from syncline.testing.collectives import world_on
from syncline.transports import Transport
from syncline.transports.faults import Kill
from syncline.transports.key_value_store import KeyValueStore
from syncline.world import Simulation, World
from tests.hunting import seeds

WORKERS = 4
MAX_STEPS = 200


def open_channel(world: World, name: str = "test") -> ControlChannel:
    return ControlChannel(world.control_store(), world.runtime, name, world.size, world.rank)


def train(world: World) -> tuple[list[tuple[str, tuple[float, ...]]], int, list[int]]:
    """Steps of random length with posts, until rank 1 stops all. Returns the posts, own steps, and all steps."""
    channel, draw = open_channel(world), random.Random(world.rank)
    counts, steps = [0] * world.size, 0
    while not channel.stop_requested():
        assert steps < MAX_STEPS, "the request to stop has not arrived"
        world.compute(draw.uniform(0.0, 0.1))
        steps += 1
        channel.report_steps(steps)
        if steps % 3 == 0:
            channel.post("step", [world.rank, steps])
            before, counts = counts, channel.steps()
            assert all(old <= new for old, new in zip(before, counts, strict=True)), "a count went back"
        if world.rank == 1 and steps == 30:
            channel.request_stop()
    channel.finish()
    ControlBarrier(world, channel).close()
    posts = [(post.kind, post.values) for post in channel.read_posts(0) if post.kind == "step"]
    counts = channel.steps()
    channel.close()
    return posts, steps, counts


def check_agreement(found: Simulation) -> None:
    living = [rank for rank in range(WORKERS) if rank not in found.killed]
    posts = found.results[living[0]][0]
    for rank in living:
        own_posts, steps, _ = found.results[rank]
        assert own_posts == posts, "all see the same posts in the same order"
        mine = [values[1] for _, values in posts if values[0] == rank]
        assert mine == [float(step) for step in range(3, steps + 1, 3)], "each post of a worker once, in its order"
        assert all(found.results[other][2][rank] == steps for other in living), "finished workers' counts are exact"


@pytest.mark.hunt
@pytest.mark.parametrize("victim", [None, 0, 2])
def test_survivors_see_the_same_posts_and_stop(victim: int | None) -> None:
    for seed in seeds(20):
        when = random.Random(seed).uniform(0.0, 2.0)
        faults = () if victim is None else (Kill(victim, at=when),)
        hunt(train, WORKERS, [seed], faults=faults, invariant=check_agreement)


def test_calls_after_a_step_send_nothing() -> None:
    calls: list[str] = []

    def work(world: World) -> tuple[int, int]:
        channel = ControlChannel(MemoryStore({}, lambda: calls.append("call")), world.runtime, "test", 1, 0)
        before = len(calls)
        for steps in range(100):
            channel.report_steps(steps)
            assert not channel.stop_requested()
        at_once = len(calls) - before
        world.compute(1.0)
        return at_once, len(calls) - before

    at_once, later = sl.simulate(work, 1).results[0]
    assert at_once == 0
    assert 2 <= later <= 20, "the latest count is written once, and the log is read a few times"


def test_a_stop_during_a_long_step_is_seen_at_its_end() -> None:
    def work(world: World) -> int:
        channel, steps = open_channel(world), 0
        while not channel.stop_requested():
            world.compute(100.0)
            steps += 1
            channel.report_steps(steps)
            if world.rank == 0 and steps == 1:
                world.compute(10.0)
                channel.request_stop()
        channel.finish()
        return steps

    assert sl.simulate(work, 2).results == (1, 2)


def test_channels_of_one_name_are_separate() -> None:
    def work(world: World) -> list[list[Post]]:
        first, second = open_channel(world), open_channel(world)
        first.post("a", [world.rank])
        world.barrier()
        return [first.read_posts(0), second.read_posts(0)]

    for first, second in sl.simulate(work, 2).results:
        assert len(first) == 2
        assert second == []


def test_a_transport_without_a_store_is_named() -> None:
    def work(world: World) -> None:
        Transport.control_store(world.transport)

    with pytest.raises(UnsupportedError, match="simulated has no key-value store for its 2 ranks"):
        sl.simulate(work, 2)
    with sl.init() as world:
        assert world.control_store() is world.control_store(), "a world of one has its own"


def test_an_observer_reads_what_workers_publish() -> None:
    store, runtime = MemoryStore(), RealRuntime()
    workers = [ControlChannel(store, runtime, "ssp", 2, rank) for rank in range(2)]
    observer = ControlChannel(store, runtime, "ssp", 2)
    assert observer.value("order") is None
    workers[0].set_value("order", "[1, 0]")
    assert observer.value("order") == "[1, 0]"
    workers[1].report_steps(7)
    workers[1].finish()
    assert observer.steps() == [0, 7]
    assert [observer.has_finished(rank) for rank in range(2)] == [False, True]
    observer.request_stop()
    assert not workers[0].has_finished(0)
    assert workers[0].stop_requested()
    for channel in (*workers, observer):
        channel.close()


def test_a_late_reader_gets_the_latest_posts() -> None:
    store, runtime = MemoryStore(), RealRuntime()
    writer, reader = (ControlChannel(store, runtime, "test", 2, rank) for rank in range(2))
    for number in range(MAX_POSTS + 7):
        writer.post("n", [number])
    found = reader.read_posts(0)
    assert [post.values[0] for post in found] == [float(number) for number in range(7, MAX_POSTS + 7)]
    assert reader.read_posts(found[-2].number) == found[-1:]
    assert reader.read_posts(found[-1].number) == []


@pytest.mark.parametrize(("kind", "values"), [("k" * 33, 1), ("many", MAX_POST_VALUES + 1)])
def test_a_post_that_is_too_long_is_refused(kind: str, values: int) -> None:
    channel = ControlChannel(MemoryStore(), RealRuntime(), "test", 1, 0)
    with pytest.raises(SpecError, match=rf"at most 32 bytes and at most {MAX_POST_VALUES} values"):
        channel.post(kind, [0.0] * values)
    assert channel.read_posts(0) == []


def test_a_store_that_is_gone_is_reported_by_calls_that_need_it() -> None:
    gone = False

    def answer() -> None:
        if gone:
            raise RuntimeError("Connection reset by peer")

    channel = ControlChannel(MemoryStore({}, answer), RealRuntime(), "test", 2, 0)
    gone = True
    channel.report_steps(3)
    assert not channel.stop_requested()
    for call in (channel.steps, channel.request_stop, lambda: channel.read_posts(0), lambda: channel.post("a", [])):
        with pytest.raises(PeerLostError, match=r"store .* does not answer \(Connection reset by peer\)"):
            call()
    channel.close()


def publish(transport: Transport) -> tuple[list[Post], list[int], bool]:
    """On real processes: posts of all ranks at once, steps, and a request to stop."""
    world = world_on(transport)
    channel = open_channel(world)
    barrier = ControlBarrier(world, channel)
    for number in range(10):
        channel.report_steps(number + 1)
        channel.post("n", [world.rank, number])
    if world.rank == 1:
        channel.request_stop()
    channel.finish()
    barrier.wait("publish")
    found = [post for post in channel.read_posts(0) if post.kind == "n"], channel.steps(), channel.stop_requested()
    barrier.close()
    channel.close()
    return found


@pytest.mark.xdist_group("gloo")
def test_processes_see_the_same_posts_on_gloo(gloo: Pool) -> None:
    check_processes(gloo.run(publish, 3))


@pytest.mark.xdist_group("zeromq")
def test_processes_see_the_same_posts_on_zeromq(zeromq: Pool) -> None:
    check_processes(zeromq.run(publish, 3))


def check_processes(found: list[tuple[list[Post], list[int], bool]]) -> None:
    posts, steps, stopped = found[0]
    assert found == [found[0]] * 3
    assert (len(posts), steps, stopped) == (30, [10] * 3, True)
    for rank in range(3):
        assert [post.values[1] for post in posts if post.values[0] == rank] == list(map(float, range(10)))


class Connector:
    """The losses of a job, as a test decides them."""

    def __init__(self) -> None:
        self.runtime: Runtime = RealRuntime()
        self.store: KeyValueStore = MemoryStore()
        self.losses: dict[int, str] = {}

    def lost(self) -> dict[int, str]:
        return self.losses

    def unreachable(self) -> dict[int, str]:
        return {}

    def follow(self, members: Iterable[int]) -> None:
        """All losses are known."""

    def connect(self, members: tuple[int, ...], generation: int) -> Transport:
        raise NotImplementedError

    def add_roles(self, transport: Transport) -> Transport:
        return transport

    def close(self) -> None:
        """Nothing is open."""


def membership_of(connector: Connector, member: int, launched: int = 2) -> WorkerMembership:
    channel = ControlChannel(connector.store, connector.runtime, "test", launched, member)
    return WorkerMembership(channel, connector, member, launched, 0.0)


def test_a_newcomer_takes_part_in_the_next_barrier() -> None:
    connector = Connector()
    first, newcomer = membership_of(connector, 0), membership_of(connector, 4)
    connector.losses[1] = "killed"
    assert newcomer.join(0)
    with pytest.raises(PeerLostError, match=r"for workers \[4\] to go on"):
        first.wait("go on")
    newcomer.wait("go on")
    assert first.present() == [0, 4]
    assert first.workers == 2


def test_a_newcomer_cannot_join_a_barrier_that_was_passed() -> None:
    connector = Connector()
    first, newcomer = membership_of(connector, 0, 1), membership_of(connector, 4, 1)
    first.wait("go on")
    assert not newcomer.join(0)
    assert newcomer.join(1)
    connector.losses[4] = "frozen"
    with pytest.raises(PeerLostError, match="declared lost"):
        newcomer.wait("go on")
    first.close()
    assert not membership_of(connector, 5, 1).join(1), "the job has ended"


def test_workers_agree_on_what_all_of_them_hold() -> None:
    connector = Connector()
    first, second, third = (membership_of(connector, member, 3) for member in range(3))
    with pytest.raises(PeerLostError, match=r"for workers \[1, 2\] to go on"):
        first.agree("go on", [0, 1, 2])
    with pytest.raises(PeerLostError, match=r"for workers \[1\] to go on"):
        third.agree("go on", [2])
    connector.losses[2] = "killed"
    assert second.agree("go on", [1, 2, 4]) == [1, 2], "what a lost worker holds does not count"


def test_workers_exchange_texts_at_a_barrier() -> None:
    connector = Connector()
    first, second = membership_of(connector, 0), membership_of(connector, 1)
    for number in range(3):
        with pytest.raises(PeerLostError, match=r"for workers \[1\] to save"):
            first.exchange("save", f"first {number}")
        assert second.exchange("save", f"second {number}") == {0: f"first {number}", 1: f"second {number}"}
    connector.losses[0] = "killed"
    assert second.exchange("save", "alone") == {1: "alone"}


def test_workers_that_end_the_job_are_waited_for_by_nobody() -> None:
    """Worker 0 saves the last checkpoint, worker 1 is at a barrier before, and worker 2 has closed its run."""
    connector = Connector()
    first, second, third = (membership_of(connector, member, 3) for member in range(3))
    first.end()
    with pytest.raises(PeerLostError, match=r"for workers \[1, 2\] to save"):
        first.exchange("save", "first")
    with pytest.raises(PeerLostError, match=r"for workers \[0, 1\] to close"):
        third.close()
    with pytest.raises(IncompatibleError, match="worker 2 has closed its run"):
        second.wait("go on")
    connector.losses[2] = "killed"
    second.wait("go on")
    assert second.exchange("save", "too early") == {1: "too early"}, "worker 0 saves later"
    second.end()
    assert second.exchange("save", "second") == {0: "first", 1: "second"}


def test_one_of_the_workers_that_leave_is_the_last() -> None:
    connector = Connector()
    first, second, third = (membership_of(connector, member, 3) for member in range(3))
    connector.losses[0] = "killed"
    second.leave()
    assert not second.left_last()
    third.leave()
    second.refresh()
    assert [each.left_last() for each in (first, second, third)] == [False, False, True]
    assert third.exchange("save", "alone") == {2: "alone"}, "it waits for nobody"
