"""The learning-rate schedulers of an optimizer: a worker that runs out of data first misses some of their steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from syncline.errors import IncompatibleError

__all__ = ["Schedulers"]


class Schedulers:
    """The schedulers named in `distribute`, and PyTorch's own that are attached to the optimizer.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    >>> schedulers = Schedulers(optimizer, named=())
    >>> schedulers.begin_epoch()
    >>> schedulers.known == [scheduler]
    True
    """

    def __init__(self, optimizer: Optimizer, named: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._named = list(named)
        self._found: list[weakref.ref[LRScheduler]] = []
        self._counts: list[tuple[LRScheduler, int]] = []
        """Schedulers that may be stepped after every batch, with their step count at the start of the epoch."""

    @property
    def known(self) -> list[Any]:
        """All of them, in the same order on every rank."""
        return [*self._named, *(each for each in (found() for found in self._found) if each is not None)]

    def begin_epoch(self) -> None:
        """An epoch begins in which some ranks may miss steps: find schedulers that were not named."""
        named = any(getattr(each, "optimizer", None) is self._optimizer for each in self._named)
        attached = any("initial_lr" in group for group in self._optimizer.param_groups)
        if attached and not named and not (self._found and all(found() is not None for found in self._found)):
            self._found = [weakref.ref(each) for each in _find(self._optimizer)]
        stepped = (each for each in self.known if isinstance(each, LRScheduler))
        self._counts = [(each, _steps(each)) for each in stepped if not isinstance(each, ReduceLROnPlateau)]

    def step_missed(self, taken: int, missed: int) -> None:
        """Catch up with ranks that took `missed` more steps, for schedulers that are stepped after every batch."""
        for scheduler, before in self._counts:
            if taken and _steps(scheduler) - before == taken:
                for _ in range(missed):
                    scheduler.step()


def _steps(scheduler: Any) -> int:
    """How often it was stepped; one that chains others counts as they do."""
    inner = getattr(scheduler, "_schedulers", None)
    return int(scheduler.last_epoch) if hasattr(scheduler, "last_epoch") or not inner else _steps(inner[0])


def _find(optimizer: Optimizer) -> list[LRScheduler]:
    """The schedulers that hold this optimizer, which does not know them itself.

    Those that belong to another one, such as SequentialLR's, are part of its state.
    """
    found: list[LRScheduler] = []
    for holder in gc.get_referrers(optimizer):
        inside = type(holder) is dict and holder.get("optimizer") is optimizer
        owners = gc.get_referrers(holder) if inside else [holder]
        found += [each for each in owners if issubclass(type(each), LRScheduler) and each.optimizer is optimizer]
    inner = {id(each) for one in found for each in getattr(one, "_schedulers", ())}
    outer = {id(each): each for each in found if id(each) not in inner}
    kinds = sorted(outer.values(), key=lambda each: type(each).__qualname__)
    names = [type(each).__qualname__ for each in kinds]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise IncompatibleError(
            f"{names.count(twice)} schedulers of the kind {twice} are attached to the optimizer, and this data may end "
            "earlier on some workers than on others, who then take over the schedulers' state: name all of them in "
            "distribute(schedulers=[…]), in the same order on every worker"
        )
    return kinds
