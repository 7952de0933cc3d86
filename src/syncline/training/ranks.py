"""What every rank did in the latest steps: told to all at the moments when they meet anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from syncline.reduction import Stats
from syncline.training.phases import phases
from syncline.world import World, allgather

__all__ = ["RankTable"]

COLUMNS = ("compute", "exposed", "codec", "data")


class RankTable:
    """Seconds a step of each rank since the last meeting, by phase: a slow rank computes long, the others wait."""

    def __init__(self, world: World, stats: Stats) -> None:
        self._world = world
        self._stats = stats
        self._step = 0
        self._before = [0.0] * (1 + len(COLUMNS))
        self.latest: dict[str, Any] = {}

    def tell(self, step: int, wishes: Sequence[float]) -> list[float]:
        """Meet the others: the largest of each wish. Every rank calls it at the same step."""
        found = phases(self._world.events.totals, self._stats)
        now = [self._world.runtime.now(), *(found[name] for name in COLUMNS)]
        steps = step - self._step
        spent = [max(0.0, late - early) / max(1, steps) for late, early in zip(now, self._before, strict=True)]
        own = torch.tensor([*wishes, *spent], dtype=torch.float64)
        table = allgather(own, group=self._world.everyone).view(self._world.size, len(own))
        seconds = table[:, len(wishes) :].T.tolist()
        # Of the first meeting nobody knows when it began.
        self.latest = (
            {"step": step, "steps": steps, "seconds": seconds[0], **dict(zip(COLUMNS, seconds[1:], strict=True))}
            if self._step and steps
            else {}
        )
        self._step, self._before = step, now
        return [float(wish) for wish in table[:, : len(wishes)].max(dim=0).values]
