"""Messages that are given up, and channels that are closed: who is told, and what is left of them."""

from __future__ import annotations

import pytest

from syncline.errors import PeerLostError
from syncline.transports.zeromq import connection
from syncline.transports.zeromq.connection import ABANDONED, ACCEPT, DONE, EAGER, OFFER, PART
from tests.transports.zeromq_peer import SMALL, Ear, blank, loss, refused


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(connection, name, value)


@pytest.fixture
def ear() -> Ear:
    return Ear()


def test_a_message_that_was_given_up(ear: Ear) -> None:
    """Its sender is told at once; its place stays until the peer has answered, and the peer is told when it asks."""
    given_up, kept = ear.connection.send(3, 0, blank(9)), ear.connection.send(4, 0, blank(9))
    assert given_up is not None
    ear.connection.abandon(3, "enough")
    assert (given_up.done, given_up.error) == (True, "enough")
    assert ear.connection.oldest() is kept
    for _ in range(2):  # a long message may be asked for twice before the word arrives
        ear.hears(ACCEPT, 0, 9)
    assert ear.said[2:] == [(ABANDONED, 0, 0)]
    ear.hears(DONE, 0)
    assert given_up.error == "enough"
    ear.hears(ACCEPT, 1, 9)
    assert ear.said[3:] == [(PART, 1, 9)]


def test_a_sender_crowded_by_what_it_gave_up(ear: Ear) -> None:
    """There is none to wait for: it says so instead of waiting."""
    for _ in range(6):
        ear.connection.send(3, 0, blank(9))
    ear.connection.abandon(3, "enough")
    with pytest.raises(ConnectionError, match="it has not taken 6 messages that were given up since"):
        ear.connection.send(4, 0, blank(9))


def test_a_peer_gives_a_message_up(ear: Ear) -> None:
    """The receive that had taken it ends with an error; one that was not taken cannot be given up."""
    ear.hears(OFFER, 0, 200)
    refused(ear, "it gives up message 0, which was not accepted", ABANDONED, 0)
    posted = ear.post(200)
    ear.hears(PART, 0, 10, bytes(10))
    ear.hears(ABANDONED, 0)
    assert isinstance(posted.error, PeerLostError)
    assert (posted.done, posted.error.peer) == (True, 1)
    assert ear.said[-1] == (DONE, 0, 0)
    assert not ear.connection.incoming


def test_a_closed_mailbox_gives_the_room_back(ear: Ear) -> None:
    """What lies there unreceived and what comes later is done with, for its sender."""
    ear.hears(OFFER, 0, 100)
    for number in range(1, 7):
        ear.hears(EAGER, number, 8, bytes(8))
    ear.box.close(loss)
    assert ear.connection.taken == [6, 48]
    ear.hears(OFFER, 7, 100)
    ear.hears(EAGER, 8, 8, bytes(8))
    assert [said for said in ear.said if said[0] == DONE] == [(DONE, 0, 0), (DONE, 7, 0)]
    assert (ear.connection.taken, ear.connection.offered, ear.box.waiting_bytes) == ([7, 56], 0, 0)
