"""What a solver gives back: the agreed state, its value, and what each worker did for it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch

from syncline.strategies.onesided.objectives import Data, Objective
from syncline.strategies.onesided.step import Array
from syncline.world import allgather

__all__ = ["Effort", "Solution", "conclude"]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What one worker did."""

    steps: int = 0
    """Mini-batches; of an aggregation, rounds over all samples."""
    samples: int = 0
    accepted: int = 0
    """Remote states that lay the way the gradient pointed."""
    rejected: int = 0
    torn: int = 0
    """Messages that were found half written."""
    sent: int = 0
    dropped: int = 0
    """Messages that found the outgoing line full, or a worker gone."""
    sent_bytes: int = 0
    batch: int = 0
    """Samples in the last mini-batch."""
    seconds: float = 0.0
    """From the first step to the last, without the meeting at the end."""


@dataclass(frozen=True)
class Solution:
    """The agreed state, the same on every worker.

    >>> Solution(torch.zeros(2).numpy(), 0.5, (Effort(steps=3), Effort(steps=4))).steps
    7
    """

    state: Array
    value: float
    """The objective over the samples of all workers."""
    efforts: tuple[Effort, ...]
    """What each worker did, by rank."""

    @property
    def steps(self) -> int:
        """Of all workers."""
        return sum(each.steps for each in self.efforts)

    @property
    def seconds(self) -> float:
        """Of the worker that took longest."""
        return max(each.seconds for each in self.efforts)

    @property
    def sent_bytes(self) -> int:
        """Of all workers."""
        return sum(each.sent_bytes for each in self.efforts)

    def total(self, name: str) -> int:
        """A count of `Effort`, of all workers."""
        return int(sum(getattr(each, name) for each in self.efforts))


def conclude(objective: Objective, state: Array, own: Data, mine: Effort) -> Solution:
    """The solution that all have agreed on: its value over all samples, and every worker's effort. A collective."""
    kinds = {field.name: field.type for field in fields(Effort)}
    value, samples = objective.value(state, own), len(own[0])
    row = [value, samples, *(float(each) for each in astuple(mine))]  # whole numbers stay exact up to 2^53
    table = allgather(torch.tensor([row], dtype=torch.float64)).tolist()
    mean = sum(each[0] * each[1] for each in table) / sum(each[1] for each in table)
    efforts = []
    for each in table:
        told = dict(zip(kinds, each[2:], strict=True))
        efforts.append(Effort(**{name: int(told[name]) if kinds[name] == "int" else told[name] for name in kinds}))
    return Solution(state, float(mean), tuple(efforts))
