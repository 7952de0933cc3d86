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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.exchange import Exchange, share_tree
from syncline.strategies.base import Run, Settings, Strategy, check_gradients
from syncline.strategies.deltas import Deltas, trained
from syncline.world import allgather, allreduce

__all__ = ["OwnRun", "mean_of_all", "put_state", "state_of"]


class OwnRun(Run):
    """A synchronous run whose workers' weights differ between rounds.

    A strategy says what happens after a step (`after_step`), and what a round does (`meet`); it may look at the
    gradients before the optimizer does (`before_step`).
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, exchange: Exchange, settings: Settings
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self._names = trained(model)
        self.deltas = Deltas(model, exchange, settings)
        self.rounds = 0
        """Meetings of all workers so far."""
        self.as_many = True
        """Whether the checkpoint that was loaded is of as many workers."""
        self._showing = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    # What a strategy says.

    def before_step(self) -> None:
        """The gradients are there, and nothing is applied yet."""

    @abstractmethod
    def after_step(self) -> None:
        """The optimizer has stepped, and the step is counted."""

    @abstractmethod
    def meet(self, active: bool = True) -> int:
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

    def weigh(self, weight: float, uneven: bool = False) -> None:
        """Nothing: a worker's step is that of its own batch, whatever its size."""

    def empty_round(self) -> bool:
        return self.meet(active=False) > 0

    def settle_uneven(self) -> None:
        """This worker has run out of data: meet the others until all have, then count as they do."""
        while self.empty_round():
            pass
        self._rates = None
        table = allgather(torch.tensor([self.stats.steps]), group=self.exchange.team).tolist()
        root = table.index(max(table))
        if min(table) == max(table):
            return
        groups = self.optimizer.param_groups
        told = {
            "rates": [[float(group["lr"])] for group in groups if "lr" in group],
            "schedulers": [scheduler.state_dict() for scheduler in self.settings.schedulers],
        }
        found = share_tree(self.exchange, told, root)
        if self.stats.steps < table[root]:
            for group, (rate,) in zip([each for each in groups if "lr" in each], found["rates"], strict=True):
                group["lr"] = rate
            for scheduler, state in zip(self.settings.schedulers, found["schedulers"], strict=True):
                scheduler.load_state_dict(state)
            self.stats.steps = table[root]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        if self._showing or self.exchange.size == 1:
            yield
            return
        shown = self.model_of_all()
        own = [weight.clone() for weight in self.weights]
        self._showing = True
        try:
            self.take_over(shown)
            with super().agreed():
                yield
        finally:
            self._showing = False
            self.take_over(own)

    def take_over(self, values: Sequence[Tensor]) -> None:
        """Make these the worker's weights."""
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def close(self) -> None:
        if not self._closed and self.exchange.size > 1:
            self.take_over(self.model_of_all())
            self._agree_on_buffers()
        super().close()

    def detach(self) -> None:
        self.deltas.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # State.

    def shared_state(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "workers": self.exchange.size, "deltas": self.deltas.shared_state()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self.rounds = int(state.get("rounds", 0))
        self.as_many = int(state.get("workers", 0)) == self.exchange.size
        self.deltas.load_shared_state(state.get("deltas", {}))

    def local_state(self) -> dict[str, Any]:
        if self._showing:
            raise IncompatibleError("save a run outside agreed(): inside, a worker's own weights are put aside")
        return {
            "weights": {name: each.detach().clone() for name, each in self._names.items()},
            "optimizer": state_of(self.optimizer, self._names),
            "deltas": self.deltas.local_state(),
            "own": self.own_state(),
        }

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """A worker that the checkpoint does not know begins with the model of all, and what all agree on.

        Where there are more or fewer workers than before, everybody does: the mean of those that are left is another.
        """
        if not states or "weights" not in states[0]:  # another strategy's: its workers had nothing of their own
            return
        own = states[0]
        put_state(self.optimizer, self._names, own["optimizer"])
        self.deltas.load_local_states([state["deltas"] for state in states])
        if self.as_many:
            for name, value in own["weights"].items():
                self._names[name].detach().copy_(value)
            self.load_own_state(own["own"])

    # Within.

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.settings.check_finite:
            check_gradients(self)
        if self.exchange.size > 1:
            self.before_step()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stats.steps += 1
        if self.exchange.size > 1:
            with torch.no_grad():
                self.after_step()


def mean_of_all(exchange: Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each tensor over the workers, exactly as sent: no codec. Every worker calls it."""
    if exchange.size == 1:
        return [tensor.clone() for tensor in tensors]
    kinds: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype, []).append(number)
    found = list(tensors)
    for numbers in kinds.values():
        flat = torch.cat([tensors[number].detach().reshape(-1) for number in numbers]).cpu()
        mean = allreduce(flat, op="mean", group=exchange.team)
        for number, part in zip(numbers, mean.split([tensors[number].numel() for number in numbers]), strict=True):
            found[number] = part.view(tensors[number].shape).to(tensors[number].device)
    return found


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
