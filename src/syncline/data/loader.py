"""Reads given batches through a DataLoader with the user's options, and moves batches to a device."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info

from syncline.data.order import reseed
from syncline.data.partition import mix_seeds
from syncline.errors import IncompatibleError

__all__ = ["BatchReader", "BatchRequest", "loader_like", "move"]

N = TypeVar("N")

BatchRequest = tuple[N, list[Any], tuple[int, ...]]
"""A tag that is returned with the batch, the indices of the batch, and the numbers that seed its reading."""


class BatchReader(Generic[N]):
    """One DataLoader for all epochs, so that persistent workers live on.

    A worker process of the loader seeds its generators for each batch, so that a resumed run reads the same batches.
    Without worker processes the dataset draws from the program's own state, which a checkpoint stores.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._sampler: _RequestSampler[N] = _RequestSampler(seeded=loader.num_workers > 0)
        self._generator = torch.Generator()
        dataset = _SeededDataset(loader.dataset) if loader.num_workers else loader.dataset
        self._loader = loader_like(loader, dataset, generator=self._generator, batch_sampler=self._sampler)

    def read(self, requests: Iterator[BatchRequest[N]], seed: int) -> Iterator[tuple[N, Any]]:
        """Read the requested batches, in order, each with its tag."""
        tags = self._sampler.begin(requests)
        # The loader draws a seed for its workers at each epoch, from this generator instead of the program's.
        self._generator.manual_seed(seed)
        for batch in self._loader:
            if not self._sampler.serves(tags) and self._loader.persistent_workers:
                raise IncompatibleError(
                    "a loop over this loader continues after another one has started, and with persistent_workers=True "
                    "its processes serve one loop at a time: end the first loop before, or leave persistent_workers out"
                )
            yield tags.popleft(), batch


def loader_like(loader: DataLoader[Any], dataset: Any, **changed: Any) -> DataLoader[Any]:
    """A DataLoader over `dataset` with the options of `loader`, except for `changed`."""
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
            "worker_init_fn": _WorkerInit(loader.dataset, loader.worker_init_fn),
        }
    return DataLoader(dataset, **(settings | changed))


class _RequestSampler(Generic[N]):
    """The loader's batch sampler: passes on the indices, and holds the tags until the batches come."""

    def __init__(self, seeded: bool) -> None:
        self._seeded = seeded
        self._requests: Iterator[BatchRequest[N]] = iter(())
        self._tags: deque[N] = deque()

    def begin(self, requests: Iterator[BatchRequest[N]]) -> deque[N]:
        self._requests, self._tags = requests, deque()
        return self._tags

    def serves(self, tags: deque[N]) -> bool:
        """Whether these are the tags of the latest iteration."""
        return tags is self._tags

    def __iter__(self) -> Iterator[list[Any]]:
        # Bound now: a loop that was left early must not add its tags to those of the next loop.
        return self._iterate(self._requests, self._tags)

    def _iterate(self, requests: Iterator[BatchRequest[N]], tags: deque[N]) -> Iterator[list[Any]]:
        for tag, indices, key in requests:
            tags.append(tag)
            yield _Indices(indices, key) if self._seeded else indices


class _Indices(list[Any]):
    """The indices of a batch and its seed, sent to a worker process of the loader."""

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key


class _SeededDataset:
    """A map-style dataset in a worker process, which seeds its generators for each batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: _Indices) -> Any:
        reseed(mix_seeds(*indices.key))
        several = getattr(self._dataset, "__getitems__", None)
        return several(list(indices)) if several else [self._dataset[index] for index in indices]


class _WorkerInit:
    """The start of a worker process: `get_worker_info()` shows the user's dataset, not our wrapper."""

    def __init__(self, dataset: Any, then: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._then = then

    def __call__(self, number: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", self._dataset)  # torch forbids a plain assignment
        if self._then is not None:
            self._then(number)


def move(batch: Any, device: torch.device | str) -> Any:
    """Move every tensor in the batch's tuples, lists and dicts to `device`. For the CPU it is the same object.

    Loaders return batches on the CPU. An object with a `to` method moves itself; other objects stay as they are.

    >>> x, names = move((torch.ones(2), ["a", "b"]), "meta")
    >>> x.device.type, names
    ('meta', ['a', 'b'])
    """
    device = torch.device(device)
    return batch if device.type == "cpu" else _moved(batch, device)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        # A copy overlaps with computing only from pinned memory.
        return batch.to(device, non_blocking=batch.device.type == "cpu" and batch.is_pinned())
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # a subclass keeps its other attributes
        for key, value in batch.items():
            moved[key] = _moved(value, device)
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(each, device) for each in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(each, device) for each in batch)
    return batch
