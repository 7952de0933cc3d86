"""A sub-master's space: it adds up what its children push, and its weights are the parent's.

Synchronous: a step's sum goes up when enough children have pushed it. Asynchronous: what came while the last sum was
under way goes up next::

    children   0 ──g──┐     1 ──g──┐          3 ──g──┐
    sums              └─ [g0] ─►   └────── [g1 + g3] ┴─►        one is under way at a time
    parent               ◄─ w ─┘              ◄─ w ─┘           a child reads when its own gradient is in
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from syncline.server.clocks import FOREVER
from syncline.server.description import Description
from syncline.server.space import Push, Space, add_up

__all__ = ["Gathering", "Sum"]


@dataclass
class Sum:
    """What goes to the parent at once."""

    pushes: list[Push]
    weight: float = 1.0
    """The number of gradients that it adds up, if that scales its pushes."""


class Gathering(Space):
    """The space of one sub-master. It has no rule: the parent's applies."""

    def __init__(self, description: Description, server: int) -> None:
        super().__init__(description, server)
        self.sums: list[Sum] = []
        """Under way, or waiting to go: one at most."""
        self._open: dict[int, list[Push]] = {}
        """Pushes of steps that have not ended, by child. Only where children go at their own pace."""
        self._came: list[tuple[int, list[Push]]] = []
        self._away: set[int] = set()
        """Children whose gradients have not come back as weights."""

    def push(self, worker: int, clock: int, push: Push, answer: bool = False) -> bool:
        gathers = push.handler is None and push.plane == 0 and worker in self.clocks.of
        if self.description.held or not gathers:
            return super().push(worker, clock, push, answer)
        self._open.setdefault(worker, []).append(push)
        return False

    def tick(self, worker: int, clock: int, weight: float = 0.0) -> None:
        super().tick(worker, clock, weight)
        pushes = self._open.pop(worker, [])
        if pushes:
            self._came.append((worker, pushes))
            self._away.add(worker)
            self._gather()

    def leave(self, worker: int, lost: bool = False) -> bool:
        self._open.pop(worker, None)  # half a step is no step
        return super().leave(worker, lost)

    def settle(self, pushes: list[Push], weight: float) -> None:
        """A step of all: its sum waits to go up, with how many gradients it adds up."""
        if self.description.mean:
            for push in pushes:
                push.scale = weight
        self.sums.append(Sum(pushes, weight))

    def may_read(self, wanted: int, worker: int = -1) -> bool:
        if self.description.held:
            return super().may_read(wanted)
        return self.stopping or (worker not in self._away and worker not in self._open)

    @property
    def least(self) -> int:
        if not self.description.held:
            return self.clocks.least
        return FOREVER if self.clocks.live == 0 and not self.sums else self.round - bool(self.sums)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send up, and never will be."""
        return not self.sums and self.clocks.live == 0

    def answered(self, values: Sequence[tuple[int, Tensor]]) -> None:
        """The parent has answered with its weights."""
        for first, part in values:
            self.weights[first - self.first : first - self.first + part.numel()].copy_(part)
        self.sums.pop(0)
        self._away = {worker for worker, _ in self._came}
        self._gather()
        self.close_rounds()

    def _gather(self) -> None:
        if self.sums or not self._came:
            return
        came, self._came = sorted(self._came, key=lambda each: each[0]), []
        self.sums.append(Sum(add_up([pushes for _, pushes in came])))

    def _closes(self, clock: int) -> bool:
        return not self.sums and super()._closes(clock)
