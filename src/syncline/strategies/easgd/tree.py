"""Centres in a tree: workers are tied to the centre of their group, and the groups' centres to a root.

::

    root             x̃                      every `root_every` rounds, among one worker of each group:
                   /   \\                      c_g ← c_g − β (c_g − x̃),  x̃ ← x̃ + β Σ (c_g − x̃)
    groups       c_0    c_1                  every round, within the group:
                /  \\    /  \\                 x_i ← x_i − α (x_i − c_g),  c_g ← c_g + α Σ (x_i − c_g)
    workers    x_0 x_1 x_2 x_3

Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015) for the pull; Zhang: Distributed stochastic
optimization for deep learning (2016) for the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.codecs import Codec
from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, broadcast_tensors
from syncline.reduction.ways import CompressedCollectives
from syncline.strategies.base import RunSettings
from syncline.strategies.delta_reducer import DeltaReducer
from syncline.strategies.easgd.centres import SHARE, Centre
from syncline.world import Group, World

__all__ = ["HOSTS", "CentreTree", "check_tree", "groups_of"]

HOSTS = "hosts"
"""A group for each host."""


def groups_of(world: World, centres: int | str) -> list[list[int]]:
    """The ranks of each group: neighbours, as evenly as can be, or those of a host."""
    if world.size == 1:
        return [[0]]  # one worker has nobody to agree with
    if centres == HOSTS:
        named: dict[str, list[int]] = {}
        for rank, host in enumerate(world.hosts):
            named.setdefault(host, []).append(rank)
        return list(named.values())
    assert isinstance(centres, int), "the strategy has looked"
    if centres > world.size:
        raise IncompatibleError(
            f"easgd(centres={centres}) on {world.size} workers: a centre has at least one; give at most {world.size}"
        )
    base, more = divmod(world.size, centres)
    first = [number * base + min(number, more) for number in range(centres + 1)]
    return [list(range(first[number], first[number + 1])) for number in range(centres)]


def check_tree(groups: Sequence[Sequence[int]], codec: Codec | None) -> None:
    """Refuse a codec that cannot go with a tree."""
    if len(groups) > 1 and codec is not None and codec.traits.residual_needs_sum:
        raise IncompatibleError(
            f"{codec!r} keeps a warm start that all workers share, and the {len(groups)} groups of a tree reduce "
            "apart: give a codec such as topk(0.01) or quantize(4), or one centre"
        )


class CentreTree(Centre):
    """The centre of this worker's group, and the root's."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        model: nn.Module,
        exchange: Communicator,
        settings: RunSettings,
        *,
        groups: Sequence[Sequence[int]],
        alpha: float,
        root_every: int,
    ) -> None:
        self.groups = [list(group) for group in groups]
        self._mine = next(number for number, group in enumerate(self.groups) if exchange.rank in group)
        # Every rank makes every team, in the same order.
        teams = [exchange.world.group(group) for group in self.groups]
        top = exchange.world.group([group[0] for group in self.groups])
        self._teams = [team for team in (*teams, top) if team.member]
        self._within = PartExchange(exchange, teams[self._mine])
        self.deltas = DeltaReducer(model, self._within, settings)
        """Of the group."""
        super().__init__(weights, self._within, self.deltas, alpha)
        self._root = [value.clone() for value in self.values]
        self._beta = SHARE / len(self.groups)
        self._root_every = root_every
        above = PartExchange(exchange, top) if top.member else None
        self._leading = None if above is None else DeltaReducer(model, above, settings, wide=True)
        """Among the first workers of the groups, by whom the root is reached."""
        if self._leading is not None:
            self._leading.prepare()

    @property
    def root(self) -> list[Tensor]:
        return self._root

    def start(self, weights: Sequence[Tensor]) -> None:
        super().start(weights)
        for root, weight in zip(self._root, weights, strict=True):
            root.copy_(weight)

    def finish(self, number: int) -> tuple[list[Tensor], int]:
        back, alive = super().finish(number)
        if number % self._root_every == 0:
            return back, self._climb(alive)
        # Those of other groups may have data: that is known in the rounds with the root alone.
        return back, max(1, alive)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "groups": [list(group) for group in self.groups]}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Groups that are others than before begin at the root's centre."""
        super().load_shared_state(state)
        self._known = state.get("groups") == self.groups
        for value, root in zip(self.values, self._root, strict=True):
            value.copy_(root)

    def own_state(self) -> dict[str, Any]:
        leading = {} if self._leading is None else {"leading": self._leading.local_state()}
        shared = {} if self._leading is None else {"leading_shared": self._leading.shared_state()}
        return {"group": self._named(self.values), **leading, **shared}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        if not self._known:
            return
        self._fill(self.values, state["group"])
        if self._leading is not None and "leading" in state:
            self._leading.load_shared_state(state["leading_shared"])
            self._leading.load_local_states([state["leading"]])

    def close(self) -> None:
        if self._leading is not None:
            self._leading.close()
        for team in self._teams:
            team.close()

    # Within.

    _known = True

    def _climb(self, alive: int) -> int:
        """Move the group's centre and the root; how many groups have a worker with data."""
        given = [value - root for value, root in zip(self.values, self._root, strict=True)]
        count = torch.tensor([alive])
        if self._leading is not None:
            begun = self._leading.begin([each.clone() for each in given], 1.0, alive > 0)
            means, left = self._leading.finish(begun)
            means = [mean.clone() for mean in means]
            count.fill_(left)
        else:
            means = [torch.empty_like(each) for each in given]
        handed = [*means, count]
        broadcast_tensors(self._within, handed)
        nbytes = sum(tensor.nbytes for tensor in handed)
        self._within.stats.sent(nbytes, nbytes if self._within.size > 1 else 0)
        torch._foreach_add_(self._root, means, alpha=self._beta * len(self.groups))
        torch._foreach_sub_(self.values, torch._foreach_mul(given, self._beta))
        return int(count)


class PartExchange(Communicator):
    """The exchange of some of a run's workers; what they send counts as the run's."""

    def __init__(self, whole: Communicator, team: Group) -> None:
        self.world = whole.world
        self.codec = whole.codec
        self.ways = CompressedCollectives(whole.collective, whole.codec)
        self.collective = whole.collective
        self.team = team
        self.stats = whole.stats
        self._schedules = {}
