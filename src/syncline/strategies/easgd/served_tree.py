"""A tree of centres at the servers: each group has a space with its centre, and the root has one.

::

    root        x̃         the space of the run: what is evaluated, watched and saved
              /   \\        x̃ += D, c_g −= D,  D = β (c_g − x̃)    now this worker of the group, now that one
    groups  c_0   c_1      a space for each group
           /  \\   /  \\     c_g += d, x_i −= d,  d = α (x_i − c_g)

Everything is an addition, so that Σ x_i + Σ c_g + x̃ stays under any interleaving. The workers of a group take turns at
the root: one that has ended, or is gone, does not cut its group off.
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
from syncline.strategies.easgd.centres import SHARE
from syncline.strategies.easgd.served import ServedElasticRun

__all__ = ["ServedTreeRun"]


class ServedTreeRun(ServedElasticRun):
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
        self._beta = SHARE / len(self.groups)
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
            retry=network.transport.retry,
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
