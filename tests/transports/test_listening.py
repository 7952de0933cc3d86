"""Messages that are heard by whoever turns ZeroMQ's node: all, in order, before the news of who sent them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from syncline.errors import PeerLostError, WorldError
from syncline.transports import RequestListener
from syncline.transports.zeromq.connection import CREDIT_MESSAGES, MAX_EAGER_BYTES, PART_BYTES
from tests.transports.zeromq_worlds import Here, seize, until

TAG, MOST = 5, 2 * MAX_EAGER_BYTES


@pytest.fixture
def here() -> Iterator[Here]:
    with Here(3) as world:
        yield world


class Ear:
    """Keeps what it hears."""

    def __init__(self, world: Here, then: Callable[[int, bytes], None] | None = None) -> None:
        self.heard: list[tuple[int, bytes]] = []
        self.lost: list[int] = []
        self._then = then
        found = world.ranks[0].listen(TAG, MOST, self.hear, self.lose)
        assert found is not None
        self.listening: RequestListener = found

    def hear(self, source: int, data: memoryview) -> None:
        self.heard.append((source, bytes(data)))
        if self._then is not None:
            self._then(source, bytes(data))

    def lose(self, rank: int) -> None:
        self.lost.append(rank)

    def of(self, source: int) -> list[bytes]:
        return [data for who, data in self.heard if who == source]


def word(number: int, length: int = 8) -> bytes:
    return number.to_bytes(8, "little") + bytes(length - 8)


def test_messages_of_all_lengths_come_in_order(here: Here) -> None:
    """Some go at once, some are offered first; those behind an offered one wait for it."""
    ear = Ear(here)
    lengths = [8, MAX_EAGER_BYTES + 8, 8, 8, 2 * MAX_EAGER_BYTES, MAX_EAGER_BYTES + 8, 8]
    for number in range(70):
        for rank in here.ranks:
            rank.send_bytes((word(number), bytes(lengths[number % 7] - 8)), 0, TAG)
    until(lambda: len(ear.heard) == 3 * 70, "all are heard")
    for number in range(3):
        assert ear.of(number) == [word(n, lengths[n % 7]) for n in range(70)]


def test_more_than_there_is_room_for(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the listener's sockets lie unread, what goes beyond the room is offered, and order is kept."""
    ear = Ear(here)
    seize(here.ranks[0], monkeypatch)
    for number in range(CREDIT_MESSAGES + 100):
        here.ranks[1].send_bytes((word(number),), 0, TAG)
    assert not ear.heard
    here.ranks[0].node.loop.release()
    until(lambda: len(ear.heard) == CREDIT_MESSAGES + 100, "all are heard")
    assert ear.of(1) == [word(number) for number in range(CREDIT_MESSAGES + 100)]


def test_what_came_before_anyone_listened(here: Here) -> None:
    here.ranks[1].send_bytes((word(1),), 0, TAG)
    here.ranks[1].send(torch.zeros(1, dtype=torch.uint8), 0, TAG + 1).wait()
    here.ranks[0].recv(torch.zeros(1, dtype=torch.uint8), 1, TAG + 1).wait()  # so the other has come as well
    ear = Ear(here)
    until(lambda: bool(ear.heard), "it is heard")
    here.ranks[1].send_bytes((word(2),), 0, TAG)
    until(lambda: len(ear.heard) > 1, "the next one is heard")
    assert ear.heard == [(1, word(1)), (1, word(2))], "once, and first"


def test_one_that_is_too_long_is_nothing(here: Here) -> None:
    ear = Ear(here)
    here.ranks[1].send(torch.zeros(MOST + 1, dtype=torch.uint8), 0, TAG).wait()
    here.ranks[1].send_bytes((word(2),), 0, TAG)
    until(lambda: len(ear.heard) > 1, "both are heard")
    assert ear.heard == [(1, b""), (1, word(2))]


def test_an_ear_that_raises_is_asked_again(here: Here) -> None:
    def refuse(source: int, data: bytes) -> None:
        raise RuntimeError("a bug of the listener's")

    ear = Ear(here, refuse)
    for number in range(3):
        here.ranks[1].send_bytes((word(number),), 0, TAG)
    until(lambda: len(ear.heard) == 3, "all are heard")
    assert ear.of(1) == [word(number) for number in range(3)]


def test_a_body_is_fetched_straight_into_place(here: Here) -> None:
    done: list[Any] = []
    body = torch.zeros(2 * PART_BYTES + 3, dtype=torch.uint8)
    sent = torch.randint(0, 256, body.shape, dtype=torch.uint8)

    def fetch(source: int, data: bytes) -> None:
        ear.listening.fetch(body, source, 9, done.append)

    ear = Ear(here, fetch)
    here.ranks[2].send_bytes((word(0),), 0, TAG)
    here.ranks[2].send(sent, 0, 9, exact=True).wait()
    until(lambda: done == [None], "it is here")
    assert torch.equal(body, sent)


def test_a_body_of_another_length_is_refused(here: Here) -> None:
    done: list[Any] = []

    def fetch(source: int, data: bytes) -> None:
        ear.listening.fetch(torch.zeros(8, dtype=torch.uint8), source, 9, done.append)

    ear = Ear(here, fetch)
    here.ranks[2].send_bytes((word(0),), 0, TAG)
    here.ranks[2].send(torch.zeros(9, dtype=torch.uint8), 0, 9, exact=True)
    until(lambda: bool(done), "it is told")
    assert "exactly" in str(done[0])


def test_a_loss_is_reported_after_all_messages(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    ear = Ear(here, lambda source, data: seen.append(len(ear.lost)))
    seize(here.ranks[0], monkeypatch)
    for number in range(50):
        here.ranks[1].send_bytes((word(number),), 0, TAG)
    here.ranks[1].close()
    here.ranks[0].node.loop.release()
    until(lambda: ear.lost == [1], "its end is told")
    assert seen == [0] * 50
    late = Ear(here)
    until(lambda: late.lost == [1], "who listens later is told as well")


def test_a_body_of_one_that_is_gone(here: Here) -> None:
    done: list[Any] = []

    def fetch(source: int, data: bytes) -> None:
        ear.listening.fetch(torch.zeros(8, dtype=torch.uint8), source, 9, done.append)

    ear = Ear(here, fetch)
    here.ranks[1].send_bytes((word(0),), 0, TAG)
    until(lambda: bool(ear.heard), "it is heard")
    here.ranks[1].close()
    until(lambda: bool(done), "it is told")
    assert isinstance(done[0], PeerLostError)
    ear.listening.fetch(torch.zeros(8, dtype=torch.uint8), 1, 9, done.append)
    here.ranks[0].node.wake()
    until(lambda: len(done) == 2, "who asks later is told as well")
    assert isinstance(done[1], PeerLostError)


def test_who_hears_must_not_wait(here: Here) -> None:
    errors: list[str] = []

    def wait(source: int, data: bytes) -> None:
        try:
            here.ranks[0].recv(torch.zeros(1), 2, 77).wait()
        except WorldError as error:
            errors.append(str(error))

    Ear(here, wait)
    here.ranks[1].send_bytes((word(0),), 0, TAG)
    until(lambda: bool(errors), "it is refused")
    assert "while it handles a message" in errors[0]


def test_nobody_listens_any_more(here: Here) -> None:
    ear = Ear(here)
    ear.listening.close()
    here.ranks[1].send_bytes((word(3),), 0, TAG)
    taking = here.ranks[0].recv_bytes(64, 1, TAG)
    taking.wait()
    assert bytes(taking.data) == word(3)
    assert not ear.heard
