"""Requests that are not about values: posts, clocks, numbers of handlers, and optimizer state.

Requests and replies are small JSON objects. Every field is checked.
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
from syncline.server.shard import BUILTIN_HANDLERS

__all__ = ["ControlRequests"]

MAX_POSTS = 4096
"""Posts kept for each space; the oldest are dropped."""
MAX_POST_VALUES = 1024
"""JSON writes a number in at most 25 bytes, and a reply is one message."""
MAX_CLOCK = 1 << 48
MAX_STATE_NAMES = 64


@dataclass
class _PostLog:
    """The latest posts of a space. A gap in the numbers tells a reader that it has missed some."""

    latest: deque[Post] = field(default_factory=lambda: deque(maxlen=MAX_POSTS))
    number: int = 0

    def add(self, kind: str, values: tuple[float, ...]) -> int:
        self.number += 1
        self.latest.append(Post(self.number, kind, values))
        return self.number

    def after(self, number: int) -> islice[Post]:
        return islice(self.latest, max(0, number - (self.number - len(self.latest))), None)


class ControlRequests:
    """Handles the control requests of all spaces of a server."""

    def __init__(self, workers: Collection[int] = ()) -> None:
        self._workers = frozenset(workers)
        """The workers of the network; if empty, those of the space."""
        self._posts: dict[int, _PostLog] = {}
        self.handlers: list[str] = []
        """The number of a handler is its place here, counted from 1."""
        self._numbers: dict[str, int] = {}

    def forget(self, space_id: int) -> None:
        """Drop the posts of a space."""
        self._posts.pop(space_id, None)

    def handle(self, session: ClientSession, body: Tensor) -> Tensor:
        """Handle a request, or refuse it by a `ProtocolError`; return the body of the reply."""
        try:
            request = json.loads(bytes(body.numpy()))
            action = _ACTIONS.get(str(request["do"])) if isinstance(request, dict) else None
            if action is None:
                raise ProtocolError(f"an unknown control request: {str(request)[:80]}; known are {', '.join(_ACTIONS)}")
            reply = json_body(action(self, session, request))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ProtocolError(f"a control request that cannot be read: {type(error).__name__}: {error}") from None
        if reply.numel() > protocol.MAX_INLINE_BYTES:
            raise ProtocolError(
                f"a reply of {reply.numel()} B to a control request; at most {protocol.MAX_INLINE_BYTES} B are allowed"
            )
        return reply

    def steps(self, session: ClientSession, request: dict[str, Any]) -> Any:
        shard = session.shard
        return {
            "steps": [shard.clocks.of[worker] for worker in sorted(shard.clocks.of)],
            "late": {str(worker): count for worker, count in shard.late_steps.items()},
            "below": shard.group_steps,
        }

    def report_group(self, session: ClientSession, request: dict[str, Any]) -> Any:
        """Store the steps, and the late steps, of each worker of a sub-master."""
        steps = {int(worker): [int(steps), int(late)] for worker, (steps, late) in request["below"].items()}
        known = self._workers or frozenset(session.shard.description.workers)
        if not steps.keys() <= known:
            raise ProtocolError(
                f"member {session.member} reports steps of {str(sorted(steps))[:80]}: a sub-master reports steps of "
                f"workers, which are {str(sorted(known))[:80]}"
            )
        session.shard.group_steps |= {str(worker): each for worker, each in steps.items()}
        return {}

    def stop(self, session: ClientSession, request: dict[str, Any]) -> Any:
        session.shard.stopping = True
        return {}

    def finish(self, session: ClientSession, request: dict[str, Any]) -> Any:
        if session.worker:
            session.shard.leave(session.member)
        return {}

    def post(self, session: ClientSession, request: dict[str, Any]) -> Any:
        values = request["values"]
        if not isinstance(values, list) or len(values) > MAX_POST_VALUES:
            raise ProtocolError(f"a post has a list of at most {MAX_POST_VALUES} numbers, not {str(values)[:40]}")
        kind, numbers = str(request["kind"])[:64], tuple(float(value) for value in values)
        log = self._posts.setdefault(session.shard.description.space_id, _PostLog())
        return {"number": log.add(kind, numbers)}

    def read_posts(self, session: ClientSession, request: dict[str, Any]) -> Any:
        """As many posts as one message holds, the earliest first."""
        since, posts, room = max(0, int(request["since"])), [], protocol.MAX_INLINE_BYTES - 2
        for post in self._posts.get(session.shard.description.space_id, _PostLog()).after(since):
            fields = [post.number, post.kind, list(post.values)]
            room -= len(json.dumps(fields)) + 2
            if room < 0:
                break
            posts.append(fields)
        return posts

    def number_handler(self, session: ClientSession, request: dict[str, Any]) -> Any:
        name = str(request["name"])[:256]
        if name not in self._numbers:
            if name not in BUILTIN_HANDLERS:
                find_handler(name)
            self.handlers.append(name)
            self._numbers[name] = len(self.handlers)
        return {"number": self._numbers[name]}

    def optimizer_state(self, session: ClientSession, request: dict[str, Any]) -> Any:
        """The names of the rules' state. With `names` in the request these are numbered, which a plain question never
        changes: several workers may read state at the same time.
        """
        if request.get("names") is None:
            return {"names": session.shard.state_names()}
        names = [str(name) for name in request["names"]][:MAX_STATE_NAMES]
        session.shard.number_state(names)
        return {"names": names}

    def change_rules(self, session: ClientSession, request: dict[str, Any]) -> Any:
        specs, groups = request["rules"], len(session.shard.description.rules)
        if not isinstance(specs, list) or len(specs) != groups or not all(isinstance(spec, str) for spec in specs):
            raise ProtocolError(f"{groups} groups of keys have a rule, and {str(specs)[:80]} are to replace them")
        session.shard.change_rules(specs)
        return {}

    def set_clocks(self, session: ClientSession, request: dict[str, Any]) -> Any:
        clocks, workers = request["clocks"], len(session.shard.clocks.of)
        if not isinstance(clocks, list) or len(clocks) != workers:
            raise ProtocolError(f"{workers} workers have a clock here, and {str(clocks)[:80]} is to set them")
        if not all(isinstance(each, int) and 0 <= each < MAX_CLOCK for each in clocks):
            raise ProtocolError(f"a clock is an integer, 0 or more, not one of {str(clocks)[:80]}")
        session.shard.set_clocks(clocks)
        return {}


_ACTIONS: dict[str, Callable[[ControlRequests, ClientSession, dict[str, Any]], Any]] = {
    "steps": ControlRequests.steps,
    "below": ControlRequests.report_group,
    "stop": ControlRequests.stop,
    "finish": ControlRequests.finish,
    "post": ControlRequests.post,
    "posts": ControlRequests.read_posts,
    "handler": ControlRequests.number_handler,
    "planes": ControlRequests.optimizer_state,
    "clocks": ControlRequests.set_clocks,
    "rules": ControlRequests.change_rules,
}
"""By the request's field `do`, whose values belong to the wire format."""
