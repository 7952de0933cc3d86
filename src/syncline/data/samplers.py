"""In which order a loader's sampler reads: our own shuffle, or what the sampler draws, alike on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from syncline.data.plan import Take, mixed, order
from syncline.data.randomness import Randomness
from syncline.errors import IncompatibleError

__all__ = ["Order", "length_of", "order_of", "refuse_distributed"]


class Order(Protocol):
    """The samples (or batches) of an epoch, one after the other, the same on every rank."""

    length: int | None
    """How many there are; None where that shows only at the end."""

    def begin(self, epoch: int) -> Take:
        """What gives the next n of them."""
        ...


class OwnOrder:
    """Every sample once, shuffled from the seed or as they lie."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self.length: int | None = length
        self._count = length
        self._seed = seed
        self._shuffle = shuffle

    def begin(self, epoch: int) -> Take:
        samples = iter(order(self._count, self._seed, epoch, self._shuffle))
        return lambda count: list(islice(samples, count))


class DrawnOrder:
    """What a sampler of the user's draws, under a random state that all ranks have in common."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self.length = length_of(sampler)

    def begin(self, epoch: int) -> Take:
        randomness = Randomness(mixed(self._seed, epoch), _generators(self._sampler))
        with randomness.used():
            samples: Iterator[Any] = iter(self._sampler)

        def take(count: int) -> list[Any]:
            with randomness.used():
                return list(islice(samples, count))

        return take


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    """The order in which a loader over a map-style dataset reads its samples, or its batch sampler's batches."""
    if loader.batch_size is None:
        assert loader.batch_sampler is not None
        return DrawnOrder(loader.batch_sampler, seed)
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return OwnOrder(len(sampler), seed, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return OwnOrder(len(sampler), seed, shuffle=True)
    return DrawnOrder(sampler, seed)


def refuse_distributed(loader: DataLoader[Any]) -> None:
    """A loader that shares out already would leave every rank with a share of its share."""
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise IncompatibleError(
                f"the loader has a DistributedSampler (rank {sampler.rank} of {sampler.num_replicas}), and run.shard "
                "shares out too: make the loader without a sampler (shuffle=True is kept), or pass split=False"
            )


def _generators(sampler: object) -> list[torch.Generator]:
    inner = sampler.sampler if isinstance(sampler, BatchSampler) else None
    found = (getattr(each, "generator", None) for each in (sampler, inner))
    return [each for each in dict.fromkeys(found) if isinstance(each, torch.Generator)]


def length_of(data: object) -> int | None:
    """How long data is, where it says so."""
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
