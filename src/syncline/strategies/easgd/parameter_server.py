"""Asynchronous elastic averaging: the servers hold the centre x̃, or a tree of centres.

::

    optimizer.step()                                     servers
      └─ before   every `period` steps: read x̃     ◄───   x̃
                  d = α (x − x̃)                    ───►   x̃ += d        whatever others have added meanwhile
         step     x ← x − η · g(x)
         after    x ← x − d

A worker subtracts from its weights what it has sent, so that Σ x_i + x̃ stays the same in any order of messages. In a
tree each group of workers has a centre c_g in a space of its own::

    root        x̃         the space of the run: it is evaluated, observed and saved
              /   \\        x̃ += D, c_g −= D,  D = β (c_g − x̃)    by the workers of the group in turn
    groups  c_0   c_1      a space for each group
           /  \\   /  \\     c_g += d, x_i −= d,  d = α (x_i − c_g)

Every update is an addition, so that Σ x_i + Σ c_g + x̃ stays the same. The workers of a group take turns at the root: a
worker that has ended does not disconnect its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.server import Client, Future, open_space, server_network
from syncline.strategies.easgd.synchronous import DEFAULT_TOTAL_PULL, NesterovLookahead, groups_of
from syncline.strategies.parameter_server import ReplicaRun

if TYPE_CHECKING:
    from syncline.strategies.easgd import EASGD

__all__ = ["ServerElasticRun", "ServerElasticTreeRun"]


class ServerElasticRun(ReplicaRun):
    """The servers hold the centre; each worker has its own x."""

    strategy: EASGD

    def setup(self) -> None:
        super().setup()
        elastic = self.world.elastic
        self.several_workers = self.communicator.size > 1 or elastic is not None
        if elastic is None or self.membership is None:
            self.groups = groups_of(self.world, self.strategy.centres)
            self.alpha = self.strategy.alpha_in(self.groups, self.communicator.rank)
        else:  # the centre must not jump beyond the workers when all that may join are there
            self.groups = [list(range(elastic.limits.maximum))]
            self.alpha = self.strategy.alpha_in(self.groups, 0)
        self.steps_since_average = 0
        """Steps since the last exchange."""
        self._named = {field.name: each for field, each in zip(self.keys.parameters, self.parameters, strict=True)}
        momentum = self.strategy.momentum if self.several_workers else 0.0
        self.lookahead = NesterovLookahead(self._named, momentum)
        self.difference = torch.zeros(self.keys.trained, dtype=torch.float32)
        """The values of the latest push. They must not change until it has arrived."""
        self._difference_views = self.keys.views(self.difference)
        self._back: list[Tensor] | None = None
        """What the current step subtracts from the weights."""

    @property
    def near(self) -> Client:
        """The client of the centre that this worker averages with."""
        return self.client

    def push_difference(self) -> list[Future]:
        """Add `difference` to that centre, and advance the worker's clock."""
        return self.pusher.push(self.difference, self.rates(), scale=self.scale())

    @property
    def own(self) -> list[Tensor]:
        """This worker's x. With momentum the model holds the look-ahead point instead."""
        return self.lookahead.own

    def before_step(self) -> None:
        if self.steps_since_average + 1 >= self.strategy.period and self.several_workers:
            self._back = self.average_with_centre()

    def after_step(self) -> None:
        self.steps_since_average += 1
        with torch.no_grad():
            back, self._back = self._back, None
            self.lookahead.after_step(back)
        if self.steps_since_average >= self.strategy.period:
            self.steps_since_average = 0
            if not self.several_workers:
                self._publish()

    def push_remaining(self) -> None:
        if not self.several_workers:
            self._publish(tick=False)
        elif self.steps_since_average and self.client.clock == 0:
            with torch.no_grad():  # else none of this worker's steps would be in the centre
                self.lookahead.subtract(self.average_with_centre())

    def enter_training(self) -> None:
        """A newcomer begins at the centre."""
        super().enter_training()
        self.lookahead.reset()

    # State.

    def restart(self) -> None:
        super().restart()
        self.steps_since_average, self._back = 0, None
        self.lookahead.reset()

    def local_state(self) -> dict[str, Any]:
        weights = {name: each.detach().clone() for name, each in self._named.items()}
        own = {"weights": weights, "since": self.steps_since_average}
        return {**super().local_state(), **own, **self.lookahead.state()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """A worker that the checkpoint does not know begins at the centre."""
        super().load_shared_state(state)
        self.lookahead.reset()

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        if not states:
            return
        own = states[0]
        for name, each in self._named.items():
            each.detach().copy_(own["weights"][name])
        self.steps_since_average = int(own.get("since", 0))
        self.lookahead.load(own)

    # Within.

    def average_with_centre(self) -> list[Tensor]:
        """Read the centre, and move it towards this worker; return by how much."""
        self.finish_pushes()
        with self.timed_wait("the centre"):
            # Never encoded: with a part of the centre missing, the difference would be wrong.
            self.near.pull((0, self.keys.trained), self.weights, min_clock=0).wait()
        torch._foreach_copy_(self._difference_views, self.own)
        self.difference.sub_(self.weights)
        self.stats.consensus = float(self.difference.norm())
        self.difference.mul_(self.alpha)
        with self.explain_errors():
            self.steps_pushed = self.stats.steps
            self.pushed = self.push_difference()
        self.count_bytes()
        return self._difference_views

    def _publish(self, tick: bool = True) -> None:
        """With one worker the centre is that worker: send its weights to the servers for observers."""
        self.finish_pushes()
        torch._foreach_copy_(self._difference_views, self.own)
        with self.explain_errors():
            self.pushed = [self.client.push((0, self.keys.trained), self.difference, handler="assign", tick=tick)]
        self.count_bytes()


class ServerElasticTreeRun(ServerElasticRun):
    """Averages with the centre of its group, and in turn averages that centre with the root."""

    has_tree = True

    def setup(self) -> None:
        super().setup()
        number = next(number for number, group in enumerate(self.groups) if self.communicator.rank in group)
        self._group = self.groups[number]
        self._beta = DEFAULT_TOTAL_PULL / len(self.groups)
        self._trades = 0
        self.root_difference = torch.zeros(self.keys.trained, dtype=torch.float32)
        """The values that move from the group's centre to the root."""
        self._known_groups = True
        self._counted_near = (0, 0)
        network, codec = server_network(self.world), self.communicator.codec
        members = [network.workers[rank] for rank in self._group]
        self._near = open_space(
            self.world,
            f"{self.strategy.name} group {number}",
            self.keys.trained,
            codec=None if codec is None else repr(codec),
            # A worker leaves together with its group, so that it cannot hold a shard of another group.
            servers=network.servers if network.dedicated else members,
            workers=members,
            initial=self.keys.read(self.model)[: self.keys.trained],
            seed=self.settings.seed,
            retry_s=network.transport.retry_after_s,
        )

    @property
    def near(self) -> Client:
        return self._near

    def push_difference(self) -> list[Future]:
        pushed = [self._near.push((0, self.keys.trained), self.difference)]
        # The root counts the steps.
        pushed.append(self.client.push((0, 1), torch.zeros(1, dtype=torch.float32), tick=True))
        self._trades += 1
        root_every = self.strategy.root_every
        turn = self._trades + self._group.index(self.communicator.rank) * root_every
        if turn % (root_every * len(self._group)) == 0:
            self._average_with_root()
        return pushed

    def _average_with_root(self) -> None:
        """Average the group's centre with the root once."""
        span = (0, self.keys.trained)
        with self.timed_wait("the root"):
            near, root = self._near.pull(span, min_clock=0), self.client.pull(span, min_clock=0)
            torch.sub(_values(near), _values(root), out=self.root_difference).mul_(self._beta)
            for future in (self.client.push(span, self.root_difference), self._near.push(span, -self.root_difference)):
                future.wait()

    def count_bytes(self) -> None:
        super().count_bytes()
        counted = self._near.bytes_logical, self._near.bytes_wire
        self.stats.sent(counted[0] - self._counted_near[0], counted[1] - self._counted_near[1])
        self._counted_near = counted

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        with self.explain_errors():
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
        """Groups that differ from those of the checkpoint begin at the root's centre."""
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
        if self.communicator.rank == self._group[0]:
            self._near.put(None, row[: self.keys.trained])
        self.wait_for_all("set the centres of the groups")


def _values(future: Future) -> Tensor:
    values = future.wait()
    assert values is not None, "a pull returns values"
    return values
