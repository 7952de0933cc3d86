"""The actions of a pipeline that is never emptied, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import Action, PipelineSetting

__all__ = ["ActionStream"]

UNBOUNDED = 1 << 40
"""The number of micro-batches of a training whose end is unknown."""


class ActionStream:
    """Gives one worker the actions of each step, and at the end those that empty the pipeline.

    Micro-batches are numbered over all steps. A step ends where the next forward needs data of the next step.

    >>> from syncline.parallel.schedules import build_schedule
    >>> stream = ActionStream(PipelinePlacement(build_schedule("pipedream"), (1, 1)), worker=0)
    >>> print(*stream.next_step(3))
    0F0 0F1 0B0 0U0 0F2 0B1 0U1
    >>> print(*stream.next_step(1), "|", *stream.drain())
    0F3 0B2 0U2 | 0B3 0U3
    """

    def __init__(self, placement: PipelinePlacement, worker: int) -> None:
        self._placement = placement
        self._rank, self._replica = placement.position(worker)
        self._first = 0
        """The number of the first micro-batch since the pipeline was empty."""
        self.entered = 0
        """The number of micro-batches of all steps so far."""
        self._actions = self._planned(UNBOUNDED)
        self._next = next(self._actions)
        self._taken = 0

    def next_step(self, micro_batches: int) -> list[Action]:
        """The actions of a step of so many micro-batches, counted over all workers of the first stage."""
        self.entered += micro_batches
        found = []
        while not (self._next.kind == "F" and self._next.micro_batch >= self.entered - self._first):
            found.append(self._next)
            self._next = next(self._actions)
        self._taken += len(found)
        return self._renumber(found)

    def drain(self) -> list[Action]:
        """The remaining actions of all micro-batches that have entered. The pipeline is empty afterwards."""
        rest = islice(self._planned(self.entered - self._first), self._taken, None)
        found = self._renumber(list(rest))
        self._first = self.entered
        self._actions = self._planned(UNBOUNDED)
        self._next = next(self._actions)
        self._taken = 0
        return found

    def _planned(self, total: int) -> Iterator[Action]:
        setting = self._placement.setting(1)
        endless = PipelineSetting(setting.ranks, total, setting.replicas)
        return self._placement.schedule.actions(self._rank, endless, self._replica if setting.replicas else 0)

    def _renumber(self, actions: list[Action]) -> list[Action]:
        return [Action(kind, stage, number + self._first) for kind, stage, number in actions]
