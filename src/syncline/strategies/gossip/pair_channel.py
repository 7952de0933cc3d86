"""The board of workers that average in pairs: on server 0, beside no weights at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from syncline.server import Client, Future, open_space, server_network
from syncline.strategies.key_map import KeyMap
from syncline.strategies.parameter_server import ServedBoard
from syncline.world import World

__all__ = ["PairwiseChannel", "open_channel"]

AHEAD = 8
"""Steps that a worker may be ahead of what server 0 has confirmed."""


class PairwiseChannel(ServedBoard):
    """Step counts, the wish to stop and posts, in a space of one key; the weights come from the workers themselves."""

    def __init__(self, client: Client, fill: Callable[[nn.Module], None]) -> None:
        super().__init__(client, KeyMap((), ()), ending=self.settle)
        self._fill = fill
        self._nothing = torch.zeros(1, dtype=torch.float32)
        self._told: deque[Future] = deque()

    def tick(self) -> None:
        """This worker has taken a step. The answer, which tells of a wish to stop, is not waited for."""
        while self._told and (self._told[0].done() or len(self._told) >= AHEAD):
            self._told.popleft().wait()
        self._told.append(self.client.push((0, 1), self._nothing, tick=True))

    def settle(self) -> None:
        """See all steps counted."""
        while self._told:
            self._told.popleft().wait()

    def load_weights(self, model: nn.Module) -> None:
        self._fill(model)


def open_channel(world: World, name: str, fill: Callable[[nn.Module], None]) -> PairwiseChannel:
    """Open it together with the other workers."""
    network = server_network(world)
    client = open_space(world, name, 1, servers=network.servers[:1], retry=network.transport.retry_after_s)
    return PairwiseChannel(client, fill)
