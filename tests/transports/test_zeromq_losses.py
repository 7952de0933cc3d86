"""Lost ranks on ZeroMQ, the rank that errors name, and late messages: nodes in one process, some silent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from syncline.environment import Environment, Rendezvous
from syncline.errors import PeerLostError, WorldError
from syncline.runtime import RealRuntime
from syncline.testing.processes import TEST_TIMEOUT_S
from syncline.transports import zeromq
from syncline.transports.zeromq import ZmqTransport, node
from tests.transports.zeromq_rogues import Caller, Rogue
from tests.transports.zeromq_worlds import Here, enter, serve_a_store, talk, until

pytestmark = pytest.mark.xdist_group("zeromq")


@pytest.fixture
def here() -> Iterator[Here]:
    with Here(3) as world:
        yield world


def failure(wait: Callable[[], object]) -> PeerLostError:
    with pytest.raises(PeerLostError) as caught:
        wait()
    return caught.value


def waiting(rank: ZmqTransport, source: int, timeout: float) -> Callable[[], PeerLostError]:
    """Wait for a message in a task. Returns a function that returns the error of the wait."""
    found: list[PeerLostError] = []
    rank.timeout = timeout
    receipt = rank.recv(torch.zeros(1), source, 5)
    task = rank.runtime.spawn(lambda: found.append(failure(receipt.wait)))

    def result() -> PeerLostError:
        assert task.join(TEST_TIMEOUT_S)
        return found[0]

    return result


def test_a_silent_member_is_lost_after_the_stated_time(here: Here) -> None:
    """It is connected and sends nothing: `lost()` and the error of a waiting rank name it."""
    first = here.ranks[0]
    first.node.lost_after_s = 0.5
    with Rogue(here) as silent:
        until(lambda: silent.rank in first.present(), "it is there")
        error = failure(first.recv(torch.zeros(1), silent.rank, 5).wait)
        assert error.peer == silent.rank
        assert "no heartbeat for 0.5 s" in str(error)
        assert silent.rank in first.lost()
        until(lambda: silent.rank in here.ranks[1].lost(), "the others are told")


def test_a_reply_does_not_come_if_the_rank_that_passes_the_request_on_is_lost(here: Here) -> None:
    """The receive fails whether the loss is noticed before it, or while a task waits."""
    first, found = here.ranks[0], list[PeerLostError]()
    early = first.recv_bytes(8, 1, 5, via=2)
    task = first.runtime.spawn(lambda: found.append(failure(early.wait)))
    here.ranks[2].close()
    assert task.join(TEST_TIMEOUT_S)
    late = first.recv_bytes(8, 1, 5, via=2)
    assert [found[0].peer, failure(late.wait).peer] == [2, 2]
    talk(*here.ranks[:2])


def test_a_cancelled_receive_ends_and_takes_no_message(here: Here) -> None:
    first, found = here.ranks[0], list[PeerLostError]()
    first.recv(torch.zeros(1), 1, 6)  # connects the two
    cancelled, kept = (first.recv_bytes(8, 1, 5) for _ in range(2))
    task = first.runtime.spawn(lambda: found.append(failure(cancelled.wait)))
    until(lambda: bool(first.node.loop.driver), "it waits")
    cancelled.cancel()
    assert task.join(TEST_TIMEOUT_S)
    assert "was cancelled" in str(found[0])
    here.ranks[1].send_bytes((b"reply",), 0, 5)
    kept.wait()
    kept.cancel()  # too late: it has no effect
    kept.wait()
    assert bytes(kept.data) == b"reply"


def test_messages_of_a_lost_member_are_dropped(here: Here) -> None:
    """The others continue without it, so its late messages are not delivered."""
    first = here.ranks[0]
    first.node.lost_after_s = 0.5
    with Rogue(here) as frozen:
        frozen.say(frozen.eager(0, b"in time"))
        buffer = torch.zeros(7, dtype=torch.uint8)
        first.recv(buffer, frozen.rank, 0).wait()
        failure(first.recv(torch.zeros(1), frozen.rank, 5).wait)
        receipt: Any = first.recv(buffer, None, 0)
        frozen.say(frozen.eager(1, b"too late"))
        with Caller(first.node.endpoint, b"a stranger, to see when the one before was read") as after:
            after.say(b"hello")
            until(lambda: after.identity in first.node.verified, "all that came before was read")
        assert not receipt.done()
        talk(*here.ranks[:2])


def test_a_process_that_was_suspended_blames_nobody(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its own suspension the last messages of all peers are old. None of them is lost."""
    first = here.ranks[0]
    first.monitor.watch([1, 2])
    until(lambda: all(peer.heard for peer in first.node.peers.values()), "they are connected")
    peers = list(first.node.peers.values())
    for peer in peers:
        peer.heard -= 1000.0
    first.node.last_check -= 1000.0
    first.node.lost_after_s = 100.0
    first.node.check_peers(first.runtime.now())
    assert first.lost() == {}


def test_the_launcher_decides_about_a_completely_silent_process(here: Here) -> None:
    """A process that only computes writes nothing into the store either; one that does is cut off from this rank."""
    first, silent = here.ranks[0], here.ranks[1].node
    first.monitor.watch([1])
    assert silent.liveness.stop()
    first.node.launched, silent.next_ping = True, float("inf")
    first.node.lost_after_s = 0.2
    peer = first.node.peers[1]
    until(
        lambda: peer.heartbeat is not None and first.runtime.now() - peer.heard > 1.0,
        "several checks have found it silent",
    )
    assert first.lost() == {}

    def write_and_look() -> bool:
        silent.liveness.write()
        return 1 in first.lost()

    until(write_and_look, "it writes records and sends no message")


def test_all_name_the_frozen_rank_of_a_chain(here: Here) -> None:
    """Rank 1 waits for the silent one, rank 0 for rank 1: both time out at once, and both name the silent one."""
    with Rogue(here) as frozen:
        until(lambda: frozen.rank in here.ranks[1].present(), "it is there")
        results = [waiting(here.ranks[1], frozen.rank, 2.0), waiting(here.ranks[0], 1, 2.0)]
        errors = [result() for result in results]
    assert [error.peer for error in errors] == [frozen.rank, frozen.rank]
    assert "while waiting for a message from rank 1" in str(errors[1])
    assert "no heartbeat" in str(errors[1])


def test_a_rank_that_left_because_of_another_is_not_blamed(here: Here) -> None:
    """Rank 1 leaves because it has lost a peer. Rank 0, which waited for rank 1, names that peer."""
    with Rogue(here) as killed:
        until(lambda: killed.rank in here.ranks[1].present(), "it is there")
        result = waiting(here.ranks[0], 1, TEST_TIMEOUT_S)
        here.store.set(f"syncline/dead/{killed.rank}", json.dumps({"reason": "it was killed by signal 9"}))
        here.store.add("syncline/dead", 1)
        assert failure(here.ranks[1].recv(torch.zeros(1), killed.rank, 5).wait).peer == killed.rank
        here.ranks[1].close()
        error = result()
    assert error.peer == killed.rank
    assert str(error).endswith("it was killed by signal 9")


def test_a_loss_is_recorded_before_the_waits_end(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a server reads the lost ranks as soon as its wait fails."""
    first, known = here.ranks[0], list[bool]()
    lose = node.Node.lose
    with Rogue(here) as gone:
        until(lambda: gone.rank in first.present(), "it is there")
        first.monitor.watch([gone.rank])

        def note(self: Any, rank: int, *how: Any) -> None:
            if self is first.node and rank == gone.rank:
                known.append(rank in first.lost())
            lose(self, rank, *how)

        monkeypatch.setattr(node.Node, "lose", note)
        first.node.announce_loss(gone.rank, "its connection broke")
    assert known[0]


def test_a_rank_that_is_cut_off_gives_up(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the store nor any peer answers: the error says that this rank is cut off, and closing returns."""
    first = here.ranks[0]
    first.monitor.watch([1, 2])
    talk(first, here.ranks[1])
    stuck = first.runtime.event()
    membership: Any = first.node.membership
    connection = membership.launcher.connection
    real, connection.store = connection.store, Stuck(stuck)
    monkeypatch.setattr(connection, "timeout_s", 0.05)
    first.node.lost_after_s = 0.2
    for rank in here.ranks[1:]:
        rank.node.next_ping = float("inf")
        rank.node.lost_after_s = float("inf")
    error = failure(first.recv(torch.zeros(1), 1, 5).wait)
    assert error.peer == 0
    assert "cut off" in str(error)
    first.close()
    stuck.set()
    connection.store = real


class Stuck:
    """A store on a network that is cut."""

    def __init__(self, mended: Any) -> None:
        self._mended = mended

    def __getattr__(self, name: str) -> Any:
        return lambda *what: self._mended.wait(TEST_TIMEOUT_S)


# Joining.


def test_a_rank_that_ends_before_it_joins_is_named_at_once() -> None:
    """The launcher has recorded its end, so no rank waits for the whole timeout."""
    store = serve_a_store()
    store.set("syncline/dead/1", json.dumps({"rank": 1, "reason": "it was killed by signal 9 (SIGKILL)"}))
    store.add("syncline/dead", 1)
    with pytest.raises(WorldError, match=r"rank 1 has ended before all had joined: it was killed by signal 9"):
        enter(store.port, 0, 2, timeout=TEST_TIMEOUT_S)


def test_a_server_that_ends_before_it_joins_is_named() -> None:
    store = serve_a_store()
    store.set("syncline/dead/server 0", json.dumps({"rank": None, "reason": "it was killed"}))
    store.add("syncline/dead", 1)
    place = Rendezvous("127.0.0.1", store.port, hosted=True)
    environment = Environment(source="a test", rank=0, size=2, local_rank=0, local_size=2, rendezvous=place)
    with pytest.raises(WorldError, match="server 0 has ended before all had joined: it was killed"):
        zeromq.connect(environment, TEST_TIMEOUT_S, label="server", name_of=("rank 0", "server 0").__getitem__)


def test_members_of_different_versions_refuse_each_other(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "package_version", lambda: "9.9.9")
    with pytest.raises(WorldError, match=r"rank 0 runs Syncline \S+, rank 3 runs 9.9.9: install the same version"):
        zeromq.join(Rendezvous("127.0.0.1", here.port), TEST_TIMEOUT_S)


def test_launched_ranks_of_different_versions_all_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank that notices leaves at once. The other reports the versions, not a loss."""
    store, versions, told = serve_a_store(), ["1.2", "9.9.9"], list[str]()
    monkeypatch.setattr(node, "package_version", lambda: versions.pop())

    def come(rank: int) -> None:
        with pytest.raises(WorldError) as caught:
            enter(store.port, rank, 2).close()
        told.append(str(caught.value))

    tasks = [RealRuntime().spawn(come, rank) for rank in range(2)]
    assert all(task.join(TEST_TIMEOUT_S) for task in tasks)
    assert all("install the same version" in text and "9.9.9" in text for text in told)
    assert len(told) == 2


# Unknown senders.


def test_strangers_fill_no_log(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    """A few lines are logged; the others are only counted."""
    victim = here.ranks[0]
    for number in range(50):
        with Caller(victim.node.endpoint, b"stranger %d" % number) as stranger:
            stranger.say(b"hello")
            until(lambda who=stranger.identity: who in victim.node.verified, "it was heard")  # type: ignore[misc]
    assert caplog.text.count("ignores an unknown sender") == 5
    talk(*here.ranks[:2])
