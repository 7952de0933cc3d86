"""A round of mixing with the neighbours: what each has, and what W makes of it.

    begin    x_i ──► who mixes it in            (receives are posted, nobody waits)
    finish   Σ_j W_ij (x_j − x_i)               to be added to x_i, now or after a step

As differences: where all are equal nothing changes, to the bit, and what one gains another loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from syncline.reduction import Communicator
from syncline.strategies.gossip.graphs import Graph
from syncline.strategies.gossip.rows import Rows
from syncline.transports import Handle, Transport

__all__ = ["Mixing", "Neighbours", "PlainMixing"]


class Mixing(Protocol):
    """How a round goes. One is under way at a time."""

    def begin(self, weights: Sequence[Tensor], number: int) -> None:
        """Tell the neighbours about this worker's weights, in the round of that number."""
        ...

    def finish(self) -> list[Tensor]:
        """What is to be added to them: a tensor for each, to be used before the next `begin`."""
        ...


class Neighbours:
    """A channel of the run's own, and who is at its other ends. Made by all workers together."""

    def __init__(self, exchange: Communicator, graph: Graph) -> None:
        channel = exchange.team.transport.split(range(exchange.size))
        assert channel is not None, "every rank is a member"
        self.channel: Transport = channel
        self.sources = graph.listens_to(exchange.rank)
        """Whose weights come here, and how much of them is taken."""
        self.targets = graph.tells(exchange.rank)
        self._stats = exchange.stats
        self._now = exchange.world.runtime.now
        self._begun = 0.0
        self._sending: list[Handle] = []

    def begin(self) -> None:
        """A round begins."""
        self._stats.next_round()
        self._begun = self._now()

    def send(self, data: Tensor, tag: int, logical: int, exact: bool) -> None:
        """To all that mix it in; it stays untouched until the round has ended."""
        self._sending += [self.channel.send(data, to, tag, exact=exact) for to in self.targets]
        self._stats.sent(logical * len(self.targets), data.nbytes * len(self.targets))

    def wait(self, receiving: Sequence[Handle]) -> None:
        """Until all has come, and gone."""
        since = self._now()
        for handle in (*receiving, *self._sending):
            handle.wait()
        self._sending = []
        ended = self._now()
        self._stats.reduced(self._begun, ended, "weights of neighbours")
        self._stats.waited(since, ended)

    def close(self) -> None:
        """Let go of the channel."""
        self.channel.close()


class PlainMixing:
    """Weights travel as they are: Σ_j W_ij (x_j − x_i)."""

    def __init__(self, neighbours: Neighbours, weights: Sequence[Tensor]) -> None:
        self._neighbours = neighbours
        self._rows = Rows(weights)
        self._own = self._rows.empty()
        self._theirs = {source: self._rows.empty() for source in neighbours.sources}
        self._receiving: list[Handle] = []

    def begin(self, weights: Sequence[Tensor], number: int) -> None:
        neighbours = self._neighbours
        neighbours.begin()
        self._rows.read(weights, self._own)
        self._receiving = [
            neighbours.channel.recv(row, source, tag, exact=True)
            for source, rows in self._theirs.items()
            for tag, row in enumerate(rows)
        ]
        for tag, row in enumerate(self._own):
            neighbours.send(row, tag, row.nbytes, exact=True)

    def finish(self) -> list[Tensor]:
        self._neighbours.wait(self._receiving)
        changes = [torch.zeros(row.numel(), dtype=_precise(row)) for row in self._own]
        for source, weight in self._neighbours.sources.items():
            for change, row, own in zip(changes, self._theirs[source], self._own, strict=True):
                self._neighbours.channel.timing.reduced(row.nbytes)
                change.add_(
                    row.to(change.dtype).sub_(own) if row.dtype != change.dtype else row.sub_(own), alpha=weight
                )
        return self._rows.views(changes)


def _precise(row: Tensor) -> torch.dtype:
    return torch.promote_types(row.dtype, torch.float32)
