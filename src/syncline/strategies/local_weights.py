"""Strategies in which each worker keeps its own weights, and all workers synchronise now and then.

    worker 0   w0 ─ step ─ step ─┐            ┌─ step ─ step ─┐
    worker 1   w1 ─ step ─ step ─┼─ sync() ───┼─ step ─ step ─┼─ …
    worker 2   w2 ─ step ─ step ─┘            └─ step ─ step ─┘

*The* model is `model_of_all()`, by default the mean of the workers' weights. `agreed()` shows it, a checkpoint holds it
beside each worker's own weights and optimizer state, and `close()` leaves it on every worker.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, ReductionPass, ReductionPolicy, broadcast_tensors, plain_name
from syncline.strategies.base import (
    RunReducer,
    RunSettings,
    StrategyRun,
    check_gradients,
    mean_of_all,
    trained,
    wide_dtype,
)

__all__ = [
    "AveragingRun",
    "DeltaReducer",
    "LocalWeightsRun",
    "called_by_grad_scaler",
    "load_optimizer_state",
    "optimizer_state",
]

MAX_CALLER_FRAMES = 8
"""Largest number of stack frames above a step hook that are searched: torch's wrappers of `step` come first."""


def called_by_grad_scaler() -> bool:
    """Whether a GradScaler has called the optimizer, whose hook asks."""
    frame = inspect.currentframe()
    for _ in range(MAX_CALLER_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return True
    return False


class LocalWeightsRun(StrategyRun):
    """A synchronous run whose workers' weights differ between rounds.

    A strategy defines what happens after a step (`after_step`) and in a round (`sync`). It may use the gradients before
    the optimizer does (`before_step`).
    """

    needs_every_step: ClassVar[bool] = True
    """Whether workers must count the same steps, so that a GradScaler may not skip one without notice."""

    def setup(self) -> None:
        super().setup()
        self._names = trained(self.model)
        self.rounds = 0
        """Rounds of all workers so far."""
        self.same_size = True
        """Whether the loaded checkpoint is of as many workers."""
        self.hooks += [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    # Contract.

    def check_closure(self, closure: Any) -> None:
        """Refuse a closure given to `optimizer.step()` if the strategy does not support it. None means no closure."""

    def before_step(self) -> None:
        """Called when the gradients are complete and before the optimizer applies them."""

    @abstractmethod
    def after_step(self) -> None:
        """Called after the optimizer's step, which is counted already."""

    @abstractmethod
    def sync(self, active: bool = True) -> int:
        """A round of all workers. `active`: whether this one has data. Returns how many workers have data."""

    def model_of_all(self) -> list[Tensor]:
        """*The* model's parameters, in the order of `weights`. Every worker calls it."""
        return mean_of_all(self.communicator, self.weights)

    def own_state(self) -> dict[str, Any]:
        """More state of this worker for checkpoints: tensors and plain values."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore `own_state`."""

    # Services for strategies.

    @property
    def weights(self) -> list[Tensor]:
        """This worker's own weights. They may be changed in place."""
        return [parameter.detach() for parameter in self._names.values()]

    def note_consensus(self, agreed: Sequence[Tensor], own: Sequence[Tensor] | None = None) -> None:
        """Record the root mean square distance of the workers from `agreed`. Every worker calls it."""
        own = self.weights if own is None else own
        self.stats.consensus = math.sqrt(self.communicator.mean(squared_distance(own, agreed)))

    def set_weights(self, values: Sequence[Tensor]) -> None:
        """Replace this worker's weights."""
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    # The contract of `StrategyRun`.

    def join_idle(self) -> bool:
        return self.sync(active=False) > 0

    def settle_uneven(self) -> None:
        self.uneven.settle_local_weights()

    @property
    def counted_steps(self) -> int:
        """The rounds: the steps of a lost worker since the last one are lost with it."""
        return self.rounds

    def share_steps(self, missed: int) -> None:
        self.uneven.share_rates()

    def shown_tensors(self) -> dict[str, Tensor]:
        return {**super().shown_tensors(), **{name: each.detach() for name, each in self._names.items()}}

    def show_agreed(self) -> None:
        self.set_weights(self.model_of_all())
        super().show_agreed()

    def restart(self) -> None:
        self.rounds, self.same_size = 0, True
        broadcast_tensors(self.communicator, self.weights)

    def shared_state(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "workers": self.communicator.size}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self.rounds = int(state.get("rounds", 0))
        self.same_size = int(state.get("workers", 0)) == self.communicator.size

    def local_state(self) -> dict[str, Any]:
        refuse_inside_agreed(self)
        return {
            "weights": {name: each.detach().clone() for name, each in self._names.items()},
            "optimizer": optimizer_state(self.optimizer, self._names),
            "own": self.own_state(),
        }

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """A worker that the checkpoint does not know begins with the model of all workers.

        If the number of workers has changed, every worker does, because the mean of the remaining ones is different.
        """
        if not states:
            return
        own = states[0]
        load_optimizer_state(self.optimizer, self._names, own["optimizer"])
        if self.same_size:
            parameters = {plain_name(name): each.detach() for name, each in self.model.named_parameters()}
            for name, value in own["weights"].items():
                parameters[name].copy_(value)
            self.load_own_state(own["own"])

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.settings.check_finite:
            check_gradients(self)
        if self.alone:
            return
        # A fused optimizer reports skipped steps.
        if self.needs_every_step and not hasattr(optimizer, "found_inf") and called_by_grad_scaler():
            raise IncompatibleError(
                f"{self.strategy!r} with a GradScaler: the scaler may skip a step on one worker only, and the workers "
                "would no longer be in the same round. Give the optimizer fused=True, train in bfloat16 without a "
                "scaler, or take strategy allreduce"
            )
        self.check_closure(kwargs.get("closure", args[1] if len(args) > 1 else None))  # the optimizer comes first
        self.before_step()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stats.steps += 1
        self.note_reduction()
        if not self.alone:
            with torch.no_grad():
                self.after_step()


class AveragingRun(LocalWeightsRun):
    """A run whose rounds are all-reductions, with the run's collective and codec."""

    def setup(self) -> None:
        super().setup()
        self.deltas = DeltaReducer(self.model, self.communicator, self.settings)

    @property
    def counted_steps(self) -> int:
        """The reductions: a round may be interrupted after its reduction is complete."""
        return self.deltas.completed

    @property
    def epoch_needs_round(self) -> bool:
        """In an elastic job: batches since the last round could not be distributed again after their epoch."""
        return self.world.elastic is not None and self.has_untrained_batches

    def use_team(self) -> None:
        self.deltas.rebind()

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


class DeltaReducer(RunReducer):
    """Averages tensors of the parameters' shapes, with the run's collective and codec, in buckets like gradients.

    `reduce` overwrites its tensors, one for each trained parameter. It and `finish` may be several steps apart: the
    reduction runs in between.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, settings: RunSettings, wide: bool = False) -> None:
        """`wide`: the tensors are float32 where the model is in half precision."""
        # Separate parameters for the gradients; they share the model's memory.
        shadows = {
            name: nn.Parameter(each.detach().to(wide_dtype(each.dtype)) if wide else each.detach())
            for name, each in trained(model).items()
        }
        super().__init__(
            shadows,
            communicator,
            settings,
            ReductionPolicy(subject="changes of the weights"),
            codec=communicator.codec if communicator.size > 1 or communicator.world.elastic is not None else None,
            attach_hooks=False,
        )

    def prepare(self) -> None:
        """Choose the algorithms now. It takes seconds, which the first round then does not need."""
        if self.communicator.size > 1 and self.elastic is None:
            self.lay_out()

    def finish(self, reduction: ReductionPass) -> tuple[list[Tensor], int]:
        """The means, valid until the next reduction, and how many workers are active.

        If all weights are 0, the means are zero.
        """
        control = reduction.complete()
        reduction.install()
        means = []
        for shadow in self.parameters:
            means.append(torch.zeros_like(shadow) if shadow.grad is None else shadow.grad.detach())
            shadow.grad = None
        self.release(reduction)
        return means, control.active

    def forget(self) -> None:
        """Drop the codec's residuals: the next tensors are of another kind."""
        if self.codec_state is not None:
            self.codec_state.load_shared_state({"step": self.codec_state.step})
            self.codec_state.load([])


def squared_distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """‖one − other‖², in double precision."""
    return sum(float((left - right).double().square().sum()) for left, right in zip(one, other, strict=True))


def refuse_inside_agreed(run: StrategyRun) -> None:
    """Refuse to save a worker's own weights inside `agreed()`, where the model holds others."""
    if run.inside_agreed:
        raise IncompatibleError("save a run outside agreed(): inside, a worker's own weights are put aside")


def optimizer_state(optimizer: Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """A copy of the optimizer's state of each parameter, by the parameter's name."""
    return {
        name: {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[each].items()
        }
        for name, each in names.items()
        if each in optimizer.state
    }


def load_optimizer_state(
    optimizer: Optimizer, names: Mapping[str, nn.Parameter], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore `optimizer_state`. The state of a parameter that was not saved is removed."""
    for name, each in names.items():
        optimizer.state.pop(each, None)
        if name in saved:
            optimizer.state[each] = {
                key: value.to(each.device if value.dim() else value.device, copy=True)
                if isinstance(value, Tensor)
                else value
                for key, value in saved[name].items()
            }
