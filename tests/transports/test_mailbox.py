"""The mailbox: which message goes to which receive, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError
from syncline.runtime import RealRuntime
from syncline.transports import messages as module
from syncline.transports.base import LANE_TAGS
from syncline.transports.messages import Mailbox, PostedReceive


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(RealRuntime())


def message(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def post(
    mailbox: Mailbox, room: int = 1, wanted: int | None = None, tag: int = 0, exact: bool = False
) -> PostedReceive:
    return mailbox.post(torch.zeros(room, dtype=torch.uint8), wanted, tag, exact)


def got(posted: PostedReceive) -> tuple[bool, int, list[int]]:
    """Whether a receive is settled without an error, from whom, and what it holds."""
    return posted.done and posted.error is None, posted.source, posted.data[: posted.nbytes].tolist()


NOT_YET: tuple[bool, int, list[int]] = (False, -1, [])


def test_messages_first(mailbox: Mailbox) -> None:
    """Messages that wait are taken in the order they came."""
    for value in (1, 2, 3):
        mailbox.deliver(message(value), source=0, tag=0)
    assert [got(post(mailbox)) for _ in range(3)] == [(True, 0, [1]), (True, 0, [2]), (True, 0, [3])]
    assert got(post(mailbox)) == NOT_YET


def test_receives_first(mailbox: Mailbox) -> None:
    """Receives that wait are served in the order they were posted."""
    waiting = [post(mailbox) for _ in range(3)]
    mailbox.deliver(message(1), source=0, tag=0)
    assert [got(posted) for posted in waiting] == [(True, 0, [1]), NOT_YET, NOT_YET]
    mailbox.deliver(message(2), source=0, tag=0)
    mailbox.deliver(message(3), source=0, tag=0)
    assert [got(posted) for posted in waiting] == [(True, 0, [1]), (True, 0, [2]), (True, 0, [3])]


def test_tags_do_not_mix(mailbox: Mailbox) -> None:
    """A receive takes its own tag alone, whichever came first."""
    mailbox.deliver(message(1), source=0, tag=1)
    mailbox.deliver(message(2), source=0, tag=2)
    assert got(post(mailbox, tag=3)) == NOT_YET
    assert got(post(mailbox, tag=2)) == (True, 0, [2])
    assert got(post(mailbox, tag=1)) == (True, 0, [1])
    waiting = post(mailbox, tag=5)
    mailbox.deliver(message(4), source=0, tag=4)
    assert got(waiting) == NOT_YET
    mailbox.deliver(message(5), source=0, tag=5)
    assert got(waiting) == (True, 0, [5])


def test_sources_do_not_mix(mailbox: Mailbox) -> None:
    """A receive from one rank passes over the messages of the others."""
    mailbox.deliver(message(1), source=1, tag=0)
    mailbox.deliver(message(2), source=2, tag=0)
    assert got(post(mailbox, wanted=0)) == NOT_YET
    assert got(post(mailbox, wanted=2)) == (True, 2, [2])
    assert got(post(mailbox, wanted=1)) == (True, 1, [1])


def test_from_anyone(mailbox: Mailbox) -> None:
    """A receive from anyone takes the earliest message of its tag and says who sent it."""
    mailbox.deliver(message(9), source=4, tag=1)
    mailbox.deliver(message(1), source=3, tag=0)
    mailbox.deliver(message(2), source=2, tag=0)
    assert [got(post(mailbox)) for _ in range(2)] == [(True, 3, [1]), (True, 2, [2])]
    waiting = post(mailbox), post(mailbox, wanted=5)
    mailbox.deliver(message(7), source=5, tag=0)
    assert [got(posted) for posted in waiting] == [(True, 5, [7]), NOT_YET]


def test_a_shorter_message(mailbox: Mailbox) -> None:
    """It fills the beginning of the buffer, and its length is told; the rest stays."""
    waiting = mailbox.post(message(9, 9, 9), None, 0, exact=False)
    mailbox.deliver(message(1, 2), source=0, tag=0)
    assert got(waiting) == (True, 0, [1, 2])
    assert waiting.data.tolist() == [1, 2, 9]
    empty = post(mailbox, room=2)
    mailbox.deliver(message(), source=0, tag=0)
    assert got(empty) == (True, 0, [])


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize(
    ("exact", "length", "word"), [(True, 1, "exactly"), (True, 3, "exactly"), (False, 3, "at most")]
)
def test_a_wrong_length(mailbox: Mailbox, posted_first: bool, exact: bool, length: int, word: str) -> None:
    """A longer message, or any other length where one was agreed, is an error that names the sender."""
    waiting = post(mailbox, room=2, tag=6, exact=exact) if posted_first else None
    mailbox.deliver(message(*[7] * length), source=4, tag=6)
    waiting = waiting or post(mailbox, room=2, tag=6, exact=exact)
    assert waiting.done
    assert isinstance(waiting.error, ProtocolError)
    assert str(waiting.error) == f"rank 4 sent {length} B (tag 6) where {word} 2 B were expected"
    assert waiting.error.peer == 4
    assert waiting.data.tolist() == [0, 0]


def test_a_wrong_length_in_a_collective_hints_at_check(mailbox: Mailbox) -> None:
    mailbox.deliver(message(7), source=4, tag=LANE_TAGS)
    assert "check=True" in str(post(mailbox, room=2, tag=LANE_TAGS, exact=True).error)


def test_an_exact_length(mailbox: Mailbox) -> None:
    """The length that was agreed is taken."""
    mailbox.deliver(message(1, 2), source=0, tag=0)
    assert got(post(mailbox, room=2, exact=True)) == (True, 0, [1, 2])


def test_the_sender_learns_of_the_match(mailbox: Mailbox) -> None:
    """`matched` is called once, when a receive takes the message and not before."""
    matches: list[int] = []
    mailbox.deliver(message(1), 0, 0, lambda: matches.append(1))
    assert matches == []
    post(mailbox)
    assert matches == [1]
    post(mailbox)
    mailbox.deliver(message(2), 0, 0, lambda: matches.append(2))
    assert matches == [1, 2]


def test_too_much_waits(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that nobody receives are refused beyond the limit, and welcome again when there is room."""
    monkeypatch.setattr(module, "MAX_UNRECEIVED_BYTES", 4)
    mailbox.deliver(message(1, 2), source=0, tag=0)
    mailbox.deliver(message(3, 4), source=1, tag=0)
    with pytest.raises(ProtocolError, match=r"4 B wait unreceived and rank 2 sends 1 B more \(tag 7\)") as caught:
        mailbox.deliver(message(5), source=2, tag=7)
    assert caught.value.peer == 2
    assert got(post(mailbox, tag=7)) == NOT_YET  # what was refused is not there
    assert got(post(mailbox, room=2)) == (True, 0, [1, 2])
    mailbox.deliver(message(5, 6), source=2, tag=0)
    assert [got(post(mailbox, room=2)) for _ in range(2)] == [(True, 1, [3, 4]), (True, 2, [5, 6])]


def test_what_is_awaited_may_be_large(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts what waits: a message whose receive is there passes, and does not count after."""
    monkeypatch.setattr(module, "MAX_UNRECEIVED_BYTES", 2)
    for _ in range(3):
        waiting = post(mailbox, room=5)
        mailbox.deliver(message(1, 2, 3, 4, 5), source=0, tag=0)
        assert got(waiting) == (True, 0, [1, 2, 3, 4, 5])
    mailbox.deliver(message(1, 2), source=0, tag=0)
    assert got(post(mailbox, room=2)) == (True, 0, [1, 2])


def test_fail_breaks_the_chosen_receives(mailbox: Mailbox) -> None:
    """Receives for which an error is given end with it; the others go on waiting and are served."""
    lost, other, anyone = post(mailbox, wanted=1), post(mailbox, wanted=2), post(mailbox)
    event = mailbox.event_of(lost)
    assert event is not None
    error = PeerLostError("rank 1 is gone", peer=1)
    mailbox.fail(lambda posted: error if posted.wanted == 1 else None)
    assert lost.done
    assert lost.error is error
    assert event.is_set()
    assert [got(posted) for posted in (other, anyone)] == [NOT_YET, NOT_YET]
    mailbox.deliver(message(1), source=1, tag=0)
    mailbox.deliver(message(2), source=2, tag=0)
    assert [got(posted) for posted in (other, anyone)] == [(True, 2, [2]), (True, 1, [1])]
    assert lost.error is error
    assert lost.data.tolist() == [0]


def test_fail_leaves_settled_receives(mailbox: Mailbox) -> None:
    """A receive that has its message keeps it."""
    done = post(mailbox)
    mailbox.deliver(message(1), source=1, tag=0)
    mailbox.fail(lambda posted: PeerLostError("gone", peer=1))
    assert got(done) == (True, 1, [1])


def test_events(mailbox: Mailbox) -> None:
    """A receive that waits has one event, set by its message; a settled one needs none."""
    waiting = post(mailbox)
    event = mailbox.event_of(waiting)
    assert event is not None
    assert mailbox.event_of(waiting) is event
    assert not event.is_set()
    mailbox.deliver(message(1), source=0, tag=0)
    assert event.is_set()
    assert mailbox.event_of(waiting) is None


def test_room_is_waited_for(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that finds the mailbox full waits until something is taken, or until a receive wants it."""
    monkeypatch.setattr(module, "MAX_UNRECEIVED_BYTES", 2)
    mailbox.deliver(message(1, 2), source=0, tag=0)
    waiting = RealRuntime().spawn(mailbox.wait_for_space, 1, 0, 0)
    assert not waiting.join(0.05)
    post(mailbox, room=2)
    assert waiting.join(30)
    mailbox.deliver(message(3, 4), source=0, tag=0)
    waiting = RealRuntime().spawn(mailbox.wait_for_space, 2, 1, 7)
    assert not waiting.join(0.05)
    post(mailbox, room=2, wanted=1, tag=7)
    assert waiting.join(30)


def test_a_message_longer_than_all_bounds_is_refused(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the limit and than the receive: not even read."""
    monkeypatch.setattr(module, "MAX_UNRECEIVED_BYTES", 4)
    post(mailbox, room=6)
    mailbox.wait_for_space(6, 0, 0)
    with pytest.raises(ProtocolError, match=r"rank 3 announces 7 B .*at most 6 B"):
        mailbox.wait_for_space(7, 3, 0)


def test_a_receive_that_was_given_up_is_withdrawn(mailbox: Mailbox) -> None:
    """It takes no message any more; one that is settled cannot be taken back."""
    given_up = post(mailbox)
    assert mailbox.withdraw(given_up)
    served = post(mailbox)
    mailbox.deliver(message(5), source=0, tag=0)
    assert got(given_up) == NOT_YET
    assert got(served) == (True, 0, [5])
    assert not mailbox.withdraw(served)


def test_a_closed_mailbox_discards_everything(mailbox: Mailbox) -> None:
    """Receives break, now and later; senders learn that they are done, of what has come and of what still comes."""
    done: list[str] = []
    taken: list[PostedReceive | None] = []
    waiting = post(mailbox, tag=1)
    mailbox.deliver(message(1), 0, 0, lambda: done.append("before"))
    mailbox.offer(100, 0, 0, taken.append)
    mailbox.close(lambda posted: PeerLostError(f"closed, tag {posted.tag}"))
    mailbox.close(lambda posted: PeerLostError("a second time"))
    assert (done, taken) == (["before"], [None])
    mailbox.deliver(message(1), 0, 0, lambda: done.append("after"))
    mailbox.offer(100, 0, 0, taken.append)
    assert (done, taken) == (["before", "after"], [None, None])
    for posted, tag in ((waiting, 1), (post(mailbox), 0)):
        assert posted.done
        assert str(posted.error) == f"closed, tag {tag}"


def test_closing_ends_the_wait_for_space(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNRECEIVED_BYTES", 2)
    mailbox.deliver(message(1, 2), source=0, tag=0)
    waiting = RealRuntime().spawn(mailbox.wait_for_space, 1, 0, 0)
    assert not waiting.join(0.05)
    mailbox.close(lambda posted: PeerLostError("closed"))
    assert waiting.join(30)
