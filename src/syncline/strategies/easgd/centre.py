"""The centre of elastic averaging without a server: every worker has a copy, and all copies are equal.

Each worker gives its difference from the centre, and the differences are all-reduced. A copy moves only by the reduced
sum, so that all copies have the same bits. In a tree each group of workers has a centre, and these have a root::

    root             x̃                      every `root_every` rounds, among one worker of each group:
                   /   \\                      c_g ← c_g − β (c_g − x̃),  x̃ ← x̃ + β Σ (c_g − x̃)
    groups       c_0    c_1                  every round, within the group:
                /  \\    /  \\                 x_i ← x_i − α (x_i − c_g),  c_g ← c_g + α Σ (x_i − c_g)
    workers    x_0 x_1 x_2 x_3

Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015); Zhang: Distributed stochastic optimization
for deep learning (2016) for the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, ReductionPass, broadcast_tensors
from syncline.strategies.base import RunSettings, wide_dtype
from syncline.strategies.local_weights import DeltaReducer, squared_distance
from syncline.world import Group, World

__all__ = ["DEFAULT_TOTAL_PULL", "HOSTS", "Centre", "CentreTree", "groups_of"]

DEFAULT_TOTAL_PULL = 0.9
"""The sum of alpha over all workers of a centre, if no alpha is given."""
HOSTS = "hosts"
"""The value of `centres` for one group per host."""


def groups_of(world: World, centres: int | str) -> list[list[int]]:
    """The ranks of each group: consecutive ranks in groups of almost equal size, or those of a host."""
    if world.size == 1:
        return [[0]]
    if centres == HOSTS:
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(world.hosts):
            by_host.setdefault(host, []).append(rank)
        return list(by_host.values())
    assert isinstance(centres, int), "the strategy has checked it"
    if centres > world.size:
        raise IncompatibleError(
            f"easgd(centres={centres}) on {world.size} workers: a centre has at least one; give at most {world.size}"
        )
    base, more = divmod(world.size, centres)
    first = [number * base + min(number, more) for number in range(centres + 1)]
    return [list(range(first[number], first[number + 1])) for number in range(centres)]


class Centre:
    """One centre for all workers of a communicator: x̃ ← x̃ + α Σ (x_i − x̃)."""

    def __init__(
        self, weights: Mapping[str, Tensor], communicator: Communicator, deltas: DeltaReducer, alpha: float
    ) -> None:
        self.values = [weight.detach().to(wide_dtype(weight.dtype), copy=True) for weight in weights.values()]
        """The centre of this worker, at least in float32: its changes are too small for half precision."""
        self.alpha = alpha
        self._names = list(weights)
        self._communicator = communicator
        self._deltas = deltas
        self._differences: list[Tensor] = []
        self._reduction: ReductionPass | None = None

    @property
    def root(self) -> list[Tensor]:
        """The centre of all workers."""
        return self.values

    def reset(self, weights: Sequence[Tensor]) -> None:
        """Set the centre to these weights."""
        for value, weight in zip(self.values, weights, strict=True):
            value.copy_(weight)

    @property
    def in_progress(self) -> bool:
        """Whether a round has begun."""
        return self._reduction is not None

    def begin(self, own: Sequence[Tensor], active: bool) -> None:
        """Begin a round: reduce the differences of this worker's weights from the centre."""
        self._differences = [(weight - value).to(weight.dtype) for weight, value in zip(own, self.values, strict=True)]
        self._reduction = self._deltas.begin([each.clone() for each in self._differences], 1.0, active)

    def finish(self, number: int) -> tuple[list[Tensor], int]:
        """Move the centre, in the round of that number.

        Returns what this worker subtracts from its weights, and how many workers have data.
        """
        assert self._reduction is not None, "a round has begun"
        means, alive = self._deltas.finish(self._reduction)
        self._reduction = None
        moves = [mean.to(value.dtype) for mean, value in zip(means, self.values, strict=True)]
        torch._foreach_add_(self.values, moves, alpha=self.alpha * self._communicator.size)
        pull, self._differences = self._differences, []
        torch._foreach_mul_(pull, self.alpha)  # exact, also with a codec: its residual reaches the centre later
        return pull, alive

    def squared_distance(self, own: Sequence[Tensor]) -> float:
        """The squared distance of this worker from the centre of all workers."""
        return squared_distance(own, self.root)

    # State.

    def shared_state(self) -> dict[str, Any]:
        """The state that is the same on all workers."""
        return {"centre": self._named(self.root)}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._load(self.root, state["centre"])

    def own_state(self) -> dict[str, Any]:
        """The state of this worker or its group."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore `own_state`."""

    def close(self) -> None:
        """Release what the centre has opened."""

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in zip(self._names, tensors, strict=True)}

    def _load(self, tensors: Sequence[Tensor], saved: Mapping[str, Tensor]) -> None:
        for name, tensor in zip(self._names, tensors, strict=True):
            tensor.copy_(saved[name])


class CentreTree(Centre):
    """The centre of this worker's group, and the root's."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        model: nn.Module,
        communicator: Communicator,
        settings: RunSettings,
        *,
        groups: Sequence[Sequence[int]],
        alpha: float,
        root_every: int,
    ) -> None:
        self.groups = [list(group) for group in groups]
        own_group = next(number for number, group in enumerate(self.groups) if communicator.rank in group)
        # Every rank constructs every group, in the same order.
        teams = [communicator.world.group(group) for group in self.groups]
        leaders = communicator.world.group([group[0] for group in self.groups])
        self._teams = [team for team in (*teams, leaders) if team.member]
        self._within = _part_of(communicator, teams[own_group])
        self.deltas = DeltaReducer(model, self._within, settings)
        """Reduces within the group."""
        super().__init__(weights, self._within, self.deltas, alpha)
        self._root = [value.clone() for value in self.values]
        self._beta = DEFAULT_TOTAL_PULL / len(self.groups)
        self._root_every = root_every
        self._same_groups = True
        """Whether the loaded checkpoint has the same groups."""
        self._among_leaders: DeltaReducer | None = None
        """Reduces among the first workers of the groups, which reach the root."""
        if leaders.member:
            self._among_leaders = DeltaReducer(model, _part_of(communicator, leaders), settings, wide=True)
            self._among_leaders.prepare()

    @property
    def root(self) -> list[Tensor]:
        return self._root

    def reset(self, weights: Sequence[Tensor]) -> None:
        super().reset(weights)
        for root, weight in zip(self._root, weights, strict=True):
            root.copy_(weight)

    def finish(self, number: int) -> tuple[list[Tensor], int]:
        pull, alive = super().finish(number)
        if number % self._root_every == 0:
            return pull, self._move_root(alive)
        # Workers of other groups may have data: only rounds with the root know it.
        return pull, max(1, alive)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "groups": [list(group) for group in self.groups]}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """If the groups have changed, each begins at the root's centre."""
        super().load_shared_state(state)
        self._same_groups = state.get("groups") == self.groups
        for value, root in zip(self.values, self._root, strict=True):
            value.copy_(root)

    def own_state(self) -> dict[str, Any]:
        reducer = self._among_leaders
        leading = (
            {} if reducer is None else {"leading": reducer.local_state(), "leading_shared": reducer.shared_state()}
        )
        return {"group": self._named(self.values), **leading}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        if not self._same_groups:
            return
        self._load(self.values, state["group"])
        if self._among_leaders is not None and "leading" in state:
            self._among_leaders.load_shared_state(state["leading_shared"])
            self._among_leaders.load_local_states([state["leading"]])

    def close(self) -> None:
        if self._among_leaders is not None:
            self._among_leaders.close()
        for team in self._teams:
            team.close()

    def _move_root(self, alive: int) -> int:
        """Move the group's centre and the root. Returns how many groups have a worker with data."""
        differences = [value - root for value, root in zip(self.values, self._root, strict=True)]
        count = torch.tensor([alive])
        reducer = self._among_leaders
        if reducer is not None:
            reduction = reducer.begin([each.clone() for each in differences], 1.0, alive > 0)
            means, active = reducer.finish(reduction)
            means = [mean.clone() for mean in means]
            count.fill_(active)
        else:
            means = [torch.empty_like(each) for each in differences]
        tensors = [*means, count]
        broadcast_tensors(self._within, tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._within.stats.sent(nbytes, nbytes if self._within.size > 1 else 0)
        torch._foreach_add_(self._root, means, alpha=self._beta * len(self.groups))
        torch._foreach_sub_(self.values, torch._foreach_mul(differences, self._beta))
        return int(count)


def _part_of(whole: Communicator, group: Group) -> Communicator:
    """The communicator of some workers of a run. What they send counts in the run's stats."""
    return Communicator(whole.world, whole.collective, whole.codec, group, whole.stats)
