"""Synchronous elastic averaging: all workers take a round together, and every worker has a copy of the centre.

::

    optimizer.step()
      └─ before   end of a period: reduce the differences x − x̃               x at which the gradient was computed
         step     x ← x − η · g(x)                                            the user's optimizer
         after    x ← x − α (x before − x̃),  x̃ ← x̃ + α Σ (x before − x̃)      both moves from the same x

The differences from the centre are all-reduced. A copy moves only by the reduced sum, so that all copies have the same
bits. In an elastic job a round that a loss interrupts is repeated with the survivors, or all take its result: in both
cases Σ x_i + x̃ loses only the weights that the lost worker had. In a tree each group of workers has a centre, and these
have a root::

    root             x̃                      every `root_every` rounds, among one worker of each group:
                   /   \\                      c_g ← c_g − β (c_g − x̃),  x̃ ← x̃ + β Σ (c_g − x̃)
    groups       c_0    c_1                  every round, within the group:
                /  \\    /  \\                 x_i ← x_i − α (x_i − c_g),  c_g ← c_g + α Σ (x_i − c_g)
    workers    x_0 x_1 x_2 x_3

Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015); Zhang: Distributed stochastic optimization
for deep learning (2016) for the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, ReductionPass, broadcast_tensors
from syncline.strategies.base import RunSettings, mean_of_all, wide_dtype
from syncline.strategies.local_weights import AveragingRun, DeltaReducer
from syncline.world import Group, World

if TYPE_CHECKING:
    from syncline.strategies.easgd import EASGD

__all__ = [
    "DEFAULT_TOTAL_PULL",
    "HOSTS",
    "Centre",
    "CentreTree",
    "ElasticRun",
    "NesterovLookahead",
    "groups_of",
    "groups_within",
]

CONSENSUS_EVERY_ROUNDS = 8
"""Interval in rounds at which the workers' distance from the centre is measured. It takes a small message."""
DEFAULT_TOTAL_PULL = 0.9
"""The sum of alpha over all workers of a centre, if no alpha is given."""
HOSTS = "hosts"
"""The value of `centres` for one group per host."""


class ElasticRun(AveragingRun):
    """Every worker holds a copy of the centre."""

    strategy: EASGD
    copies_weights = True

    def setup(self) -> None:
        super().setup()
        strategy, communicator = self.strategy, self.communicator
        self._since = 0
        """Steps since the last round."""
        self.lookahead = NesterovLookahead(self._names, 0.0 if self.alone else strategy.momentum)
        self.centre: Centre
        groups = groups_within(communicator, strategy.centres)
        if len(groups) > 1:
            alpha = strategy.alpha_of
            tree = CentreTree(self._names, self.model, communicator, self.settings, groups, alpha, strategy.root_every)
            self.centre, self.deltas = tree, tree.deltas
        else:
            self.centre = Centre(self._names, self.deltas, strategy.alpha_of)
        self._first_round = strategy.root_every if len(groups) > 1 else 1
        """The number of the round that moves the centre of all workers for the first time."""
        self.deltas.prepare()

    @property
    def first_exchange(self) -> int | None:
        return self.strategy.period

    @property
    def elastic_refusal(self) -> str:
        return ""  # the strategy refuses trees and an alpha that is too large for the largest team

    # Steps.

    @property
    def own(self) -> list[Tensor]:
        """This worker's x. With momentum its parameters are at x + δ v."""
        return self.lookahead.own

    def before_step(self) -> None:
        if self._since + 1 >= self.strategy.period:
            self._begin_round()

    def after_step(self) -> None:
        self._since += 1
        self.lookahead.after_step(self._finish_round()[0] if self.centre.in_progress else None)

    def sync(self, active: bool = True) -> int:
        self._begin_round(active)
        pull, alive = self._finish_round()
        self.lookahead.subtract(pull)
        return alive

    def model_of_all(self) -> list[Tensor]:
        """The centre, which all workers have. Before its first move it is the mean, so that training is not lost."""
        if self.rounds < self._first_round and self.stats.steps:
            return mean_of_all(self.communicator, self.own)
        return [value.clone() for value in self.centre.root]

    def _begin_round(self, active: bool = True) -> None:
        if self.rounds % CONSENSUS_EVERY_ROUNDS == 0:
            self.note_consensus(self.centre.root, self.own)
        self.centre.begin(self.own, active)

    def _finish_round(self) -> tuple[list[Tensor], int]:
        """What this worker subtracts from its weights, and how many workers have data."""
        pull, alive = self.centre.finish(self.rounds + 1)
        self.rounds += 1  # not before: if a worker is lost meanwhile, its steps since the last round do not count
        self._since = 0
        self.stats.staleness = 0
        return pull, alive

    # State.

    def restart(self) -> None:
        """The centre is what every worker has."""
        super().restart()
        self._since = 0
        self.centre.reset(self.weights)
        self.lookahead.reset()

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "since": self._since, **self.centre.shared_state()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """A worker that the checkpoint does not know begins at the centre.

        If the centre has not moved yet, or there was one worker only, it is the model that was loaded before.
        """
        super().load_shared_state(state)
        self._since = int(state.get("since", 0)) if self.same_size else 0
        self.centre.load_shared_state(state)
        if int(state.get("workers", 0)) == 1 or (self.rounds < self._first_round and not self.same_size):
            self.centre.reset(self.weights)
        self.set_weights(self.centre.root)
        self.lookahead.reset()

    def own_state(self) -> dict[str, Any]:
        return {"since": self._since, **self.centre.own_state(), **self.lookahead.state()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._since = int(state["since"])
        self.centre.load_own_state(state)
        self.lookahead.load(state)

    def detach(self) -> None:
        super().detach()
        self.centre.close()


class NesterovLookahead:
    """A worker's x, with Nesterov's momentum around an optimizer that has none: v ← δ v − η g(x + δ v),  x ← x + v.

    ::

        between steps the parameters hold      x + δ v                the point of the next gradient
        the optimizer's step makes of it       x + δ v − η g = x + v  the new x
        so                                     v = new x − old x

    With a momentum of 0 the parameters hold x itself.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], momentum: float) -> None:
        self._parameters = dict(parameters)
        self._momentum = momentum
        self.x = {name: each.detach().clone() for name, each in parameters.items()} if momentum else {}
        """x by name, if it differs from the parameters."""

    @property
    def own(self) -> list[Tensor]:
        """x."""
        return list(self.x.values()) if self._momentum else self._weights()

    def after_step(self, pull: Sequence[Tensor] | None) -> None:
        """Call after the optimizer's step: update x, subtract `pull`, and move the parameters to x + δ v again."""
        if not self._momentum:
            if pull is not None:
                subtract(self._weights(), pull)
            return
        weights = self._weights()
        velocity = [weight - before for weight, before in zip(weights, self.own, strict=True)]
        self.reset()
        subtract(self.own, pull)
        for weight, own, speed in zip(weights, self.own, velocity, strict=True):
            torch.add(own, speed, alpha=self._momentum, out=weight)

    def subtract(self, pull: Sequence[Tensor]) -> None:
        """Subtract `pull` from x and from the parameters, outside a step."""
        if self._momentum:
            subtract(self.own, pull)
        subtract(self._weights(), pull)

    def reset(self) -> None:
        """Set the velocity to zero: x is what the parameters hold."""
        for name, own in self.x.items():
            own.copy_(self._parameters[name].detach())

    def state(self) -> dict[str, Any]:
        return {"x": {name: own.clone() for name, own in self.x.items()}} if self._momentum else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. A checkpoint without momentum has no x."""
        if "x" not in state:
            self.reset()
            return
        for name, own in self.x.items():
            own.copy_(state["x"][name])

    def _weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters.values()]


def subtract(tensors: Sequence[Tensor], pull: Sequence[Tensor] | None) -> None:
    """Subtract in place; None: nothing."""
    for tensor, each in zip(tensors, pull or [], strict=pull is not None):
        tensor.sub_(each)


class Centre:
    """One centre for all workers of a communicator: x̃ ← x̃ + α Σ (x_i − x̃)."""

    def __init__(self, weights: Mapping[str, Tensor], deltas: DeltaReducer, alpha: Callable[[int], float]) -> None:
        """`alpha` gives α for a number of workers."""
        self.values = [weight.detach().to(wide_dtype(weight.dtype), copy=True) for weight in weights.values()]
        """The centre of this worker, at least in float32: its changes are too small for half precision."""
        self._alpha = alpha
        self._names = list(weights)
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
        self._reduction = self._deltas.reduce([each.clone() for each in self._differences], 1.0, active)

    def finish(self, number: int) -> tuple[list[Tensor], int]:
        """Move the centre, in the round of that number.

        Returns what this worker subtracts from its weights, and how many workers have data.
        """
        assert self._reduction is not None, "a round has begun"
        # The workers in the sum. The present team of an elastic job may be another one, if one was lost meanwhile.
        workers = round(self._reduction.complete().weight)
        means, alive = self._deltas.finish(self._reduction)
        self._reduction = None
        alpha = self._alpha(workers)
        moves = [mean.to(value.dtype) for mean, value in zip(means, self.values, strict=True)]
        torch._foreach_add_(self.values, moves, alpha=alpha * workers)
        pull, self._differences = self._differences, []
        torch._foreach_mul_(pull, alpha)  # exact, also with a codec: its residual reaches the centre later
        return pull, alive

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
        groups: Sequence[Sequence[int]],
        alpha: Callable[[int], float],
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
        super().__init__(weights, self.deltas, alpha)
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
        super().reset(self._root)

    def own_state(self) -> dict[str, Any]:
        reducer = self._among_leaders
        own: dict[str, Any] = {"group": self._named(self.values)}
        if reducer is not None:
            own |= {"leading": reducer.local_state(), "leading_shared": reducer.shared_state()}
        return own

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
            reduction = reducer.reduce([each.clone() for each in differences], 1.0, alive > 0)
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


def groups_within(communicator: Communicator, centres: int | str) -> list[list[int]]:
    """The ranks of each group among those of a communicator, which may be the workers of one part of a model."""
    if communicator.size == communicator.world.size or communicator.world.elastic is not None:  # no mesh is elastic
        return groups_of(communicator.world, centres)
    if centres != 1:
        raise IncompatibleError(
            f"easgd(centres={centres!r}) groups all workers, and here {communicator.size} of {communicator.world.size} "
            "workers train a part of the model together: leave `centres` out"
        )
    return [list(range(communicator.size))]


def _part_of(whole: Communicator, group: Group) -> Communicator:
    """The communicator of some workers of a run. What they send counts in the run's stats."""
    return Communicator(whole.world, whole.collective, whole.codec, group, whole.stats)
