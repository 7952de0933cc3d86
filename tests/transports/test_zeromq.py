"""ZeroMQ between real processes, and against those who do not belong."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq

from syncline.environment import Rendezvous
from syncline.errors import PeerLostError, ProtocolError, WorldError
from syncline.testing import Pool
from syncline.testing.processes import TEST_TIMEOUT_S, free_port
from syncline.transports.base import Transport
from syncline.transports.messages import HEADER_BYTES
from syncline.transports.zeromq import connection, join
from syncline.transports.zeromq.connection import ACCEPT, CREDIT, OFFER, PART, PART_BYTES
from syncline.transports.zeromq.membership import MemberEntry, choose_key
from syncline.transports.zeromq.node import IDENTITY, MAX_UNREAD_FRAMES
from tests.transports import zeromq_cases as cases
from tests.transports.zeromq_rogues import Caller, Rogue
from tests.transports.zeromq_stress import Storm, rage
from tests.transports.zeromq_worlds import Crew, Here, come_later, seize, serve_a_store, talk, until

pytestmark = pytest.mark.xdist_group("zeromq")

HUNTING = bool(os.environ.get("SYNCLINE_HUNT"))
MB = 1_000_000


def key() -> str:
    return zmq.curve_keypair()[1].decode()


@pytest.fixture
def here() -> Iterator[Here]:
    with Here(3) as world:
        yield world


@pytest.fixture
def locked() -> Iterator[Here]:
    with Here(3, key()) as world:
        yield world


@pytest.fixture(params=["no key", "a key"])
def either(request: pytest.FixtureRequest) -> Iterator[Here]:
    with Here(3, key() if request.param == "a key" else None) as world:
        yield world


# Messages among those who come and go.


def check(storm: Storm, messages: int) -> None:
    assert sum(storm.sent.values()) >= 0.99 * messages
    assert storm.received == storm.sent
    assert storm.piled > 20 * MB, "too little to tell"
    assert storm.grown_by_the_pile < 16 * MB, f"{storm.piled / MB:.0f} MB were sent to one that did not receive"
    assert max(storm.grown.values()) < 64 * MB, storm.grown


def test_a_storm() -> None:
    """Six processes, two leave, two join: each message comes once and whole, and memory stays bounded."""
    messages = 10_000 if HUNTING else 2_000
    with Crew() as crew:
        check(rage(crew, messages, seed=1), messages)


def test_one_is_killed_and_one_leaves() -> None:
    """Who waits for it is told whom it has lost and how; the rest go on talking."""
    with Crew() as crew:
        members = [crew.start(cases.lose_one, crew.port, rank) for rank in range(4)]
        assert [member.hear() for member in members] == ["ready"] * 4
        members.pop().kill()
        members[2].say("go on")
        words = [member.hear() for member in members]
        left = [member.hear() for member in members]
    for rank in (0, 1):
        assert words[rank].startswith(f"rank {rank} lost rank 3 while waiting for")
        assert words[rank].endswith(": its connection broke")
        assert left[rank].startswith(f"rank {rank} lost rank 2 while waiting for")
        assert left[rank].endswith(": it has left")


def test_dropped_handles_are_delivered_at_close() -> None:
    with Crew() as crew:
        members = [crew.start(cases.leave_at_once, crew.port, rank) for rank in range(2)]
        assert [member.hear() for member in members] == [None, True]


def test_messages_of_a_leaving_rank_are_read_after_its_goodbye(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was busy all the while finds both the messages and the news that their sender has left."""
    reader, leaver = here.ranks[:2]
    seize(reader, monkeypatch)
    leaver.send(torch.ones(3), 0, 5)
    leaver.close()
    until(lambda: 1 in reader.node.membership.left, "the farewell is known")
    with pytest.raises(PeerLostError, match="it has left"):
        reader.send(torch.ones(1), 1)
    buffer = torch.zeros(3)
    receipt = reader.recv(buffer, 1, 5)
    reader.node.loop.release()
    receipt.wait()
    assert buffer.tolist() == [1, 1, 1]
    with pytest.raises(PeerLostError, match="it has left") as caught:
        reader.recv(buffer, 1, 5).wait()
    assert caught.value.peer == 1


def test_a_farewell_needs_no_store(here: Here) -> None:
    reader, leaver = here.ranks[:2]
    talk(reader, leaver)
    reader.node.membership.reachable = False
    leaver.close()
    with pytest.raises(PeerLostError, match="it has left"):
        reader.recv(torch.zeros(1), 1, 5).wait()


def test_those_who_come_later_talk_to_all(either: Here) -> None:
    late = come_later(either.port, either.key)
    either.ranks.append(late)
    assert late.rank == 3
    assert either.ranks[0].present() == (0, 1, 2, 3)
    for rank in either.ranks[:3]:
        talk(late, rank)


def test_news_that_a_refresh_has_read_is_not_lost(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """`present()` reads the log too: that a rank was given up still reaches the one who waits."""
    waiting, other = here.ranks[0], here.ranks[2]
    waiting.node.connection(2)
    seize(waiting, monkeypatch)
    receipt = waiting.recv(torch.zeros(1), 2, 5)
    here.ranks[1].node.membership.post(MemberEntry("lost", 2, reason="it was seen to end"))
    until(lambda: waiting.present() == (0, 1), "rank 2 is given up")
    waiting.node.loop.release()
    with pytest.raises(PeerLostError, match=r"lost rank 2 .*: it was seen to end"):
        receipt.wait()
    with pytest.raises(PeerLostError, match="the others have declared this rank lost: it was seen to end"):
        other.recv(torch.zeros(1), 0, 5).wait()


# Threads, progress, pressure.


def test_two_threads_wait_at_once(zeromq: Pool) -> None:
    zeromq.run(cases.serve_two_threads, 3, 2000 if HUNTING else 200, 1)


def test_a_large_message_comes_while_the_receiver_computes(zeromq: Pool, tmp_path: Path) -> None:
    assert zeromq.run(cases.deliver_while_it_computes, 2, tmp_path / "taken")[1] > 0


def test_a_fast_sender_is_slowed_but_not_stopped(zeromq: Pool) -> None:
    grown = zeromq.run(cases.press, 2, 2 * connection.MAX_OFFERS)[1]
    assert grown < 32 * MB


def test_many_threads_send_to_one_that_does_not_receive(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many offer at once, none is offered beyond what the receiver takes for an attack."""
    monkeypatch.setattr(connection, "MAX_OFFERS", 3)
    one, other = here.ranks[:2]
    length = connection.MAX_EAGER_BYTES + 1

    def send(number: int) -> None:
        for _ in range(5):
            one.send(torch.full((length,), number, dtype=torch.uint8), 1, 6).wait()

    tasks = [one.runtime.spawn(send, number) for number in range(8)]
    link = other.node.connection(0)
    until(lambda: link.offered == 3, "as many are offered as may be")
    got: Counter[int] = Counter()
    buffer = torch.zeros(length, dtype=torch.uint8)
    for _ in range(8 * 5):
        other.recv(buffer, 0, 6).wait()
        got[int(buffer[0])] += 1
        assert bool((buffer == buffer[0]).all())
    assert got == dict.fromkeys(range(8), 5)
    assert all(task.join(TEST_TIMEOUT_S) for task in tasks)


def test_closing_tells_the_threads_that_wait(here: Here) -> None:
    one = here.ranks[1]
    words: list[str] = []

    def wait(source: int | None) -> None:
        with pytest.raises((WorldError, PeerLostError)) as caught:
            one.recv(torch.zeros(1), source, 9).wait()
        words.append(str(caught.value))

    tasks = [one.runtime.spawn(wait, source) for source in (None, 0, 2)]
    until(lambda: one.node.loop.driver == "thread" and len(one.node.loop.waiting) == 2, "all three wait")
    one.close()
    assert all(task.join(TEST_TIMEOUT_S) for task in tasks)
    assert all("closed" in word for word in words), words
    with pytest.raises(WorldError, match="closed"):
        one.recv(torch.zeros(1), None, 9).wait()
    with pytest.raises(PeerLostError, match="this transport is closed"):
        one.send(torch.zeros(1), 0)
    talk(here.ranks[0], here.ranks[2])


# Those who hold no key, or another.


def test_another_key_is_refused(locked: Here, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WorldError, match=r"has another key: none of the 3 entries .* \(SYNCLINE_KEY\)"):
        come_later(locked.port, key())
    for stranger, lock in ((key(), None), (key(), locked.key), (None, None)):  # the second knows the public half
        with Caller(locked.ranks[0].node.endpoint, b"stranger", stranger, lock) as caller:
            caller.say(b"hello")
            caller.await_the_cut()
    talk(*locked.ranks[:2])
    assert b"stranger" not in locked.ranks[0].node.verified, "a word of it was heard"


def test_one_without_the_key_gets_nothing(locked: Here, caplog: pytest.LogCaptureFixture) -> None:
    """It finds the store, enrols itself and calls: nobody believes the entry, and nobody answers the call."""
    stranger = come_later(locked.port)
    try:
        receipt = stranger.recv(torch.zeros(1), 0, 1)
        with pytest.raises(PeerLostError, match=r"lost rank 0 .*: its connection broke"):
            receipt.wait()
        with pytest.raises(PeerLostError):
            stranger.send(torch.zeros(1), 0, 1)
    finally:
        stranger.close()
    talk(*locked.ranks[:2])
    for rank in locked.ranks:
        until(lambda rank=rank: rank.node.membership.refused, "the entry is seen")  # type: ignore[misc]
        assert rank.present() == (0, 1, 2)
        assert len(rank.node.verified) <= 3
    assert "an entry of the membership log was refused: it is not signed with this world's key" in caplog.text


def test_an_unsigned_entry_is_ignored(locked: Here, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reaches the store can write to it, but neither enrol itself nor strike out another."""
    directory = locked.ranks[0].node.membership
    genuine = json.loads(directory.store.get("log/1"))
    texts = [
        json.dumps({"entry": json.dumps(MemberEntry("lost", 1, reason="forged").__dict__), "mac": ""}),
        json.dumps(
            {"entry": json.dumps(MemberEntry("joined", 9, "tcp://127.0.0.1:9").__dict__), "mac": genuine["mac"]}
        ),
        json.dumps({"entry": genuine["entry"]}),
        "[1, 2]",
        '"text"',
        "\0\xff not JSON",
    ]
    for text in texts:
        directory.store.set(f"log/{directory.store.add('version', 1)}", text)
    locked.store.set("syncline/dead/0", "not JSON")
    for rank in locked.ranks:
        until(lambda rank=rank: rank.node.membership.refused == len(texts), "they are seen")  # type: ignore[misc]
        assert rank.present() == (0, 1, 2)
    talk(*locked.ranks[:2])


def test_raw_bytes_to_the_port(either: Here) -> None:
    address, port = either.ranks[0].node.endpoint.removeprefix("tcp://").split(":")
    for text in (
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(1000),
        b"\xff" * 100_000,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03" * 99,
    ):
        with socket.create_connection((address, int(port)), timeout=TEST_TIMEOUT_S) as raw:
            with suppress(OSError):  # it may be cut off before it has said all
                raw.sendall(text)
                raw.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while raw.recv(4096):
                    pass
    talk(*either.ranks[:2])


# Those who may speak, and say what they should not.


STRANGERS = {
    "no identity of ours": b"stranger",
    "an empty world's": bytes(13),
    "a rank that does not exist": IDENTITY.pack(b"r", 77, bytes(8)),
    "another's rank": IDENTITY.pack(b"r", 1, bytes(8)),
    "the bell's": b"bell",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_not_listened_to(either: Here, name: str, caplog: pytest.LogCaptureFixture) -> None:
    victim = either.ranks[0].node
    with Caller(victim.endpoint, STRANGERS[name], either.key) as caller:
        for frames in ([b""], [b"x" * 1000], [b"a", b"b", b"c"], [bytes(HEADER_BYTES)]):
            assert caller.say(*frames)
        until(lambda: caller.identity in victim.verified, "it is known for a stranger")
        assert victim.verified[caller.identity] is None
        talk(*either.ranks[:2])
    assert caplog.text.count("ignores an unknown sender") == 1, "once is enough"


def flip(frame: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if place == bit // 8 else 0) for place, byte in enumerate(frame))


DEEDS: dict[str, tuple[Callable[[Rogue], list[list[bytes]]], str]] = {
    "nothing": (lambda r: [[b""]], "0 bytes where 36 were expected"),
    "garbage": (lambda r: [[b"x" * 100]], "not a Syncline message"),
    "a short header": (lambda r: [[r.header()[:-1]]], "35 bytes where 36 were expected"),
    "a false name": (lambda r: [[r.header(sender=1)]], "it claims to come from rank 1"),
    "an unknown kind": (lambda r: [[r.header(kind=99)]], "unknown kind 99"),
    "too many frames": (lambda r: [[r.eager(0, b"ab"), b"x", b"y"]], "2 frames too many"),
    "a body that is missing": (lambda r: [[r.header(PART, 0, 3)]], "sent .* frames"),
    "a longer body": (lambda r: [[r.header(length=3) + b"four"]], "4 bytes where its header says 3"),
    "an offer made twice": (lambda r: [[r.header(OFFER, 3, 1 << 20)]] * 2, "it offers message 3 twice"),
    "a part": (lambda r: [[r.header(PART, 5, 3), b"abc"]], "a part of message 5, which was not accepted"),
    "an accept": (lambda r: [[r.header(ACCEPT, 5, 3)]], "message 5, which was not offered"),
    "credit": (lambda r: [[r.header(CREDIT, 5000, 1 << 30)]], "credit for more than was sent"),
    "a flood": (
        lambda r: [[r.eager(number, bytes(60_000))] for number in range(40)],
        "more than it had credit for",
    ),
    "a flood of offers": (
        lambda r: [[r.header(OFFER, number, 1 << 40)] for number in range(connection.MAX_OFFERS + 1)],
        "it offers more than 4096 messages at once",
    ),
}


@pytest.mark.parametrize("name", DEEDS)
def test_a_member_that_breaks_the_rules(either: Here, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is named and not listened to any more, and the others go on."""
    deed, word = DEEDS[name]
    victim = either.ranks[0]
    with Rogue(either) as rogue:
        victim.node.membership.find(rogue.rank)
        receipt = victim.recv(torch.zeros(1), rogue.rank, 44)
        for frames in deed(rogue):
            until(lambda frames=frames: rogue.say(*frames), "it is taken")  # type: ignore[misc]
        with pytest.raises(ProtocolError, match=f"rank {rogue.rank}.*{word}") as caught:
            receipt.wait()
        assert caught.value.peer == rogue.rank
        rogue.say(rogue.eager(0, b"again"))
        talk(*either.ranks[:2])
    assert caplog.text.count(f"rank 0 drops all messages of rank {rogue.rank} from now on") == 1


def test_a_header_with_any_bit_flipped(here: Here) -> None:
    """No bit of a header can change unnoticed."""
    victim = here.ranks[0]
    step = 1 if HUNTING else 17
    for bit in range(0, 8 * HEADER_BYTES, step):
        with Rogue(here) as rogue:
            victim.node.membership.find(rogue.rank)
            receipt = victim.recv(torch.zeros(1), rogue.rank, 44)
            rogue.say(flip(rogue.header(), bit))
            with pytest.raises(ProtocolError, match=f"header from rank {rogue.rank} refused"):
                receipt.wait()
    talk(*here.ranks[:2])


def test_a_frame_that_is_too_long_ends_the_connection(either: Here) -> None:
    with Rogue(either) as rogue:
        rogue.say(rogue.eager(0, bytes(PART_BYTES + 1)))
        rogue.await_the_cut()
        talk(*either.ranks[:2])
        assert rogue.identity not in either.ranks[0].node.verified


def test_a_flood_from_strangers() -> None:
    """Two honest ranks go on while strangers send all they can, and what that costs in memory is bounded."""
    connections = 3
    with Crew() as crew:
        members = [crew.start(cases.hold_out, crew.port, rank, 20) for rank in range(2)]
        endpoint, _ = [member.hear() for member in members]
        callers = [Caller(endpoint, f"stranger {number}".encode()) for number in range(connections)]
        taken = [0] * connections
        try:
            frame = bytes(PART_BYTES)
            while min(taken) < 50:  # the flood is under way
                taken = [count + caller.say(frame) for count, caller in zip(taken, callers, strict=True)]
            for member in members:
                member.say("go on")
            while not members[0].pipe.poll(0) or not members[1].pipe.poll(0):
                for caller in callers:
                    caller.say(frame)
        finally:
            for caller in callers:
                caller.close()
        grown = members[0].hear()
        for member in members:
            member.say("enough")
    assert grown < connections * MAX_UNREAD_FRAMES * PART_BYTES + 64 * MB


def test_a_flood_while_nobody_reads(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """What libzmq keeps unread of one connection is bounded: then the sender has to wait."""
    seize(here.ranks[0], monkeypatch)
    with Caller(here.ranks[0].node.endpoint, b"stranger") as caller:
        taken = 0
        while taken < 4 * MAX_UNREAD_FRAMES and caller.say(bytes(PART_BYTES)):
            taken += 1
    assert taken < 3 * MAX_UNREAD_FRAMES
    here.ranks[0].node.loop.release()
    talk(*here.ranks[:2])


# Bad input.


def test_between_hosts_there_must_be_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCLINE_KEY", raising=False)
    with pytest.raises(WorldError, match=r"between hosts ZeroMQ needs a key: .*syncline run.*SYNCLINE_KEY"):
        choose_key("10.0.0.1", None)
    assert choose_key("127.0.0.1", None) is None
    assert choose_key("10.0.0.1", "none") is None
    monkeypatch.setenv("SYNCLINE_KEY", secret := key())
    assert choose_key("10.0.0.1", None) == secret


@pytest.mark.parametrize("text", ["secret", "x" * 41, "é" * 40, "\x01" * 40])
def test_a_malformed_key(here: Here, text: str) -> None:
    with pytest.raises(WorldError, match="SYNCLINE_KEY is not a key: 40 characters") as caught:
        choose_key("127.0.0.1", text)
    assert text not in str(caught.value), "it may be a slip in a secret"
    with pytest.raises(WorldError, match="SYNCLINE_KEY is not a key"):
        come_later(here.port, text)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_KEY", key())
    with Here(2) as world:
        talk(*world.ranks)
        with Caller(world.ranks[0].node.endpoint, b"stranger") as caller:
            caller.say(b"hello")
            caller.await_the_cut()


def test_joining_where_nobody_is() -> None:
    with pytest.raises(WorldError, match=r"found no store at 127\.0\.0\.1"):
        join(Rendezvous("127.0.0.1", free_port()), 0.5)
    store = serve_a_store()
    with pytest.raises(WorldError, match=rf"no ZeroMQ world is open at 127.0.0.1:{store.port}: its rank 0 starts with"):
        join(Rendezvous("127.0.0.1", store.port), 0.5)


def test_a_rank_that_does_not_exist(here: Here) -> None:
    first: Transport = here.ranks[0]
    with pytest.raises(WorldError, match=r"rank 5 is not in this world: it has ranks \[0, 1, 2\]"):
        first.send(torch.zeros(1), 5)
    with pytest.raises(WorldError, match="rank 5 is not in this world"):
        first.recv(torch.zeros(1), 5)
    with pytest.raises(WorldError, match="is not a rank"):
        first.send(torch.zeros(1), -1)


def test_a_closed_channel_returns_the_credit_of_its_messages(here: Here) -> None:
    """Messages that arrive before and after the channel is closed count as taken."""
    node, taken = here.ranks[0].node, list[str]()
    node.mailbox(5).deliver(memoryview(bytes(3)), 1, 0, lambda: taken.append("before"))
    node.close_channel(5)
    node.mailbox(5).deliver(memoryview(bytes(3)), 1, 0, lambda: taken.append("after"))
    assert taken == ["before", "after"]
