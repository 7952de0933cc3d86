"""What a server knows of one client of one space: which of its requests came, and what they were answered.

A client numbers its requests to a server, from 1 on, and says up to where it has the answers. So a repeated request is
known, and what is kept for a client is bounded::

    numbers    1   2   3   4   5   6   7   8   9   …            acked + SLOTS
               └ acked ┘       │       │   └ parked: it waits for earlier ones, or for clocks
                               │       └ ahead: done before earlier ones were
                               └ applied: all up to here are done, as far as they change anything
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server import protocol
from syncline.server.protocol import Reply, Request
from syncline.server.space import Space

__all__ = ["Answer", "Parked", "Session"]

MOST_LISTS = 64
"""Lists of keys that are remembered for each client."""
MOST_LIST_BYTES = 64 << 20


@dataclass(frozen=True)
class Answer:
    """A reply to send, and its body. `lossy`: the client asks again where it is lost."""

    member: int
    reply: Reply
    body: Tensor | None = None
    lossy: bool = False


@dataclass
class Parked:
    """A request that waits for earlier ones, or for the others' clocks."""

    request: Request
    body: Tensor
    keys: Tensor | None = None
    """The list that it names, once it was looked up: the server may forget lists meanwhile."""
    pushed: bool = False
    answered: bool = False
    """Its body is already what is read."""
    late: bool = False
    staleness: int = -1


@dataclass
class Session:
    """A client of one space, and what it has been answered."""

    member: int
    space: Space
    worker: bool
    applied: int = 0
    """All requests up to this number are done with, as far as they change anything."""
    ahead: set[int] = field(default_factory=set)
    answers: dict[int, Answer] = field(default_factory=dict)
    parked: dict[int, Parked] = field(default_factory=dict)
    acked: int = 0
    view: Tensor | None = None
    """What the client has, where answers are encoded: they tell what changed."""
    seen: Tensor | None = None
    """Which keys of it are the client's already."""
    edition: int = 0
    """The version of the space's weights that the view belongs to."""
    lists: OrderedDict[int, tuple[int, Tensor]] = field(default_factory=OrderedDict)
    """Lists of keys by their digest, each with the first key of its piece."""
    list_bytes: int = 0
    left: bool = False

    def done(self, number: int) -> None:
        """A request has changed what it changes."""
        if number > self.applied:
            self.ahead.add(number)
            self._catch_up()

    def acknowledge(self, acked: int) -> list[Answer]:
        """The client has all answers up to there; those that nobody will ask for again."""
        if acked <= self.acked:
            return []
        if acked > self.acked + protocol.SLOTS:
            raise ProtocolError(f"answers up to {acked} are said to be there, and those after {self.acked} were due")
        self.acked = acked
        if acked > self.applied:  # it was told of one that could not be read here
            self.applied = acked
            self.ahead = {number for number in self.ahead if number > acked}
            self._catch_up()
        return [self.answers.pop(number) for number in list(self.answers) if number <= acked]

    def _catch_up(self) -> None:
        while self.applied + 1 in self.ahead:
            self.applied += 1
            self.ahead.discard(self.applied)

    def knows(self, number: int) -> bool:
        """Whether a request came before."""
        return number <= self.applied or number in self.ahead or number in self.parked

    def expects(self, number: int) -> bool:
        """Whether a request may have this number: one that is not answered yet, and not too far ahead."""
        return self.acked < number <= self.acked + protocol.SLOTS

    def check_number(self, number: int) -> None:
        """Refuse what no client of ours sends: more under way than is kept for one."""
        if not self.expects(number):
            raise ProtocolError(
                f"request {number} where those after {self.acked} were due, and at most {protocol.SLOTS} at "
                "once: wait for answers first"
            )

    def keep(self, answer: Answer) -> Answer:
        """Remember what was answered, until the client has it."""
        if self.expects(answer.reply.number):
            self.answers[answer.reply.number] = answer
        return answer

    # Lists of keys.

    def remember_list(self, digest: int, first: int, keys: Tensor) -> None:
        """Keep a list under its digest; the oldest ones go."""
        self.forget_list(digest)
        self.lists[digest] = first, keys.clone()
        self.list_bytes += 8 * keys.numel()
        while len(self.lists) > MOST_LISTS or self.list_bytes > MOST_LIST_BYTES:
            self.forget_list(next(iter(self.lists)))

    def forget_list(self, digest: int) -> None:
        found = self.lists.pop(digest, None)
        if found is not None:
            self.list_bytes -= 8 * found[1].numel()

    def find_list(self, digest: int, first: int, count: int) -> Tensor | None:
        """The list of a digest; None where it is not known, or no more."""
        if digest not in self.lists:
            return None
        self.lists.move_to_end(digest)
        where, keys = self.lists[digest]
        if where != first or keys.numel() != count:
            raise ProtocolError(
                f"{count} values from key {first} on, for a list of {keys.numel()} keys from {where} on: send the keys"
            )
        return keys

    def forget(self) -> None:
        """The client is gone: nothing is kept for it."""
        self.parked.clear()
        self.answers.clear()
        self.lists.clear()
        self.list_bytes, self.view, self.seen = 0, None, None
