"""State that is committed, restored and sent to all: the contract, and the one for plain objects."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from syncline.compat.horovod.errors import HostsUpdatedInterrupt
from syncline.errors import SpecError

__all__ = ["ADDED", "REMOVED", "ObjectState", "State"]

REMOVED, ADDED = 1, 2
"""What may have become of hosts, as Horovod tells it: bits."""


class State:
    """What a training holds in memory. Made for inheriting: `save`, `restore` and `sync` are the subclass's.

    `bcast_object` gives every rank what rank 0 has, and `get_rank` tells who this one is.

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
        """Call these after each reset, in this order: to set anew what depends on the number of workers."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """All ranks have met again."""
        self._messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = ADDED) -> None:
        """Note that hosts have changed. Nothing here calls it: the hosts of a run are fixed when it is started."""
        self._messages.append((timestamp, update_res))

    def commit(self) -> None:
        """Save, then look whether hosts have changed. Every rank calls it at the same step."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on every rank where rank 0 has been told of other hosts. All ranks call it."""
        before, latest, what = self._updated, self._updated, 0
        while self._messages:
            timestamp, update = self._messages.popleft()
            if timestamp > latest:
                latest, what = timestamp, what | update
        before, self._updated, what = self._bcast_object((before, latest, what))
        if self._updated > before:
            raise HostsUpdatedInterrupt(skip_sync=what == REMOVED)

    def save(self) -> None:
        """Keep a copy of what is there."""
        raise NotImplementedError(f"{type(self).__name__} has to say what is saved: define save()")

    def restore(self) -> None:
        """Go back to the copy that was saved last."""
        raise NotImplementedError(f"{type(self).__name__} has to say what is restored: define restore()")

    def sync(self) -> None:
        """Give every rank what rank 0 has."""
        raise NotImplementedError(f"{type(self).__name__} has to say what is sent to all: define sync()")

    def reset(self) -> None:
        """Set anew what depends on who is there; called before the callbacks."""


class ObjectState(State):
    """Plain values as attributes, each given as a keyword.

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
            refuse_taken(self, name)
        self._saved = copy.deepcopy(kwargs)
        self.__dict__.update(kwargs)

    def save(self) -> None:
        # Copies: a list that is appended to would else change in the commit too.
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        self.__dict__.update(copy.deepcopy(self._saved))

    def sync(self) -> None:
        # What is there now, not the last commit: after an interrupt nothing is to be lost, and after an error
        # the two are the same.
        if self._saved:
            self._saved = self._bcast_object({name: getattr(self, name) for name in self._saved})
            self.restore()


def refuse_taken(state: State, name: str) -> None:
    """Refuse a value whose name is a method's: it would hide the method."""
    if hasattr(type(state), name):
        raise SpecError(f"{name}=…: {type(state).__name__} has a method {name}(); give the value another name")
