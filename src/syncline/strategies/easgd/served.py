"""One worker's part of asynchronous elastic averaging: the centre lies at the servers, and nobody waits for anybody.

::

    optimizer.step()                                     servers
      └─ before   the period is over: read x̃      ◄───   x̃
                  d = α (x − x̃)                    ───►   x̃ += d        whatever others have added meanwhile
         step     x ← x − η · g(x)
         after    x ← x − d

What a worker takes off its weights is what it has sent, so that Σ x_i + x̃ stays under any interleaving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.reduction import Communicator
from syncline.server import Client, Future
from syncline.strategies.base import RunSettings, Strategy
from syncline.strategies.easgd.ahead import Ahead
from syncline.strategies.served import Plan, ServedRun

__all__ = ["ServedElasticRun"]


class ServedElasticRun(ServedRun):
    """The centre is the servers'; this worker's x is its own."""

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
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings, Plan(rule="add", stride=period))
        self.period = period
        self.alpha = alpha
        self._since = 0
        """Steps since the last exchange."""
        named = {field.name: each for field, each in zip(self.keys.parameters, self.parameters, strict=True)}
        self.ahead = Ahead(named, momentum) if momentum and exchange.size > 1 else None
        self._row = torch.zeros(self.keys.trained, dtype=torch.float32)
        """What is on its way to the servers: not to be touched until it has arrived."""
        self._row_views = self.keys.views(self._row)
        self._back: list[Tensor] | None = None
        """What the step that goes on is to take off."""
        self._pushed: list[Future] = []

    # What the base asks.

    def wanted(self, clock: int) -> int:
        return -1

    def scale(self) -> float:
        """What is added is what was taken off."""
        return 1.0

    @property
    def near(self) -> Client:
        """Where the centre lies that this worker is tied to."""
        return self.client

    def give(self) -> list[Future]:
        """Send the row to that centre, and end the worker's step."""
        return self.pusher.push(self._row, self.rates(), scale=self.scale())

    @property
    def own(self) -> list[Tensor]:
        """This worker's x; its parameters may look ahead of it."""
        return [each.detach() for each in self.parameters] if self.ahead is None else self.ahead.own

    def before_step(self) -> None:
        if self._since + 1 >= self.period and self.exchange.size > 1:
            self._back = self._trade()

    def after_step(self) -> None:
        self._since += 1
        with torch.no_grad():
            weights, back, self._back = [each.detach() for each in self.parameters], self._back, None
            if self.ahead is not None:
                self.ahead.look(weights, back)
            else:
                Ahead.move(weights, back)
        if self._since >= self.period:
            self._since = 0
            if self.exchange.size == 1:
                self._show()

    def ending(self) -> None:
        with self.waiting("the last push"):
            if self.exchange.size == 1:
                self._show(tick=False)
            elif self._since and self.client.clock == 0:  # else none of this worker's steps would be in the centre
                self._trade()
            self._settle()
        super().ending()
        self._board.tell_steps(self.exchange.rank, self.stats.steps)

    @property
    def first_exchange(self) -> int | None:
        return self.period

    def settle_pushes(self) -> None:
        self._settle()

    # State.

    def shared_state(self) -> dict[str, Any]:
        """A push that is under way is off this worker's weights already: the servers are read when all have arrived."""
        self._settle()
        self.wait_for_all("save the weights")
        return super().shared_state()

    def restart(self) -> None:
        super().restart()
        self._since, self._back = 0, None
        if self.ahead is not None:
            self.ahead.rest([each.detach() for each in self.parameters])

    def local_state(self) -> dict[str, Any]:
        ahead = {} if self.ahead is None else {"x": self.ahead.state()}
        weights = {
            field.name: each.detach().clone() for field, each in zip(self.keys.parameters, self.parameters, strict=True)
        }
        return {**super().local_state(), "weights": weights, "since": self._since, **ahead}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """A worker that the checkpoint does not know begins at the centre."""
        super().load_shared_state(state)
        if self.ahead is not None:
            self.ahead.rest([each.detach() for each in self.parameters])

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        if not states:
            return
        own = states[0]
        for field, each in zip(self.keys.parameters, self.parameters, strict=True):
            each.detach().copy_(own["weights"][field.name])
        self._since = int(own.get("since", 0))
        if self.ahead is not None:
            self.ahead.load(own["x"]) if "x" in own else self.ahead.rest([each.detach() for each in self.parameters])

    # Within.

    def _trade(self) -> list[Tensor]:
        """Read the centre, and give it a part of the way to this worker; what it was given."""
        self._settle()
        with self.waiting("the centre"):
            # As it is, with a codec too: half of a centre would pull as if the rest of it were elsewhere.
            self.near.pull((0, self.keys.trained), self.weights, wanted=0).wait()
        torch._foreach_copy_(self._row_views, self.own)
        self._row.sub_(self.weights)
        self.stats.consensus = float(self._row.norm())
        self._row.mul_(self.alpha)
        with self.explained():
            self._pushed = self.give()
        self.count()
        return self._row_views

    def _settle(self) -> None:
        """See the latest push in place."""
        with self.explained():
            for future in self._pushed:
                future.wait()
        if self._pushed:
            self.stats.read_at(max(0, *(future.staleness for future in self._pushed)) * self.period)
        self._pushed = []

    def _show(self, tick: bool = True) -> None:
        """With nobody to agree with the centre is this worker: the servers have its weights, to be looked at."""
        self._settle()
        torch._foreach_copy_(self._row_views, self.own)
        with self.explained():
            self._pushed = [
                self.client.push((0, self.keys.trained), self._row, handler="assign", tick=tick),
            ]
        self.count()
