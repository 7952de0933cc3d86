"""What clients ask of a server that is not about values: the board, clocks, handlers' numbers, planes.

Questions and answers are small JSON objects, checked field by field.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server import protocol
from syncline.server.client_session import ClientSession
from syncline.server.protocol import Post, json_body
from syncline.server.rules.handlers import find_handler
from syncline.server.shard import PLAIN

__all__ = ["ControlRequests"]

MOST_POSTS = 4096
"""Posts that a board keeps; the oldest ones go."""
MOST_VALUES = 1024
"""Numbers in one post: JSON writes a number in 25 bytes at most, and an answer goes in one message."""
MOST_CLOCK = 1 << 48


@dataclass
class _Board:
    """The latest posts. Their numbers run on, so that a reader sees by a gap that it came too late for some."""

    latest: deque[Post] = field(default_factory=lambda: deque(maxlen=MOST_POSTS))
    number: int = 0

    def add(self, kind: str, values: tuple[float, ...]) -> int:
        self.number += 1
        self.latest.append(Post(self.number, kind, values))
        return self.number

    def after(self, number: int) -> islice[Post]:
        return islice(self.latest, max(0, number - (self.number - len(self.latest))), None)


class ControlRequests:
    """The boards of all spaces of a server, and the handlers that were looked up here.

    A board keeps the latest `MOST_POSTS` posts. Older ones are dropped, whether somebody has read them or not; numbers
    run on, and who asks for posts since a number gets those that are still there.
    """

    def __init__(self, workers: Collection[int] = ()) -> None:
        self._workers = frozenset(workers)
        """Of the network; where that is not told, those of a space."""
        self._posts: dict[int, _Board] = {}
        self.handlers: list[str] = []
        """A handler's number is its place here, counted from 1."""
        self._numbers: dict[str, int] = {}

    def forget(self, space_id: int) -> None:
        """A space is no more."""
        self._posts.pop(space_id, None)

    def control(self, session: ClientSession, body: Tensor) -> Tensor:
        """Do what is asked, or refuse it; the answer's body."""
        try:
            asked = json.loads(bytes(body.numpy()))
            deed = _DEEDS.get(str(asked["do"])) if isinstance(asked, dict) else None
            if deed is None:
                raise ProtocolError(f"a control that is not known: {str(asked)[:80]}; there are {', '.join(_DEEDS)}")
            told = json_body(deed(self, session, asked))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ProtocolError(f"a control that cannot be read: {type(error).__name__}: {error}") from None
        if told.numel() > protocol.INLINE:
            raise ProtocolError(f"an answer of {told.numel()} B to a control, and {protocol.INLINE} B are the most")
        return told

    def steps(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        clocks, below = session.space.clocks, session.space.below
        late = {str(worker): count for worker, count in session.space.late.items()}
        return {"steps": [clocks.of[worker] for worker in sorted(clocks.of)], "late": late, "below": below}

    def note_below(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        """A sub-master tells how far each of its children is, and how often it came late."""
        told = {int(worker): [int(steps), int(late)] for worker, (steps, late) in asked["below"].items()}
        known = self._workers or frozenset(session.space.description.workers)
        if not told.keys() <= known:
            raise ProtocolError(
                f"member {session.member} tells of the steps of {str(sorted(told))[:80]}: a sub-master tells of "
                f"workers, which are {str(sorted(known))[:80]}"
            )
        session.space.below |= {str(worker): each for worker, each in told.items()}
        return {}

    def stop(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        session.space.stopping = True
        return {}

    def finish(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        if session.worker:
            session.space.leave(session.member)
        return {}

    def post(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        values = asked["values"]
        if not isinstance(values, list) or len(values) > MOST_VALUES:
            raise ProtocolError(f"a post has a list of at most {MOST_VALUES} numbers, not {str(values)[:40]}")
        kind, numbers = str(asked["kind"])[:64], tuple(float(value) for value in values)
        return {"number": self._posts.setdefault(session.space.description.space_id, _Board()).add(kind, numbers)}

    def read(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        """As many as go in one message, the earliest first; who wants more asks again."""
        since, found, room = max(0, int(asked["since"])), [], protocol.INLINE - 2
        for post in self._posts.get(session.space.description.space_id, _Board()).after(since):
            each = [post.number, post.kind, list(post.values)]
            room -= len(json.dumps(each)) + 2
            if room < 0:
                break
            found.append(each)
        return found

    def find(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        """A handler's number, by its name."""
        name = str(asked["name"])[:256]
        if name not in self._numbers:
            if name not in PLAIN:
                find_handler(name)
            self.handlers.append(name)
            self._numbers[name] = len(self.handlers)
        return {"number": self._numbers[name]}

    def planes(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        names = asked.get("names")
        return {"names": session.space.name_planes(None if names is None else [str(name) for name in names][:64])}

    def rules(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        """The settings of the rules have changed."""
        specs, due = asked["rules"], len(session.space.description.rules)
        if not isinstance(specs, list) or len(specs) != due or not all(isinstance(spec, str) for spec in specs):
            raise ProtocolError(f"{due} groups of keys have a rule, and {str(specs)[:80]} are to replace them")
        session.space.use_rules(specs)
        return {}

    def clocks(self, session: ClientSession, asked: dict[str, Any]) -> Any:
        """Set the clocks, out of a checkpoint."""
        clocks, due = asked["clocks"], len(session.space.clocks.of)
        if not isinstance(clocks, list) or len(clocks) != due:
            raise ProtocolError(f"{due} workers have a clock here, and {str(clocks)[:80]} is to set them")
        if not all(isinstance(each, int) and 0 <= each < MOST_CLOCK for each in clocks):
            raise ProtocolError(f"a clock is a whole number, 0 or more, not one of {str(clocks)[:80]}")
        session.space.set_clocks(clocks)
        return {}


_DEEDS: dict[str, Callable[[ControlRequests, ClientSession, dict[str, Any]], Any]] = {
    "steps": ControlRequests.steps,
    "below": ControlRequests.note_below,
    "stop": ControlRequests.stop,
    "finish": ControlRequests.finish,
    "post": ControlRequests.post,
    "posts": ControlRequests.read,
    "handler": ControlRequests.find,
    "planes": ControlRequests.planes,
    "clocks": ControlRequests.clocks,
    "rules": ControlRequests.rules,
}
