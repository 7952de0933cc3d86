"""The protocol between two ZeroMQ nodes, without a socket: the test chooses every interleaving."""

from __future__ import annotations

import os
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError
from syncline.runtime import RealRuntime
from syncline.transports import messages
from syncline.transports.messages import HEADER_BYTES, Mailbox, MessageHeader, PostedReceive
from syncline.transports.zeromq import connection
from syncline.transports.zeromq.connection import (
    ACCEPT,
    CREDIT,
    DONE,
    EAGER,
    FRAME_KINDS,
    OFFER,
    PART,
    OutgoingMessage,
    PeerConnection,
    TooManyOffersError,
)
from tests.transports.zeromq_peer import SMALL, Ear, blank, loss, refused

LENGTHS = (0, 1, 8, 9, 16, 53, 160)
LONGEST = max(LENGTHS)
TAGS = 3


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(connection, name, value)


class Play:
    """A few nodes whose frames lie in queues, one for each direction, until the seed draws them."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.ranks = range(draw.choice((2, 2, 3)))
        runtime = RealRuntime()
        self.boxes = {rank: Mailbox(runtime) for rank in self.ranks}
        self.wires: dict[tuple[int, int], deque[list[bytes]]] = {}
        self.links: dict[tuple[int, int], PeerConnection] = {}
        self.under_way: dict[tuple[tuple[int, int], int], int] = defaultdict(int)  # bytes, by pair and message
        for pair in [(one, other) for one in self.ranks for other in self.ranks if one != other]:
            self.wires[pair] = deque()
            self.links[pair] = PeerConnection(runtime, *pair, self.emitter(pair), self.opener(pair[0]))
        self.texts: dict[tuple[int, int, int], list[bytes]] = defaultdict(list)  # by sender, receiver, tag
        self.to_send: dict[tuple[int, int], list[tuple[int, Tensor]]] = {pair: [] for pair in self.links}
        self.to_post: list[tuple[int, int | None, int, int]] = []  # receiver, from whom, tag, room
        self.outgoing: list[OutgoingMessage] = []
        self.posted: list[tuple[int, PostedReceive]] = []
        self.plan()

    def emitter(self, pair: tuple[int, int]) -> Any:
        def emit(frames: Sequence[Any]) -> None:
            self.wires[pair].append([bytes(frame) for frame in frames])
            if len(frames) == 2:
                key = (pair, MessageHeader.read(frames[0], pair[0], FRAME_KINDS).number)
                self.under_way[key] += len(frames[1])
                assert len(frames[1]) <= SMALL["PART_BYTES"]
                assert self.under_way[key] <= SMALL["MAX_INFLIGHT_BYTES"]

        return emit

    def opener(self, rank: int) -> Callable[[int], Mailbox]:
        return lambda channel: self.boxes[rank]

    def plan(self) -> None:
        """Messages, and for each its receive: all of a tag's directed, or all of them from anyone."""
        draw = self.draw
        anyone = {(rank, tag) for rank in self.ranks for tag in range(TAGS) if draw.random() < 0.4}
        for sender, receiver in self.links:
            for _ in range(draw.randrange(20)):
                tag, length = draw.randrange(TAGS), draw.choice(LENGTHS)
                text = draw.randbytes(length)
                self.texts[sender, receiver, tag].append(text)
                self.to_send[sender, receiver].append((tag, torch.tensor(list(text), dtype=torch.uint8)))
                if (receiver, tag) in anyone:
                    self.to_post.append((receiver, None, tag, LONGEST))
                else:
                    room = length - 1 if length and draw.random() < 0.1 else draw.choice((length, LONGEST))
                    self.to_post.append((receiver, sender, tag, room))
        self.to_post = self.mixed(self.to_post)

    def mixed(self, receives: list[tuple[int, int | None, int, int]]) -> list[tuple[int, int | None, int, int]]:
        """Any order that keeps each sender's and tag's own: the i-th receive is for the i-th message."""
        queues: dict[tuple[int, int | None, int], deque[tuple[int, int | None, int, int]]] = defaultdict(deque)
        for receive in receives:
            queues[receive[:3]].append(receive)
        keys = [receive[:3] for receive in receives]
        self.draw.shuffle(keys)
        return [queues[key].popleft() for key in keys]

    def run(self) -> None:
        """Draw one step after the other until nothing is left to do."""
        deeds = [
            (self.send, self.post, self.deliver)[kind] for kind in range(3) for _ in range(self.draw.choice((1, 4, 16)))
        ]
        idle: set[Any] = set()
        while len(idle) < 3:
            deed = self.draw.choice(deeds)
            if deed in idle:
                continue
            if deed():
                idle.clear()
                self.check_bounds()
            else:
                idle.add(deed)

    def send(self) -> bool:
        pairs = [pair for pair, messages in self.to_send.items() if messages]
        self.draw.shuffle(pairs)
        for pair in pairs:
            tag, data = self.to_send[pair][0]
            try:
                outgoing = self.links[pair].send(0, tag, data)
            except TooManyOffersError:
                continue
            self.to_send[pair].pop(0)
            if outgoing is None:
                data.zero_()  # it was copied: the buffer is free at once
            else:
                self.outgoing.append(outgoing)
            return True
        return False

    def post(self) -> bool:
        if self.to_post:
            receiver, source, tag, room = self.to_post.pop(0)
            self.posted.append((receiver, self.boxes[receiver].post(blank(room), source, tag, False)))
            return True
        return False

    def deliver(self) -> bool:
        wires = [pair for pair, frames in self.wires.items() if frames]
        if not wires:
            return False
        sender, receiver = self.draw.choice(wires)
        frames = self.wires[sender, receiver].popleft()
        header = MessageHeader.read(frames[0][:HEADER_BYTES], sender, FRAME_KINDS)
        assert len(frames) == 1 + (header.kind == PART)
        self.under_way[(sender, receiver), header.number] -= header.length if header.kind == PART else 0
        self.links[receiver, sender].receive(header, memoryview(frames[-1])[HEADER_BYTES if len(frames) == 1 else 0 :])
        return True

    def check_bounds(self) -> None:
        for link in self.links.values():
            assert link.arrived[0] - link.taken[0] <= SMALL["CREDIT_MESSAGES"]
            assert link.arrived[1] - link.taken[1] <= SMALL["CREDIT_BYTES"]
            assert link.sent[0] <= link.credit[0]
            assert link.sent[1] <= link.credit[1]
            assert len(link.offers) <= SMALL["MAX_OFFERS"]
        for box in self.boxes.values():  # what is offered stays with its sender
            assert box.waiting_bytes <= SMALL["CREDIT_BYTES"] * (len(self.ranks) - 1)

    def check_the_end(self) -> None:
        assert not any(self.to_send.values()), "a sender was stopped for good"
        assert all(outgoing.done and not outgoing.error for outgoing in self.outgoing)
        got: dict[tuple[int, int, int], list[bytes | None]] = defaultdict(list)
        for receiver, posted in self.posted:
            assert posted.done, f"{posted} waits for good"
            fits = posted.nbytes <= posted.data.numel()
            if not fits:
                assert isinstance(posted.error, ProtocolError)
                assert posted.error.peer == posted.source
            assert fits == (posted.error is None)
            text = bytes(posted.data[: posted.nbytes].tolist()) if fits else None
            got[posted.source, receiver, posted.tag].append(text)
        assert {key: len(texts) for key, texts in got.items()} == {key: len(texts) for key, texts in self.texts.items()}
        for key, texts in got.items():
            assert all(text in (None, due) for text, due in zip(texts, self.texts[key], strict=True)), key
        for link in self.links.values():
            assert not link.offers
            assert not link.incoming
            assert link.offered == 0


@pytest.mark.hunt
def test_any_interleaving() -> None:
    """Every message arrives once, complete and in order; unreceived bytes are bounded; every wait ends."""
    for seed in range(20_000 if os.environ.get("SYNCLINE_HUNT") else 300):
        play = Play(seed)
        try:
            play.run()
            play.check_the_end()
        except Exception as error:
            raise AssertionError(
                f"seed {seed} breaks it: {error!r}\nreplay: play = Play({seed}); play.run(); play.check_the_end()"
            ) from error


@pytest.mark.parametrize(("what", "length"), [("NUMBER_MODULUS", 1), ("BYTES_MODULUS", 8)])
def test_counts_wrap_around(monkeypatch: pytest.MonkeyPatch, what: str, length: int) -> None:
    """Message numbers and byte counts wrap around, and credit is still granted."""
    monkeypatch.setattr(connection, what, 32 if what == "NUMBER_MODULUS" else 256)
    play = Play(0)
    link, box = play.links[0, 1], play.boxes[1]
    for number in range(200):
        assert link.send(0, 5, torch.full((length,), number, dtype=torch.uint8)) is None, "there was room for it"
        posted = box.post(blank(length), 0, 5, True)
        while play.deliver():
            pass
        assert (posted.done, posted.error, posted.data.tolist()) == (True, None, [number] * length)


def test_a_connection_outlives_a_tebibyte() -> None:
    """Credit for more bytes than a header may name."""
    play = Play(0)
    link, back, box = play.links[0, 1], play.links[1, 0], play.boxes[1]
    far = messages.MAX_MESSAGE_BYTES - 100
    link.sent[1], link.credit[1] = far, far + SMALL["CREDIT_BYTES"]
    back.arrived[1], back.taken[1], back.credited[1] = far, far, far
    for number in range(40):
        assert link.send(0, 5, blank(8)) is None, f"message {number} found no room"
        posted = box.post(blank(8), 0, 5, True)
        while play.deliver():
            pass
        assert posted.done
    assert link.credit[1] > messages.MAX_MESSAGE_BYTES


# One connection, and a peer that keeps the protocol or breaks it.


@pytest.fixture
def ear() -> Ear:
    return Ear()


def test_an_offer_made_twice_is_noticed(ear: Ear) -> None:
    ear.hears(OFFER, 7, 16)
    refused(ear, "it offers message 7 twice", OFFER, 7, 16)


def test_an_offer_under_the_number_of_an_accepted_one_is_noticed(ear: Ear) -> None:
    ear.post(16)
    ear.hears(OFFER, 7, 16)
    refused(ear, "it offers message 7 twice", OFFER, 7, 16)


def test_small_messages_have_no_numbers(ear: Ear) -> None:
    """A connection carries each message once and in order, so that nothing is numbered to detect repeats."""
    for _ in range(3):
        assert ear.connection.send(0, 0, blank(4)) is None
    assert ear.said == [(EAGER, 0, 4)] * 3


@pytest.mark.parametrize("body", [b"", b"ab", b"abcd"])
def test_a_body_is_as_long_as_its_header_says(ear: Ear, body: bytes) -> None:
    refused(ear, f"{len(body)} bytes where its header says 3", EAGER, 0, 3, body)


def test_more_bytes_than_there_is_room_for(ear: Ear) -> None:
    for number in range(8):
        ear.hears(EAGER, number, 8, bytes(8))
    refused(ear, "more than it had credit for", EAGER, 8, 1, b"x")


def test_more_messages_than_there_is_room_for(ear: Ear) -> None:
    for number in range(12):
        ear.hears(EAGER, number)
    refused(ear, "more than it had credit for", EAGER, 12)


def test_credit_returns_when_messages_are_taken(ear: Ear) -> None:
    for number in range(100):
        ear.hears(EAGER, number, 8, bytes(8))
        if number >= 7:
            assert ear.post(8).done
    credits = [said for said in ear.said if said[0] == CREDIT]
    assert credits[-1] == (CREDIT, 92 + 12, 92 * 8 + 64)
    assert ear.box.waiting_bytes == 7 * 8


def test_too_many_offers(ear: Ear) -> None:
    for number in range(6):
        ear.hears(OFFER, number, 1000)
    refused(ear, "it offers more than 6 messages at once", OFFER, 6, 1000)


def test_offers_hold_no_bytes_here(ear: Ear) -> None:
    for number in range(6):
        ear.hears(OFFER, number, 1 << 40)
    assert ear.box.waiting_bytes == 0
    assert ear.said == []


def test_a_part_that_was_not_accepted(ear: Ear) -> None:
    refused(ear, "a part of message 7, which was not accepted", PART, 7, 4, b"abcd")
    ear.hears(OFFER, 0, 4)
    refused(ear, "a part of message 0, which was not accepted", PART, 0, 4, b"abcd")


def test_a_part_of_another_length_than_its_header_says(ear: Ear) -> None:
    ear.hears(OFFER, 0, 9)
    posted = ear.post(9)
    refused(ear, "a part of message 0", PART, 0, 9, b"abc")
    assert not posted.data.any()


def test_more_than_was_accepted(ear: Ear) -> None:
    posted = ear.post(200)
    ear.hears(OFFER, 0, 200)
    assert ear.said == [(ACCEPT, 0, 64)]
    refused(ear, "more of message 0 than was accepted", PART, 0, 65, bytes([1]) * 65)
    assert not posted.data.any()


def test_more_than_was_offered(ear: Ear) -> None:
    ear.hears(OFFER, 0, 20)
    ear.post(200)
    ear.hears(PART, 0, 16, bytes(16))
    refused(ear, "more of message 0 than was accepted", PART, 0, 16, bytes(16))


def test_parts_are_asked_for_as_they_are_taken(ear: Ear) -> None:
    posted = ear.post(200)
    ear.hears(OFFER, 0, 200)
    for first in range(0, 200, 10):
        assert not posted.done
        ear.hears(PART, 0, 10, bytes(range(first, first + 10)))
    assert posted.done
    assert posted.data.tolist() == list(range(200))
    assert ear.said == [
        (ACCEPT, 0, 64),
        (ACCEPT, 0, 104),
        (ACCEPT, 0, 144),
        (ACCEPT, 0, 184),
        (ACCEPT, 0, 200),
        (DONE, 0, 0),
    ]


def test_an_accept_of_what_was_not_offered(ear: Ear) -> None:
    refused(ear, "it accepts 5 bytes of message 3, which was not offered", ACCEPT, 3, 5)
    ear.connection.send(0, 0, blank(20))
    refused(ear, "it accepts 21 bytes of message 0, which was not offered", ACCEPT, 0, 21)


def test_word_of_what_was_not_offered(ear: Ear) -> None:
    refused(ear, "it has message 3, which was not offered", DONE, 3)


def test_an_eager_message_cannot_be_accepted(ear: Ear) -> None:
    assert ear.connection.send(0, 0, blank(8)) is None
    refused(ear, "message 0, which was not offered", ACCEPT, 0, 8)
    refused(ear, "message 0, which was not offered", DONE, 0)


@pytest.mark.parametrize(("messages", "nbytes"), [(14, 72), (13, 73), (12, 72), (0, 72)])
def test_credit_for_more_than_was_sent(ear: Ear, messages: int, nbytes: int) -> None:
    """One message of eight bytes went: room for 13 messages and 72 bytes in all is the most. None is taken back."""
    ear.connection.send(0, 0, blank(8))
    ear.hears(CREDIT, 13, 72)
    refused(ear, "it grants credit for more than was sent", CREDIT, messages, nbytes)


def test_a_sender_out_of_room_offers(ear: Ear) -> None:
    assert [ear.connection.send(0, 0, blank(8)) for _ in range(8)] == [None] * 8
    outgoing = ear.connection.send(0, 0, blank(1))
    assert outgoing is not None
    assert ear.said[-1] == (OFFER, 0, 1)
    ear.hears(CREDIT, 13, 72)
    assert ear.connection.send(0, 0, blank(8)) is None
    ear.hears(DONE, 0)
    assert outgoing.done


def test_a_sender_with_too_many_offers_names_the_oldest(ear: Ear) -> None:
    offers = [ear.connection.send(0, 0, blank(9)) for _ in range(6)]
    with pytest.raises(TooManyOffersError) as caught:
        ear.connection.send(0, 0, blank(9))
    assert caught.value.oldest is offers[0]
    assert ear.connection.send(0, 0, blank(8)) is None  # there is room for what goes at once
    ear.hears(DONE, 0)
    assert ear.connection.send(0, 0, blank(9)) is not None
    numbers = [number for kind, number, _ in ear.said if kind == OFFER]
    assert numbers == list(range(7)), "a refused message took no number"


def test_a_message_that_is_too_long_is_refused(ear: Ear) -> None:
    """Its sender gets DONE, and none of its bytes arrives."""
    posted = ear.post(8)
    ear.hears(OFFER, 0, 20)
    assert ear.said == [(DONE, 0, 0)]
    assert isinstance(posted.error, ProtocolError)
    ear.hears(EAGER, 1, 3, b"abc")
    assert bytes(ear.post(8).data.tolist()[:3]) == b"abc"


def test_what_was_given_up_is_not_written(ear: Ear) -> None:
    posted = ear.post(20)
    ear.hears(OFFER, 0, 20)
    ear.hears(PART, 0, 10, b"\1" * 10)
    assert ear.box.withdraw(posted)
    ear.hears(PART, 0, 10, b"\1" * 10)
    assert posted.data.tolist() == [1] * 10 + [0] * 10
    assert ear.said[-1] == (DONE, 0, 0), "the sender is done with it all the same"


def test_a_lost_link_breaks_both_ways(ear: Ear) -> None:
    outgoing = ear.connection.send(0, 0, blank(100))
    under_way = ear.post(100)
    ear.hears(OFFER, 0, 100)
    ear.hears(OFFER, 1, 100)
    ear.hears(EAGER, 2, 1, b"x")
    ear.connection.lose("its connection broke", loss)
    assert outgoing is not None
    assert (outgoing.done, outgoing.error) == (True, "its connection broke")
    assert under_way.done
    assert isinstance(under_way.error, PeerLostError)
    offered_before = ear.post(100)
    assert isinstance(offered_before.error, PeerLostError), "its bytes are lost with their sender"
    arrived_before = ear.post(1)
    assert (arrived_before.done, arrived_before.error, arrived_before.nbytes) == (True, None, 1)
    with pytest.raises(ConnectionError, match="its connection broke"):
        ear.connection.send(0, 0, blank(1))
    assert ear.connection.oldest() is None


def test_one_that_leaves_is_still_heard(ear: Ear) -> None:
    """It takes no messages, but those that it sent before its goodbye message are delivered."""
    ear.connection.left = "it has left"
    with pytest.raises(ConnectionError, match="it has left"):
        ear.connection.send(0, 0, blank(1))
    ear.hears(EAGER, 0, 1, b"x")
    assert ear.post(1).done
