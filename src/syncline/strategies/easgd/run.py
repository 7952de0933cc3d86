"""One worker's part of synchronous elastic averaging: steps on its own weights, rounds with the centre.

::

    optimizer.step()
      └─ before   end of a period: reduce the differences x − x̃               x at which the gradient was computed
         step     x ← x − η · g(x)                                            the user's optimizer
         after    x ← x − α (x before − x̃),  x̃ ← x̃ + α Σ (x before − x̃)      both moves from the same x
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.reduction import Communicator
from syncline.strategies.base import RunSettings, Strategy, mean_of_all
from syncline.strategies.easgd.centre import Centre, CentreTree
from syncline.strategies.local_weights import AveragingRun

__all__ = ["ElasticRun", "NesterovLookahead"]

CONSENSUS_EVERY_ROUNDS = 8
"""Interval in rounds at which the workers' distance from the centre is measured. It takes a small message."""


class NesterovLookahead:
    """Nesterov's momentum around an optimizer that has none: v ← δ v − η g(x + δ v),  x ← x + v.

    ::

        between steps the parameters hold      x + δ v                the point of the next gradient
        the optimizer's step makes of it       x + δ v − η g = x + v  the new x
        so                                     v = new x − old x
    """

    def __init__(self, weights: Mapping[str, Tensor], momentum: float) -> None:
        self._momentum = momentum
        self._names = list(weights)
        self.own = [weight.detach().clone() for weight in weights.values()]
        """x. The parameters are at x + δ v."""

    def after_step(self, weights: Sequence[Tensor], pull: Sequence[Tensor] | None = None) -> None:
        """Call after the optimizer's step: update x, subtract `pull`, and move the parameters to x + δ v again."""
        velocity = [weight - before for weight, before in zip(weights, self.own, strict=True)]
        self.reset(weights)
        subtract(self.own, pull)
        for weight, own, speed in zip(weights, self.own, velocity, strict=True):
            torch.add(own, speed, alpha=self._momentum, out=weight)

    def subtract(self, weights: Sequence[Tensor], pull: Sequence[Tensor]) -> None:
        """Subtract `pull` from x and from the parameters, outside a step."""
        subtract(self.own, pull)
        subtract(weights, pull)

    def reset(self, weights: Sequence[Tensor]) -> None:
        """Set the velocity to zero: x is what the parameters hold."""
        for own, weight in zip(self.own, weights, strict=True):
            own.copy_(weight)

    def state(self) -> dict[str, Tensor]:
        """x by the parameters' names."""
        return {name: own.clone() for name, own in zip(self._names, self.own, strict=True)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state`."""
        for name, own in zip(self._names, self.own, strict=True):
            own.copy_(state[name])


def subtract(tensors: Sequence[Tensor], pull: Sequence[Tensor] | None) -> None:
    """Subtract in place; None: nothing."""
    for tensor, each in zip(tensors, pull or [], strict=pull is not None):
        tensor.sub_(each)


class ElasticRun(AveragingRun):
    """Every worker holds a copy of the centre."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        communicator: Communicator,
        settings: RunSettings,
        *,
        period: int,
        alpha: float,
        momentum: float,
        groups: Sequence[Sequence[int]],
        root_every: int,
    ) -> None:
        super().__init__(strategy, model, optimizer, communicator, settings)
        self.period = period
        self._since = 0
        """Steps since the last round."""
        self.lookahead = NesterovLookahead(self._names, momentum) if momentum and communicator.size > 1 else None
        self.centre: Centre
        if len(groups) > 1:
            tree = CentreTree(
                self._names, model, communicator, settings, groups=groups, alpha=alpha, root_every=root_every
            )
            self.centre, self.deltas = tree, tree.deltas
        else:
            self.centre = Centre(self._names, communicator, self.deltas, alpha)
        self._first_round = root_every if len(groups) > 1 else 1
        """The number of the round that moves the centre of all workers for the first time."""
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
        """This worker's x. With momentum its parameters are at x + δ v."""
        return self.weights if self.lookahead is None else self.lookahead.own

    def before_step(self) -> None:
        if self._since + 1 >= self.period:
            self._begin_round()

    def after_step(self) -> None:
        self._since += 1
        pull = self._finish_round()[0] if self.centre.in_progress else None
        if self.lookahead is not None:
            self.lookahead.after_step(self.weights, pull)
        elif pull is not None:
            subtract(self.weights, pull)

    def sync(self, active: bool = True) -> int:
        self._begin_round(active)
        pull, alive = self._finish_round()
        if self.lookahead is not None:
            self.lookahead.subtract(self.weights, pull)
        else:
            subtract(self.weights, pull)
        return alive

    def model_of_all(self) -> list[Tensor]:
        """The centre, which all workers have. Before its first move it is the mean, so that training is not lost."""
        if self.rounds < self._first_round and self.stats.steps:
            return mean_of_all(self.communicator, self.own)
        return [value.clone() for value in self.centre.root]

    def _begin_round(self, active: bool = True) -> None:
        if self.rounds % CONSENSUS_EVERY_ROUNDS == 0:
            self.stats.consensus = math.sqrt(self.communicator.mean(self.centre.squared_distance(self.own)))
        self.centre.begin(self.own, active)

    def _finish_round(self) -> tuple[list[Tensor], int]:
        """What this worker subtracts from its weights, and how many workers have data."""
        self.rounds += 1
        self._since = 0
        self.stats.staleness = 0
        return self.centre.finish(self.rounds)

    # State.

    def restart(self) -> None:
        """The centre is what every worker has."""
        super().restart()
        self._since = 0
        self.centre.reset(self.weights)
        if self.lookahead is not None:
            self.lookahead.reset(self.weights)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), **self.centre.shared_state()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """A worker that the checkpoint does not know begins at the centre.

        If the centre has not moved yet, or there was one worker only, it is the model that was loaded before.
        """
        super().load_shared_state(state)
        self.centre.load_shared_state(state)
        if int(state.get("workers", 0)) == 1 or (self.rounds < self._first_round and not self.same_size):
            self.centre.reset(self.weights)
        self.set_weights(self.centre.root)
        if self.lookahead is not None:
            self.lookahead.reset(self.weights)

    def own_state(self) -> dict[str, Any]:
        momentum = {} if self.lookahead is None else {"x": self.lookahead.state()}
        return {"since": self._since, **self.centre.own_state(), **momentum}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._since = int(state["since"])
        self.centre.load_own_state(state)
        if self.lookahead is not None:
            self.lookahead.load(state["x"]) if "x" in state else self.lookahead.reset(self.weights)

    def detach(self) -> None:
        super().detach()
        self.centre.close()
