"""One worker's part of synchronous elastic averaging: steps on weights of its own, rounds with the centre.

::

    optimizer.step()
      └─ before   the period is over: tell how far x is from the centre      the x at which the gradient was taken
         step     x ← x − η · g(x)                                           the user's optimizer
         after    x ← x − α (x before − x̃),  x̃ ← x̃ + α Σ (x before − x̃)     both moves from the same x
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.reduction import Communicator
from syncline.strategies.base import RunSettings, Strategy, mean_of_all
from syncline.strategies.easgd.ahead import Ahead
from syncline.strategies.easgd.centres import Centre
from syncline.strategies.easgd.tree import CentreTree
from syncline.strategies.local_weights import AveragingRun

__all__ = ["ElasticRun"]

LOOKS = 8
"""Every so many rounds the workers tell how far apart they are: it takes a small message of its own."""


class ElasticRun(AveragingRun):
    """Every worker holds a copy of the centre."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Communicator,
        settings: RunSettings,
        *,
        period: int,
        alpha: float,
        momentum: float,
        groups: Sequence[Sequence[int]],
        root_every: int,
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self.period = period
        self._since = 0
        """Steps since the last round."""
        self.ahead = Ahead(self._names, momentum) if momentum and exchange.size > 1 else None
        self.centre: Centre
        if len(groups) > 1:
            tree = CentreTree(self._names, model, exchange, settings, groups=groups, alpha=alpha, root_every=root_every)
            self.centre, self.deltas = tree, tree.deltas
        else:
            self.centre = Centre(self._names, exchange, self.deltas, alpha)
        self._first_round = root_every if len(groups) > 1 else 1
        """The number of the round that moves the centre of all for the first time."""
        self.deltas.prepare()

    @property
    def first_exchange(self) -> int | None:
        return self.period

    @property
    def copies_weights(self) -> bool:
        return True

    # Steps.

    @property
    def own(self) -> list[Tensor]:
        """This worker's x; its parameters may look ahead of it."""
        return self.weights if self.ahead is None else self.ahead.own

    def before_step(self) -> None:
        if self._since + 1 >= self.period:
            self._begin()

    def after_step(self) -> None:
        self._since += 1
        back = self._finish()[0] if self.centre.under_way else None
        if self.ahead is not None:
            self.ahead.look(self.weights, back)
        elif back is not None:
            Ahead.move(self.weights, back)

    def sync(self, active: bool = True) -> int:
        self._begin(active)
        back, alive = self._finish()
        if self.ahead is not None:
            self.ahead.shift(self.weights, back)
        else:
            Ahead.move(self.weights, back)
        return alive

    def model_of_all(self) -> list[Tensor]:
        """The centre: no message is needed, for all have it. Before it has moved, the mean: training is not lost."""
        if self.rounds < self._first_round and self.stats.steps:
            return mean_of_all(self.exchange, self.own)
        return [value.clone() for value in self.centre.root]

    # State.

    def restart(self) -> None:
        """The centre is what every worker has."""
        super().restart()
        self._since = 0
        self.centre.start(self.weights)
        if self.ahead is not None:
            self.ahead.rest(self.weights)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), **self.centre.shared_state()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """A worker that the checkpoint does not know begins at the centre.

        Where that has not moved yet, or there was but one worker, it is at the model that was loaded before.
        """
        super().load_shared_state(state)
        self.centre.load_shared_state(state)
        if int(state.get("workers", 0)) == 1 or (self.rounds < self._first_round and not self.same_size):
            self.centre.start(self.weights)
        self.set_weights(self.centre.root)
        if self.ahead is not None:
            self.ahead.rest(self.weights)

    def own_state(self) -> dict[str, Any]:
        ahead = {} if self.ahead is None else {"x": self.ahead.state()}
        return {"since": self._since, **self.centre.own_state(), **ahead}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._since = int(state["since"])
        self.centre.load_own_state(state)
        if self.ahead is not None:
            self.ahead.load(state["x"]) if "x" in state else self.ahead.rest(self.weights)

    def detach(self) -> None:
        super().detach()
        self.centre.close()

    # Within.

    def _begin(self, active: bool = True) -> None:
        if self.rounds % LOOKS == 0:
            self.stats.consensus = math.sqrt(self.exchange.mean(self.centre.apart(self.own)))
        self.centre.begin(self.own, active)

    def _finish(self) -> tuple[list[Tensor], int]:
        """End a round; what this worker is to move back by, and how many have data."""
        self.rounds += 1
        self._since = 0
        self.stats.staleness = 0
        return self.centre.finish(self.rounds)
