"""The reductions of one backward pass, in index order, where some of them are compressed.

With a processor to spare, encoding is the comm task's, beside backward; without one it is done where a bucket fills,
for a second thread would only take turns with backward::

    hooks        ─ fill 0 ─────── fill 1 ─────── fill 2 ─ end ─ wait
    comm task         encode 0 │ off     encode 1 │ off, land 0, decode 0     encode 2 │ …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from syncline.world import Pending

if TYPE_CHECKING:
    from syncline.reduction.communicator import Communicator, Reduction

__all__ = ["Line", "Member", "Plain"]


class Member(Protocol):
    """A reduction that goes on step by step."""

    done: bool

    def begin(self, here: bool = False) -> None: ...

    def advance(self, here: bool = False) -> None: ...


class Plain:
    """A bucket that goes as it is."""

    def __init__(
        self, exchange: Communicator, flat: Tensor, what: str, before: Callable[[], None] | None = None
    ) -> None:
        self.done = False
        self._before = before
        self._exchange = exchange
        self._flat = flat
        self._what = what
        self._reduction: Reduction | None = None

    def begin(self, here: bool = False) -> None:
        if self._before is not None:
            self._before()
        self._reduction = self._exchange.start(self._flat, self._what, here)

    def advance(self, here: bool = False) -> None:
        assert self._reduction is not None, "it has begun"
        self._reduction.wait()
        self.done = True


class Line:
    """What is under way, the same on every rank: what takes off, takes off in the same order everywhere."""

    def __init__(self, exchange: Communicator) -> None:
        self._exchange = exchange
        self._members: list[Member] = []
        self._pending: list[Pending[None]] = []

    def add(self, member: Member) -> None:
        """Begin one more."""
        before = self._members[-1] if self._members else None
        self._members.append(member)
        if not self._exchange.overlap_encoding:
            member.begin()
            return

        def work() -> None:
            member.begin(here=True)
            if before is not None:
                _finish(before)

        self._call(work)

    def close(self) -> None:
        """No more will come in this pass."""
        if self._exchange.overlap_encoding and self._members:
            last = self._members[-1]
            self._call(lambda: _finish(last))

    def wait(self) -> None:
        """Return when all are done. They take turns, so that one decodes while another's bytes are on their way."""
        for pending in self._pending:
            pending.wait()
        while not all(member.done for member in self._members):
            for member in self._members:
                member.advance()

    def _call(self, work: Any) -> None:
        self._pending.append(self._exchange.team.call("the encoding of gradients", work, async_=True))


def _finish(member: Member) -> None:
    while not member.done:
        member.advance(here=True)
