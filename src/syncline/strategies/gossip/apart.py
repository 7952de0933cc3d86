"""How far workers are from their mean, told by a message of a few kilobytes.

Each weight is added, with a random sign, to one of `ROOM` sums; the signs and places are the same everywhere. The
square of the distance between two such rows is that of the weights on average, and its deviation √(2 / ROOM) of it:
2 %. Models with no more weights than that are compared exactly.

Charikar, Chen, Farach-Colton: Finding frequent items in data streams (2002).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.reduction import Communicator
from syncline.world import allreduce

__all__ = ["ROOM", "Apart"]

ROOM = 4096


class Apart:
    """For weights like these."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        numel = sum(weight.numel() for weight in weights)
        draw = torch.Generator().manual_seed(0)
        self._places: Tensor | None = None
        if numel > ROOM:  # the upper half of the places are those of the other sign
            self._places = torch.randint(0, 2 * ROOM, (numel,), generator=draw, dtype=torch.int32)

    def sums(self, weights: Sequence[Tensor]) -> Tensor:
        """The row that stands for the weights."""
        row = torch.cat([weight.detach().reshape(-1).to("cpu", torch.float64) for weight in weights])
        if self._places is None:
            return row
        found = torch.zeros(2 * ROOM, dtype=torch.float64).index_add_(0, self._places, row)
        return found[:ROOM] - found[ROOM:]

    def measure(self, exchange: Communicator, weights: Sequence[Tensor]) -> float:
        """√(Σ‖x_i − x̄‖² / p); every worker calls it."""
        own = self.sums(weights)
        exchange.stats.sent(own.nbytes, own.nbytes)
        mean: Tensor = allreduce(own.clone(), op="mean", group=exchange.team)
        return math.sqrt(exchange.mean(float((own - mean).square().sum())))
