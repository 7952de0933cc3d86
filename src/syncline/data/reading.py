"""Reads the batches that a plan names through a DataLoader like the user's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info

from syncline.data.plan import mixed
from syncline.data.randomness import reseed
from syncline.errors import IncompatibleError

__all__ = ["Reader", "like"]

N = TypeVar("N")

Lot = tuple[N, list[Any], tuple[int, ...]]
"""A note that comes back with the batch, the samples of the batch, and what seeds the drawing of who reads them."""


class Reader(Generic[N]):
    """One DataLoader for all epochs, so that its processes live on where they are to.

    Batches that a loader's process makes draw from a seed of their own: they are the same in a run that was resumed,
    where another process makes them. Without processes the dataset draws from the program's own state, which a
    checkpoint keeps.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._feed: _Feed[N] = _Feed(seeded=loader.num_workers > 0)
        self._generator = torch.Generator()
        dataset = _Seeded(loader.dataset) if loader.num_workers else loader.dataset
        self._loader = like(loader, dataset, generator=self._generator, batch_sampler=self._feed)

    def read(self, lots: Iterator[Lot[N]], seed: int) -> Iterator[tuple[N, Any]]:
        """Each lot's note and its batch, in order."""
        notes = self._feed.begin(lots)
        # The loader draws a number for its processes at each epoch: not from the program's own generator.
        self._generator.manual_seed(seed)
        for batch in self._loader:
            if not self._feed.feeds(notes) and self._loader.persistent_workers:
                raise IncompatibleError(
                    "a loop over this loader goes on after another one has begun, and with persistent_workers=True its "
                    "processes serve one loop at a time: end the first loop before, or leave persistent_workers out"
                )
            yield notes.popleft(), batch


def like(loader: DataLoader[Any], dataset: Any, **changed: Any) -> DataLoader[Any]:
    """A DataLoader over `dataset` with all that `loader` was told, but for what is changed."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.pin_memory_device:
        settings["pin_memory_device"] = loader.pin_memory_device
    if loader.num_workers:
        settings |= {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "worker_init_fn": _Init(loader.dataset, loader.worker_init_fn),
        }
    return DataLoader(dataset, **(settings | changed))


class _Feed(Generic[N]):
    """The batch sampler: gives the loader the samples, and keeps the notes until the batches come."""

    def __init__(self, seeded: bool) -> None:
        self._seeded = seeded
        self._lots: Iterator[Lot[N]] = iter(())
        self._notes: deque[N] = deque()

    def begin(self, lots: Iterator[Lot[N]]) -> deque[N]:
        self._lots, self._notes = lots, deque()
        return self._notes

    def feeds(self, notes: deque[N]) -> bool:
        """Whether these are the notes of the latest iteration."""
        return notes is self._notes

    def __iter__(self) -> Iterator[list[Any]]:
        # Bound now: a loop that was left in the middle must not add its notes to the next one's.
        return self._given(self._lots, self._notes)

    def _given(self, lots: Iterator[Lot[N]], notes: deque[N]) -> Iterator[list[Any]]:
        for note, indices, key in lots:
            notes.append(note)
            yield _Indices(indices, key) if self._seeded else indices


class _Indices(list[Any]):
    """The samples of a batch, and what seeds their reading, on the way to a loader's process."""

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key


class _Seeded:
    """A map-style dataset in a loader's process, which begins its random numbers anew for each batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: _Indices) -> Any:
        reseed(mixed(*indices.key))
        several = getattr(self._dataset, "__getitems__", None)
        return several(list(indices)) if several else [self._dataset[index] for index in indices]


class _Init:
    """What a loader's process does first: show the user's code the user's dataset, not our wrapper around it."""

    def __init__(self, dataset: Any, then: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._then = then

    def __call__(self, number: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", self._dataset)  # torch lets nobody change it afterwards
        if self._then is not None:
            self._then(number)
