"""Horovod's elastic training: state that is committed and restored.

```text
hvd.elastic.run(train)(state)
   sync ──► train(state) ──► its result
    ▲          ├─ HorovodInternalError: restore the last commit ─┐
    │          └─ HostsUpdatedInterrupt: keep the current state ─┤
    └── reset callbacks ◄── shutdown and init on all ranks ◄─────┘   new workers enter here, at their own init()
```

In a job with a fixed number of workers a lost one ends the training. In an elastic job (`horovodrun --min-np`, or
`syncline run --elastic`) the others form the next team at the reset (`ElasticMember.form_next`).
"""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import torch

from syncline.compat.horovod.context import context, is_initialized, reset
from syncline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from syncline.compat.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from syncline.errors import PeerLostError, ProtocolError, SpecError, SynclineError

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

REMOVED, ADDED = 1, 2
"""Horovod's bits for changes of hosts."""


class State:
    """The state of a training in memory. A subclass defines `save`, `restore` and `sync`.

    `bcast_object` broadcasts an object from rank 0, and `get_rank` returns the rank of this process.

    >>> class Counter(State):
    ...     def save(self): self.saved = self.steps
    ...     def restore(self): self.steps = self.saved
    ...     def sync(self): self.steps = self.saved = self._bcast_object(self.steps)
    >>> state = Counter(bcast_object=lambda value: value, get_rank=lambda: 0)
    >>> state.steps = 3
    >>> state.commit()
    >>> state.steps = 4
    >>> state.restore()
    >>> state.steps
    3
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], object]] = []
        self._messages: deque[tuple[float, int]] = deque()
        self._updated = 0.0
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call these functions after each reset, in this order, for values that depend on the number of workers."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after all ranks have joined again."""
        self._messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = ADDED) -> None:
        """Record a change of hosts: workers were added, or some must leave."""
        self._messages.append((timestamp, update_res))

    def commit(self) -> None:
        """Save, then check for changes of hosts. Every rank calls it at the same step."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on every rank if rank 0 has a record of changed hosts. All ranks call it.

        In an elastic job rank 0 also asks whether new workers wait, and whether some must leave.
        """
        change = _requested_change()
        if change:  # a number that only grows: the clock of the next rank 0 may be another
            self.on_hosts_updated(self._updated + 1, change)
        before, latest, what = self._updated, self._updated, 0
        while self._messages:
            timestamp, update = self._messages.popleft()
            if timestamp > latest:
                latest, what = timestamp, what | update
        before, self._updated, what = self._bcast_object((before, latest, what))
        if self._updated > before:
            raise HostsUpdatedInterrupt(skip_sync=what == REMOVED)

    def save(self) -> None:
        """Save a copy of the current state."""
        raise NotImplementedError(f"{type(self).__name__} must define save()")

    def restore(self) -> None:
        """Restore the copy that was saved last."""
        raise NotImplementedError(f"{type(self).__name__} must define restore()")

    def sync(self) -> None:
        """Broadcast the state of rank 0 to every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define sync()")

    def reset(self) -> None:
        """Update values that depend on the ranks. Called before the callbacks."""


class ObjectState(State):
    """Plain values as attributes, one for each keyword argument.

    >>> state = ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0, epoch=0, losses=[])
    >>> state.losses.append(0.5)
    >>> state.restore()
    >>> state.epoch, state.losses
    (0, [])
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        for name in kwargs:
            check_name(self, name)
        self._saved = copy.deepcopy(kwargs)
        self.__dict__.update(kwargs)

    def save(self) -> None:
        # Copies, because a later append to a list would change the commit too.
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        self.__dict__.update(copy.deepcopy(self._saved))

    def sync(self) -> None:
        # The current values, not the last commit: after an interrupt nothing may be lost, and after an error both are
        # equal.
        if self._saved:
            self._saved = self._bcast_object({name: getattr(self, name) for name in self._saved})
            self.restore()


def _requested_change() -> int:
    """On rank 0 of an elastic job: Horovod's bits for new workers that wait and for workers that must leave."""
    world = context().world if is_initialized() else None
    if world is None or world.elastic is None or world.rank != 0:
        return 0
    added, removed = world.elastic.has_pending_change()
    return ADDED * added | REMOVED * removed


def check_name(state: State, name: str) -> None:
    """Raise for a value whose name is the name of a method."""
    if hasattr(type(state), name):
        raise SpecError(f"{name}=…: {type(state).__name__} has a method {name}(); give the value another name")


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the indices of a dataset among ranks. Samples that were recorded as done do not come again in the epoch.

    Record each batch with `record_batch` (every rank does, with the same size), or the samples with
    `record_indices`; call `set_epoch` at the end of an epoch, not at its beginning. As part of a `TorchState` its
    progress is committed and restored with the rest. All ranks get the same number of samples: a few come twice
    if the samples do not divide evenly.

    >>> import syncline as sl, syncline.compat.horovod.torch as hvd
    >>> def shares(world):
    ...     hvd.init()
    ...     sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    ...     sampler.record_batch(0, batch_size=2)
    ...     sampler.reset()
    ...     return list(sampler)
    >>> sl.simulate(shares, ranks=2).results
    ([4, 6, 8], [5, 7, 9])
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """Samples of all ranks that `record_batch` has counted."""
        self.processed_indices: set[int] = set()
        """Samples of this rank that `record_indices` has recorded."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: a new order, and no sample is done."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that a batch of this size is done on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that these samples are done on this rank."""
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank, by its number since the last reset."""
        return self._mine()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The progress of this rank as plain values, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state. States of older and newer releases of Horovod are read too."""
        self.epoch = int(state_dict["epoch"])
        self.processed_num = int(state_dict.get("processed_num", 0))
        self.processed_indices = {int(index) for index in state_dict.get("processed_indices", ())}
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        world = context().world
        self.rank, self.num_replicas = world.rank, world.size
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        # First remove recorded indices, then the count, which refers to what is left.
        left = [index for index in order if index not in self.processed_indices]
        self.remaining_indices = left[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine())

    def __len__(self) -> int:
        return self.num_samples

    def _mine(self) -> list[int]:
        even = islice(cycle(self.remaining_indices), self.total_size)
        return list(islice(even, self.rank, None, self.num_replicas))


T = TypeVar("T")


class StateHandler(Generic[T]):
    """Saves, restores and broadcasts one object by its state dict."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.saved = self.copy_state()

    def copy_state(self) -> Any:
        """A copy of its state, which later steps do not change."""
        return copy.deepcopy(self.value.state_dict())  # type: ignore[attr-defined]

    def save(self) -> None:
        self.saved = self.copy_state()

    def restore(self) -> None:
        # A copy again, because optimizers modify the tensors that they load.
        self.value.load_state_dict(copy.deepcopy(self.saved))  # type: ignore[attr-defined]

    def send(self) -> None:
        """Broadcast the state of rank 0 to every rank."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))  # type: ignore[attr-defined]

    def sync(self) -> None:
        self.send()
        self.saved = self.copy_state()

    def reset(self) -> None:
        """Called after all ranks have joined a new world."""


class ModelHandler(StateHandler[torch.nn.Module]):
    """A model."""

    def send(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerHandler(StateHandler[torch.optim.Optimizer]):
    """An optimizer."""

    def send(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        # A distributed optimizer joins the new world at its first call, on all ranks at once: here.
        passes = getattr(self.value, "backward_passes_per_step", None)
        if passes is not None:
            self.value.set_backward_passes_per_step(passes)  # type: ignore[attr-defined]


class SamplerHandler(StateHandler[ElasticSampler]):
    """A sampler. Each rank knows only its own samples."""

    def save(self) -> None:
        self.saved = self._gathered()

    def send(self) -> None:
        # First gather the progress of all ranks, which must not be lost after an interrupt.
        state = broadcast_object(self._gathered(), root_rank=0)
        self.value.load_state_dict(state)

    def reset(self) -> None:
        self.value.reset()

    def _gathered(self) -> dict[str, Any]:
        state = self.value.state_dict()
        done = allgather_object(state["processed_indices"])
        return {**state, "processed_indices": sorted(set().union(*done))}


def handler_for(value: object) -> StateHandler[Any] | None:
    """The handler for an object; None for a plain value."""
    if isinstance(value, torch.nn.Module):
        return ModelHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerHandler(value)
    if isinstance(value, ElasticSampler):
        return SamplerHandler(value)
    if isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
        return StateHandler(value)
    return None


class TorchState(ObjectState):
    """The state of a training: a model, an optimizer and other keyword arguments, as attributes.

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
        self._handlers: dict[str, StateHandler[Any]] = {name: one for name, one in handlers.items() if one is not None}
        for name, handler in self._handlers.items():
            check_name(self, name)
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
        # A new model replaces the old one and is saved from now on.
        if name in self.__dict__.get("_handlers", {}):
            handler = handler_for(value)
            if handler is None:
                raise TypeError(f"state.{name} was a {type(self._handlers[name].value).__name__}, not {value!r}")
            self._handlers[name] = handler
        super().__setattr__(name, value)


logger = logging.getLogger("syncline")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

LOSS_WAIT_S = 2.0
"""Seconds within which all ranks know of a lost rank; heartbeats report it twice a second."""
POLL_EVERY_S = 0.05
ALIVE_REASONS = ("it has closed its world", "it is alive")
"""The beginning of the transport's reasons for ranks that are alive and may come back."""
MAX_FAILURES = 3
"""Failures in a row without a commit, after which training does not continue."""


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training `func(state, …)` that continues from the last commit after a failed operation.

    After a `HorovodInternalError`, the state is restored, all ranks call shutdown and init, the reset callbacks run,
    rank 0's state is broadcast, and `func` is called again. After a `HostsUpdatedInterrupt` it is the same without the
    restore. In an elastic job it continues with the workers that are left and with new ones. Otherwise a lost worker is
    not replaced: then the state is that of the last commit, and the error is raised.

    >>> import syncline as sl, syncline.compat.horovod.torch as hvd
    >>> def main(world):
    ...     hvd.init()
    ...     state = hvd.elastic.TorchState(epoch=0, calls=0)
    ...     return train(state)
    >>> @run
    ... def train(state):
    ...     state.epoch += 1
    ...     if state.epoch == 1:
    ...         state.commit()
    ...         state.epoch += 10
    ...         raise hvd.HorovodInternalError("an operation failed")
    ...     return state.epoch
    >>> sl.simulate(main, ranks=2).results
    (2, 2)
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        interrupted = skip_sync = False
        failures = commits = 0
        while True:
            try:
                if interrupted:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except (HorovodInternalError, PeerLostError, ProtocolError) as error:
                if not isinstance(error, HorovodInternalError) and not _is_elastic():
                    raise
                if is_initialized():
                    context().leave(str(error))  # at once, because other ranks may wait for this one
                state.restore()
                failures = failures + 1 if state._commits == commits else 1
                commits = state._commits
                _check_can_continue(error, failures)
                logger.warning("an operation failed, training continues from the last commit: %s", error)
                failures = 0 if _rejoin(error) else failures
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                _rejoin(interrupt)
                skip_sync = interrupt.skip_sync
            interrupted = True

    return wrapper  # type: ignore[return-value]  # it takes `state` by name too, as Horovod's does


def _is_elastic() -> bool:
    return is_initialized() and context().world.elastic is not None


def _check_can_continue(error: SynclineError, failures: int) -> None:
    gone = {} if _is_elastic() else _lost_ranks()
    if gone:
        logger.error("%s; %s", "; ".join(f"rank {rank} is gone ({why})" for rank, why in gone.items()), _ADVICE)
        raise error
    if failures >= MAX_FAILURES:
        logger.error("%d failures without a commit between them: training does not try again", failures)
        raise error


_ADVICE = (
    "it is not replaced, so training ends here. The state of this rank is that of the last commit; save checkpoints to "
    "files besides commits, and start the run again from the last one"
)


def _lost_ranks() -> dict[int, str]:
    """The lost ranks with the reasons. Ranks learn of a loss at different times, so this waits for a while."""
    if not is_initialized():
        return {}
    world = context().world
    until = world.runtime.now() + LOSS_WAIT_S
    while True:
        gone = {rank: why for rank, why in world.lost.items() if not why.startswith(ALIVE_REASONS)}
        if gone or world.runtime.now() >= until:
            return gone
        world.runtime.sleep(POLL_EVERY_S)


def _rejoin(why: Exception) -> bool:
    """Leave the world and join it again, on all ranks, within the world's timeout. Returns whether its size changed."""
    before = context().world.size if is_initialized() else 0
    try:
        reset()
    except SynclineError as error:
        logger.error("the ranks did not join again after %s: %s; %s", type(why).__name__, error, _ADVICE)
        raise why from error
    return context().world.size != before
