"""The state of a PyTorch training: models, optimizers, schedulers and samplers, each in its own way."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import torch

from syncline.compat.horovod.context import context
from syncline.compat.horovod.elastic.sampler import ElasticSampler
from syncline.compat.horovod.elastic.state import ObjectState, refuse_taken
from syncline.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = ["Handler", "TorchState", "handler_for"]

T = TypeVar("T")


class Handler(Generic[T]):
    """How one kind of object is saved, restored and sent to all: here by its state dict."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.saved = self.taken()

    def taken(self) -> Any:
        """A copy of its state, which no later step changes."""
        return copy.deepcopy(self.value.state_dict())  # type: ignore[attr-defined]

    def save(self) -> None:
        self.saved = self.taken()

    def restore(self) -> None:
        # A copy again: optimizers go on to work on the very tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(self.saved))  # type: ignore[attr-defined]

    def send(self) -> None:
        """Give every rank what rank 0 has."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))  # type: ignore[attr-defined]

    def sync(self) -> None:
        self.send()
        self.saved = self.taken()

    def reset(self) -> None:
        """All ranks have met again, in a new world."""


class ModelHandler(Handler[torch.nn.Module]):
    """A model."""

    def send(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerHandler(Handler[torch.optim.Optimizer]):
    """An optimizer."""

    def send(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        # A distributed one joins the new world at its first call there, with all ranks: here, where they all are.
        passes = getattr(self.value, "backward_passes_per_step", None)
        if passes is not None:
            self.value.set_backward_passes_per_step(passes)  # type: ignore[attr-defined]


class SamplerHandler(Handler[ElasticSampler]):
    """A sampler: each rank knows of its own samples only."""

    def save(self) -> None:
        self.saved = self._gathered()

    def send(self) -> None:
        # First what all of them have done: after an interrupt it must not be lost.
        state = broadcast_object(self._gathered(), root_rank=0)
        self.value.load_state_dict(state)

    def reset(self) -> None:
        self.value.reset()

    def _gathered(self) -> dict[str, Any]:
        state = self.value.state_dict()
        done = allgather_object(state["processed_indices"])
        return {**state, "processed_indices": sorted(set().union(*done))}


def handler_for(value: object) -> Handler[Any] | None:
    """The one that knows how to treat `value`; None for a plain value."""
    if isinstance(value, torch.nn.Module):
        return ModelHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerHandler(value)
    if isinstance(value, ElasticSampler):
        return SamplerHandler(value)
    if isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
        return Handler(value)
    return None


class TorchState(ObjectState):
    """The state of a training: a model, an optimizer, and whatever else is given as a keyword, as attributes.

    Models, optimizers, schedulers and `ElasticSampler`s are saved by their state dicts; anything else as a plain value.

    >>> import syncline as sl, syncline.compat.horovod.torch as hvd
    >>> def train(world):
    ...     hvd.init()
    ...     model = torch.nn.Linear(1, 1)
    ...     state = hvd.elastic.TorchState(model=model, epoch=world.rank)
    ...     state.sync()
    ...     return state.epoch
    >>> sl.simulate(train, ranks=2).results
    (0, 0)
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: handler_for(value) for name, value in given.items()}
        self._handlers: dict[str, Handler[Any]] = {name: one for name, one in handlers.items() if one is not None}
        for name, handler in self._handlers.items():
            refuse_taken(self, name)
            self.__dict__[name] = handler.value
        plain = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=lambda: context().world.rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        # A new model in the place of the old one is what is saved from now on.
        if name in self.__dict__.get("_handlers", {}):
            handler = handler_for(value)
            if handler is None:
                raise TypeError(f"state.{name} was a {type(self._handlers[name].value).__name__}, not {value!r}")
            self._handlers[name] = handler
        super().__setattr__(name, value)
