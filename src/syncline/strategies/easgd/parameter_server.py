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
from syncline.server import Client, Future, open_space, server_network
from syncline.strategies.base import RunSettings, Strategy
from syncline.strategies.easgd.centre import DEFAULT_TOTAL_PULL
from syncline.strategies.easgd.run import NesterovLookahead, subtract
from syncline.strategies.parameter_server import ParameterServerRun, ServerOptions

__all__ = ["ServerElasticRun", "ServerElasticTreeRun"]


class ServerElasticRun(ParameterServerRun):
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
        super().__init__(strategy, model, optimizer, exchange, settings, ServerOptions(rule="add", stride=period))
        self.period = period
        self.alpha = alpha
        self._since = 0
        """Steps since the last exchange."""
        named = {field.name: each for field, each in zip(self.keys.parameters, self.parameters, strict=True)}
        self.lookahead = NesterovLookahead(named, momentum) if momentum and exchange.size > 1 else None
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
        return [each.detach() for each in self.parameters] if self.lookahead is None else self.lookahead.own

    def before_step(self) -> None:
        if self._since + 1 >= self.period and self.exchange.size > 1:
            self._back = self._trade()

    def after_step(self) -> None:
        self._since += 1
        with torch.no_grad():
            weights, back, self._back = [each.detach() for each in self.parameters], self._back, None
            if self.lookahead is not None:
                self.lookahead.after_step(weights, back)
            else:
                subtract(weights, back)
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
        if self.lookahead is not None:
            self.lookahead.reset([each.detach() for each in self.parameters])

    def local_state(self) -> dict[str, Any]:
        ahead = {} if self.lookahead is None else {"x": self.lookahead.state()}
        weights = {
            field.name: each.detach().clone() for field, each in zip(self.keys.parameters, self.parameters, strict=True)
        }
        return {**super().local_state(), "weights": weights, "since": self._since, **ahead}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """A worker that the checkpoint does not know begins at the centre."""
        super().load_shared_state(state)
        if self.lookahead is not None:
            self.lookahead.reset([each.detach() for each in self.parameters])

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        if not states:
            return
        own = states[0]
        for field, each in zip(self.keys.parameters, self.parameters, strict=True):
            each.detach().copy_(own["weights"][field.name])
        self._since = int(own.get("since", 0))
        if self.lookahead is not None:
            self.lookahead.load(own["x"]) if "x" in own else self.lookahead.reset(
                [each.detach() for each in self.parameters]
            )

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


class ServerElasticTreeRun(ServerElasticRun):
    """Tied to the centre of its group, and in its turn the one that ties that centre to the root."""

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
        super().__init__(strategy, model, optimizer, exchange, settings, period=period, alpha=alpha, momentum=momentum)
        self.groups = [list(group) for group in groups]
        number = next(number for number, group in enumerate(self.groups) if exchange.rank in group)
        self._group = self.groups[number]
        self._beta = DEFAULT_TOTAL_PULL / len(self.groups)
        self._root_every = root_every
        self._trades = 0
        self._up = torch.zeros(self.keys.trained, dtype=torch.float32)
        """What is on its way from the group's centre to the root."""
        self._known_groups = True
        self._counted_near = (0, 0)
        network, codec = server_network(self.world), exchange.codec
        members = [network.workers[rank] for rank in self._group]
        self._near = open_space(
            self.world,
            f"{strategy.name} group {number}",
            self.keys.trained,
            codec=None if codec is None else repr(codec),
            # A worker leaves when its own group has: it can hold no shard of another.
            servers=network.servers if network.dedicated else members,
            workers=members,
            initial=self.keys.read(model)[: self.keys.trained],
            seed=settings.seed,
            retry=network.transport.retry_after_s,
        )

    # The exchange.

    @property
    def near(self) -> Client:
        return self._near

    def give(self) -> list[Future]:
        pushed = [self._near.push((0, self.keys.trained), self._row)]
        # The steps are counted where the board is.
        pushed.append(self.client.push((0, 1), torch.zeros(1, dtype=torch.float32), tick=True))
        self._trades += 1
        turn = self._trades + self._group.index(self.exchange.rank) * self._root_every
        if turn % (self._root_every * len(self._group)) == 0:
            self._climb()
        return pushed

    def _climb(self) -> None:
        """Tie the group's centre to the root once."""
        span = (0, self.keys.trained)
        with self.waiting("the root"):
            near, root = self._near.pull(span, wanted=0), self.client.pull(span, wanted=0)
            torch.sub(_found(near), _found(root), out=self._up).mul_(self._beta)
            for future in (self.client.push(span, self._up), self._near.push(span, -self._up)):
                future.wait()

    def count(self) -> None:
        super().count()
        told = self._near.bytes_logical, self._near.bytes_wire
        self.stats.sent(told[0] - self._counted_near[0], told[1] - self._counted_near[1])
        self._counted_near = told

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        with self.explained():
            self._near.close()

    # State.

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "groups": [list(group) for group in self.groups]}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        self._known_groups = state.get("groups") == self.groups

    def local_state(self) -> dict[str, Any]:
        residual = self._near.residual
        kept = {} if residual is None else {"near": self.keys.named(residual)}
        group = self.keys.named(self._near.get())
        return {**super().local_state(), **kept, "group": group, "trades": self._trades}

    def restart(self) -> None:
        super().restart()
        self._trades = 0
        if self._near.residual is not None:
            self._near.residual.zero_()
        self._put_near(self.keys.read(self.model))

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Groups that are others than before begin at the root's centre."""
        super().load_local_states(states)
        own = states[0] if states and self._known_groups and "group" in states[0] else None
        row = self.client.get((0, self.keys.trained))
        if own is not None:
            row = self.keys.joined(dict(own["group"]), row)
            self._trades = int(own["trades"])
            if self._near.residual is not None and "near" in own:
                self._near.residual.copy_(
                    self.keys.joined(dict(own["near"]), torch.zeros(self.keys.trained, dtype=torch.float32))
                )
        self._put_near(row)

    def _put_near(self, row: Tensor) -> None:
        """Set the centre of the group."""
        if self.exchange.rank == self._group[0]:
            self._near.put(None, row[: self.keys.trained])
        self.wait_for_all("set the centres of the groups")


def _found(future: Future) -> Tensor:
    found = future.wait()
    assert found is not None, "a pull reads"
    return found
