"""Each worker steps on weights of its own, and all meet now and then: what such strategies have in common.

    worker 0   w0 ─ step ─ step ─┐            ┌─ step ─ step ─┐
    worker 1   w1 ─ step ─ step ─┼─ a round ──┼─ step ─ step ─┼─ …
    worker 2   w2 ─ step ─ step ─┘            └─ step ─ step ─┘

*The* model is what `model_of_all` says, by default the mean of the workers' weights; `agreed()` shows it, a checkpoint
holds it beside each worker's own weights and optimizer state, and `close()` leaves it on every worker.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, broadcast_tensors, broadcast_tree, plain_name
from syncline.strategies.base import RunSettings, Strategy, StrategyRun, check_gradients, mean_of_all
from syncline.strategies.delta_reducer import DeltaReducer, trained
from syncline.strategies.scaler import refuse_skipped_steps
from syncline.world import allgather

__all__ = ["AveragingRun", "LocalWeightsRun", "put_state", "state_of"]


class LocalWeightsRun(StrategyRun):
    """A synchronous run whose workers' weights differ between rounds.

    A strategy says what happens after a step (`after_step`), and what a round does (`sync`); it may look at the
    gradients before the optimizer does (`before_step`).
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self._names = trained(model)
        self.rounds = 0
        """Meetings of all workers so far."""
        self.as_many = True
        """Whether the checkpoint that was loaded is of as many workers."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    # What a strategy says.

    def check_closure(self, closure: Any) -> None:
        """Refuse a closure given to `optimizer.step()` if the strategy does not support it. None means no closure."""

    def before_step(self) -> None:
        """The gradients are there, and nothing is applied yet."""

    @abstractmethod
    def after_step(self) -> None:
        """The optimizer has stepped, and the step is counted."""

    @abstractmethod
    def sync(self, active: bool = True) -> int:
        """A round of all workers; how many of them still have data. `active`: whether this one has."""

    def model_of_all(self) -> list[Tensor]:
        """*The* model's parameters, in the order of `weights`; every worker calls it."""
        return mean_of_all(self.exchange, self.weights)

    def own_state(self) -> dict[str, Any]:
        """More that a checkpoint keeps of this worker alone: tensors and plain values."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""

    # What it finds.

    @property
    def weights(self) -> list[Tensor]:
        """This worker's own, to be changed in place."""
        return [parameter.detach() for parameter in self._names.values()]

    @property
    def gradients(self) -> list[Tensor | None]:
        """Those of the step that begins."""
        return [parameter.grad for parameter in self._names.values()]

    def note_consensus(self, agreed: Sequence[Tensor]) -> None:
        """Tell the stats how far the workers are from what they agree on; every worker calls it."""
        apart = sum(float((own - all_).double().square().sum()) for own, all_ in zip(self.weights, agreed, strict=True))
        self.stats.consensus = math.sqrt(self.exchange.mean(apart))

    # The contract.

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """Nothing: a worker's step is that of its own batch, whatever its size."""

    def join_idle(self) -> bool:
        return self.sync(active=False) > 0

    def settle_uneven(self) -> None:
        """This worker has run out of data: meet the others until all have, then count as they do."""
        while self.join_idle():
            pass
        table = allgather(torch.tensor([self.stats.steps]), group=self.exchange.team).tolist()
        self._check_rates(self.stats.steps - min(table))
        root = table.index(max(table))
        if min(table) == max(table):
            return
        groups = self.optimizer.param_groups
        told = {
            "rates": [[float(group["lr"])] for group in groups if "lr" in group],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers.known],
        }
        found = broadcast_tree(self.exchange, told, root)
        if self.stats.steps < table[root]:
            for group, (rate,) in zip([each for each in groups if "lr" in each], found["rates"], strict=True):
                group["lr"] = rate
            for scheduler, state in zip(self.schedulers.known, found["schedulers"], strict=True):
                scheduler.load_state_dict(state)
            self.stats.steps = table[root]

    def shown_tensors(self) -> dict[str, Tensor]:
        return {**super().shown_tensors(), **{name: each.detach() for name, each in self._names.items()}}

    def show_agreed(self) -> None:
        self.take_over(self.model_of_all())
        super().show_agreed()

    def take_over(self, values: Sequence[Tensor]) -> None:
        """Make these the worker's weights."""
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # State.

    def restart(self) -> None:
        self.rounds, self.as_many = 0, True
        broadcast_tensors(self.exchange, self.weights)

    def shared_state(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "workers": self.exchange.size}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self.rounds = int(state.get("rounds", 0))
        self.as_many = int(state.get("workers", 0)) == self.exchange.size

    def local_state(self) -> dict[str, Any]:
        if self._own is not None:
            raise IncompatibleError("save a run outside agreed(): inside, a worker's own weights are put aside")
        return {
            "weights": {name: each.detach().clone() for name, each in self._names.items()},
            "optimizer": state_of(self.optimizer, self._names),
            "own": self.own_state(),
        }

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """A worker that the checkpoint does not know begins with the model of all, and what all agree on.

        Where there are more or fewer workers than before, everybody does: the mean of those that are left is another.
        """
        if not states:
            return
        own = states[0]
        put_state(self.optimizer, self._names, own["optimizer"])
        if self.as_many:
            parameters = {plain_name(name): each.detach() for name, each in self.model.named_parameters()}
            for name, value in own["weights"].items():
                parameters[name].copy_(value)
            self.load_own_state(own["own"])

    # Within.

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.settings.check_finite:
            check_gradients(self)
        if self.exchange.size > 1:
            if self.first_exchange is not None:
                refuse_skipped_steps(self.strategy, optimizer)
            self.check_closure(kwargs.get("closure", args[1] if len(args) > 1 else None))  # the optimizer comes first
            self.before_step()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stats.steps += 1
        self.note_rates()
        if self.exchange.size > 1:
            with torch.no_grad():
                self.after_step()


class AveragingRun(LocalWeightsRun):
    """A run whose rounds are all-reductions, with the run's collective and codec."""

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self.deltas = DeltaReducer(model, exchange, settings)

    def detach(self) -> None:
        super().detach()
        self.deltas.close()

    def restart(self) -> None:
        super().restart()
        self.deltas.forget()

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "deltas": self.deltas.shared_state()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        self.deltas.load_shared_state(state.get("deltas", {}))

    def local_state(self) -> dict[str, Any]:
        return {**super().local_state(), "deltas": self.deltas.local_state()}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        self.deltas.load_local_states([state["deltas"] for state in states])


def state_of(optimizer: Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """What an optimizer remembers of each parameter, by its name."""
    return {
        name: {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[each].items()
        }
        for name, each in names.items()
        if each in optimizer.state
    }


def put_state(optimizer: Optimizer, names: Mapping[str, nn.Parameter], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Take it back; what was not remembered then is not now."""
    for name, each in names.items():
        optimizer.state.pop(each, None)
        if name in saved:
            optimizer.state[each] = {
                key: value.to(each.device if value.dim() else value.device, copy=True)
                if isinstance(value, Tensor)
                else value
                for key, value in saved[name].items()
            }
