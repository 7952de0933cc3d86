"""Missing entries of the membership log, unsigned records of dead ranks, and channels that are closed or aborted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import zmq

from syncline.environment import Rendezvous
from syncline.errors import PeerLostError, WorldError
from syncline.testing.processes import TEST_TIMEOUT_S
from syncline.transports.zeromq import ZmqTransport, join, membership, node
from syncline.transports.zeromq.connection import MAX_EAGER_BYTES
from syncline.transports.zeromq.membership import MemberEntry, MembershipLog
from syncline.transports.zeromq.node import Node
from tests.transports.zeromq_rogues import Rogue
from tests.transports.zeromq_worlds import Here, come_later, talk, until

pytestmark = pytest.mark.xdist_group("zeromq")

LARGE = MAX_EAGER_BYTES + 1


@pytest.fixture
def here() -> Iterator[Here]:
    with Here(3) as world:
        yield world


@pytest.fixture
def locked() -> Iterator[Here]:
    with Here(3, zmq.curve_keypair()[1].decode()) as world:
        yield world


def large() -> torch.Tensor:
    return torch.ones(LARGE, dtype=torch.uint8)


def team(world: Here, name: str = "0.1.test") -> list[ZmqTransport]:
    """A channel of ranks 0 and 1."""
    return [ZmqTransport(rank.node, (0, 1), rank.timeout, name) for rank in world.ranks[:2]]


def test_sockets_of_ranks_that_have_left_are_closed(here: Here) -> None:
    """A job that loses and replaces many workers would run out of descriptors. The rank still counts as gone."""
    first = here.ranks[0]
    for _ in range(2):
        later = come_later(here.port)
        talk(later, first)
        number = later.rank
        assert number in first.node.peers
        later.close()
        until(partial(_absent, first, number), "its sockets are closed")
        assert number in first.node.add_lost_callback(lambda rank: None)
        assert first.gone_reason(number)


def _absent(transport: ZmqTransport, rank: int) -> bool:
    return rank not in transport.node.peers


# Missing entries.


def test_a_second_job_uses_the_port_of_the_first() -> None:
    """A process keeps its connection to a store. The next store may get the same port, long after the first ended."""
    with Here(1) as first:
        port = first.port
        del first.store
    with Here(1, port=port) as second:
        assert second.port == port
        assert second.ranks[0].size == 1


def test_a_join_reads_past_a_gap(here: Here) -> None:
    """A process is lost between counting and writing its entry. Later entries are still read."""
    here.ranks[0].node.membership.store.add("version", 1)
    here.ranks.append(come_later(here.port))
    for rank in here.ranks[:3]:
        talk(here.ranks[3], rank)
    assert here.ranks[0].node.membership.incomplete, "the gap was not there"


class Late(Rogue):
    """A member whose entry is counted, but written only later."""

    def __init__(self, world: Here, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[tuple[str, str]] = []
        store = world.ranks[0].node.membership.store

        def post(mine: MembershipLog, entry: MemberEntry) -> None:
            text = json.dumps(entry.__dict__)
            self.lines.append((f"log/{store.add('version', 1)}", json.dumps({"entry": text, "mac": mine.sign(text)})))

        with monkeypatch.context() as patch:
            patch.setattr(MembershipLog, "post", post)
            super().__init__(world)
        self.store = store

    def __enter__(self) -> Late:
        return self

    def write(self) -> None:
        """Write it after all."""
        for key, line in self.lines:
            self.store.set(key, line)


def test_frames_before_the_membership_entry_are_kept(locked: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its messages arrive, in order."""
    victim = locked.ranks[0]
    with Late(locked, monkeypatch) as late:
        for number in range(3):
            late.say(late.eager(number, bytes([number])))
        until(lambda: sum(map(len, victim.node.unverified.frames.values())) == 3, "all is kept")
        assert late.identity not in victim.node.verified
        talk(*locked.ranks[:2])
        late.write()
        until(lambda: late.identity in victim.node.verified, "it is known")
        late.say(late.eager(3, bytes([3])))
        for number in range(4):
            buffer = torch.zeros(1, dtype=torch.uint8)
            victim.recv(buffer, late.rank, 0).wait()
            assert buffer.item() == number
    assert not victim.node.unverified.frames
    assert victim.node.unverified.nbytes == 0


def test_a_sender_without_a_membership_entry_is_unknown(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "MISSING_ENTRY_TIMEOUT_S", 0.5)
    victim = here.ranks[0]
    with Late(here, monkeypatch) as late:
        late.say(late.eager(0, b"x"))
        until(lambda: late.identity in victim.node.verified, "it is decided")
        assert victim.node.verified[late.identity] is None
        talk(*here.ranks[:2])
    assert f"ignores an unknown sender: rank {late.rank} is not in this world" in caplog.text
    assert not victim.node.unverified.frames


def test_frames_of_unverified_peers_are_bounded(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "MAX_UNVERIFIED_BYTES", 5000)
    victim = here.ranks[0]
    with Late(here, monkeypatch) as late:
        for number in range(10):
            late.say(late.eager(number, bytes(1000)))
        until(lambda: late.identity in victim.node.verified, "it is decided")
        assert victim.node.verified[late.identity] is None
        talk(*here.ranks[:2])
    assert "there is no room for all its frames" in caplog.text
    assert not victim.node.unverified.frames


def test_a_stranger_counts_up_the_log(here: Here) -> None:
    """Memory and time do not grow with the number of missing entries."""
    ours = here.ranks[0].node.membership
    ours.store.add("version", 10**9)
    until(lambda: ours.missing, "it is seen")
    for _ in range(3):
        ours.refresh()
        assert len(ours.missing) <= membership.MAX_MISSING_ENTRIES
    talk(*here.ranks[:2])


def test_a_suspended_writer_posts_its_entry_again(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have given up waiting for its entry."""
    ours = here.ranks[0].node.membership
    before = ours.store.add("version", 0)
    monkeypatch.setattr(membership, "MISSING_ENTRY_TIMEOUT_S", 0.0)
    ours.post(MemberEntry("joined", 77))
    assert ours.store.add("version", 0) == before + membership.MAX_POST_ATTEMPTS


def test_a_failed_join_closes_its_sockets(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[Node] = []
    enrol = Node.join

    def lose_the_entry(node: Node, rank: int, name: str = "") -> None:
        nodes.append(node)
        with monkeypatch.context() as patch:
            patch.setattr(MembershipLog, "post", lambda self, entry: None)
            enrol(node, rank)

    monkeypatch.setattr(Node, "join", lose_the_entry)
    with pytest.raises(
        WorldError, match=r"rank 3 has joined the world at .* did not find its own entry .* within 0.3 s"
    ):
        join(Rendezvous("127.0.0.1", here.port), 0.3)
    assert [node.closed for node in nodes] == [True]


# Unsigned records of dead ranks.


def spread(world: Here, rank: int) -> None:
    """Write a record as the launcher does; any process can."""
    world.store.set(f"syncline/dead/{rank}", json.dumps({"rank": rank, "reason": "it was killed"}))
    world.store.add("syncline/dead", 1)


def test_with_a_key_an_unsigned_record_removes_nobody(locked: Here) -> None:
    """All of them answer, so the record is dropped."""
    for rank in range(3):
        spread(locked, rank)
    others = [(rank, other) for rank in locked.ranks for other in range(3) if other != rank.rank]
    until(lambda: all(rank.node.membership.deaths_read == (3, 3) for rank in locked.ranks), "it is read")
    until(lambda: not any(other in rank.node.membership.hints for rank, other in others), "it is forgotten")
    assert [rank.present() for rank in locked.ranks] == [(0, 1, 2)] * 3
    assert [rank.lost() for rank in locked.ranks] == [{}] * 3
    talk(*locked.ranks[:2])


def test_with_a_key_a_silent_rank_is_lost_after_a_hint(locked: Here) -> None:
    with Rogue(locked) as silent:
        until(lambda: silent.rank in locked.ranks[0].present(), "it is there")
        spread(locked, silent.rank)
        for rank in locked.ranks:
            until(lambda rank=rank: rank.lost() == {silent.rank: "it was killed"}, "it is lost")  # type: ignore[misc]


def test_lost_ranks_differ_from_ranks_that_left(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    first = here.ranks[0]
    with Rogue(here) as killed:
        until(lambda: killed.rank in first.present(), "it is there")
        here.ranks[2].close()
        spread(here, killed.rank)
        until(lambda: first.present() == (0, 1), "both are gone")
        assert first.lost() == {killed.rank: "it was killed"}
        warning = f"rank 0: the membership log reports that rank {killed.rank} is lost: it was killed"
        until(lambda: warning in caplog.text, "a warning is logged")
        first.node.membership.post(MemberEntry("lost", killed.rank, reason="another has noticed too"))
        here.ranks.append(come_later(here.port))
        until(lambda: here.ranks[-1].rank in first.present(), "the log is read to there")
    assert caplog.text.count(f"rank 0: the membership log reports that rank {killed.rank} is lost") == 1
    assert "rank 2 is lost" not in caplog.text


# Receives from any rank.


def test_what_is_known_when_nobody_has_sent(here: Here) -> None:
    first = here.ranks[0]

    def word() -> str:
        with pytest.raises(PeerLostError) as caught:
            first.recv(torch.zeros(1), None, 5).wait(0.01)
        return str(caught.value)

    assert word().endswith("it has not come within the timeout; everyone it could come from is still there")
    here.ranks[2].close()
    until(lambda: first.present() == (0, 1), "rank 2 has left")
    assert word().endswith("of 2 it could come from 1 are gone: rank 2 (it has left)")
    here.ranks[1].close()
    until(lambda: first.present() == (0,), "rank 1 has left")
    assert word().endswith("everyone it could come from is gone: rank 1 (it has left), rank 2 (it has left)")


# Channels that are closed or aborted.


def test_closing_a_channel_finishes_the_sends_to_it(here: Here) -> None:
    """Before and after closing: sends end, their credit is returned, and no mailbox is left."""
    sender, receiver = team(here)
    link = receiver.node.connection(0)
    sent = [sender.send(large(), 1, 5), sender.send(torch.ones(3), 1, 5)]
    until(lambda: (link.arrived[0], link.offered) == (1, 1), "both are there")
    receipt = receiver.recv(torch.zeros(1), 0, 6)
    receiver.close()
    with pytest.raises(WorldError, match="this channel is closed: no message arrives for tag 6 any more"):
        receipt.wait()
    sent += [sender.send(large(), 1, 5), sender.send(torch.ones(3), 1, 5)]
    for handle in sent:
        handle.wait()
    until(lambda: (link.arrived, link.offered) == ([2, 24], 0), "all have come")
    assert link.taken == [2, 24]
    assert sender.channel_number not in receiver.node.mailboxes
    talk(*here.ranks[:2])


def test_abort_breaks_sends_too(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    """The waits end with an error, the peer's receive too, and closing does not wait for the messages."""
    first, second = here.ranks[:2]
    sender, receiver = team(here)
    words: list[str] = []

    def send() -> None:
        with pytest.raises(WorldError) as caught:
            sender.send(large(), 1, 5).wait()
        words.append(str(caught.value))

    task = first.runtime.spawn(send)
    until(lambda: receiver.node.connection(0).offered == 1, "it is offered")
    sender.abort()
    assert task.join(TEST_TIMEOUT_S)
    assert words == ["the channel was given up while rank 0 waited for rank 1 to take 65.5 kB"]
    for start in (sender.send, sender.recv):
        with pytest.raises(WorldError, match="the channel was given up"):
            start(large(), 1, 5).wait()
    with pytest.raises(PeerLostError, match="it has given the message up") as caught:
        receiver.recv(large(), 0, 5).wait()
    assert caught.value.peer == 0
    talk(first, second)
    first.send(large(), 1, 9)
    first.abort()
    assert first.node.connection(1).oldest() is None
    first.close()
    assert "waits no longer" not in caplog.text


def test_closing_has_one_deadline(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many peers do not take what they were sent."""
    first = here.ranks[0]
    for to in (1, 2):
        first.send(large(), to, 9)
    patience: list[float] = []
    wait = Node.wait

    def note(node: Node, thing: Any, timeout: float, pending: Any) -> bool:
        patience.append(timeout)
        return wait(node, thing, timeout, pending)

    monkeypatch.setattr(Node, "wait", note)
    first.node.close(0.2)
    assert len(patience) == 2
    assert 0.2 >= patience[0] > 0 >= patience[1]
    for to in (1, 2):
        assert f"rank 0 leaves, and waits no longer for rank {to} to take 65.5 kB" in caplog.text
