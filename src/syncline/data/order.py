"""The order in which a loader reads its samples, the same on every rank, and the random state for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from syncline.data.partition import Take, epoch_order, mix_seeds
from syncline.errors import IncompatibleError

__all__ = ["CommonRandomState", "Order", "length_of", "order_of", "refuse_distributed", "reseed"]


@dataclass(frozen=True)
class Order:
    """The sequence of samples (or batches) of an epoch, the same on every rank."""

    length: int | None
    """The number of items; None if it is unknown before the end."""
    begin: Callable[[int], Take]
    """Starts an epoch. Returns a function for the next n items."""


def _seeded_order(length: int, seed: int, shuffle: bool) -> Order:
    """Every sample once, shuffled by the seed or in the order of the dataset."""

    def begin(epoch: int) -> Take:
        samples = iter(epoch_order(length, seed, epoch, shuffle))
        return lambda count: list(islice(samples, count))

    return Order(length, begin)


def _sampler_order(sampler: Iterable[Any], seed: int) -> Order:
    """The order of a user's sampler, under a random state that all ranks have in common."""

    def begin(epoch: int) -> Take:
        state = CommonRandomState(mix_seeds(seed, epoch), _generators(sampler))
        with state.active():
            samples = iter(sampler)

        def take(count: int) -> list[Any]:
            with state.active():
                return list(islice(samples, count))

        return take

    return Order(length_of(sampler), begin)


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    """The order of the samples of a loader over a map-style dataset, or of its batch sampler's batches."""
    if loader.batch_size is None:
        assert loader.batch_sampler is not None
        return _sampler_order(loader.batch_sampler, seed)
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return _seeded_order(len(sampler), seed, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return _seeded_order(len(sampler), seed, shuffle=True)
    return _sampler_order(sampler, seed)


def refuse_distributed(loader: DataLoader[Any]) -> None:
    """Refuse a loader with a DistributedSampler: every rank would read a share of its share."""
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise IncompatibleError(
                f"the loader has a DistributedSampler (rank {sampler.rank} of {sampler.num_replicas}), and run.shard "
                "shares out too: make the loader without a sampler (shuffle=True is kept), or pass split=False"
            )


def _generators(sampler: object) -> list[torch.Generator]:
    inner = sampler.sampler if isinstance(sampler, BatchSampler) else None
    generators = (getattr(each, "generator", None) for each in (sampler, inner))
    return [each for each in dict.fromkeys(generators) if isinstance(each, torch.Generator)]


def length_of(data: object) -> int | None:
    """The length of data; None if it has none."""
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


_numpy: Any = np.random  # its generator can be replaced, which the type hints do not show


class CommonRandomState:
    """A state of the generators of torch (CPU), NumPy and `random`, from a seed that all ranks share.

    The program's own state is restored afterwards, so that reading data does not change the model's random numbers.

    >>> before = torch.get_rng_state()
    >>> state = CommonRandomState(seed=3)
    >>> with state.active():
    ...     first = torch.rand(2)
    >>> with state.active():
    ...     second = torch.rand(2)
    >>> torch.equal(torch.cat([first, second]), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    True
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = (torch.default_generator, *generators)
        fresh = torch.Generator().manual_seed(seed).get_state()
        self._torch = [
            fresh if each.device.type == "cpu" else torch.Generator(each.device).manual_seed(seed).get_state()
            for each in self._generators
        ]
        self._numpy: Any = np.random.MT19937(seed)
        self._python = random.Random(seed).getstate()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the generators have this state. The next call continues where it stopped."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, generator in enumerate(self._generators):
            state = generator.get_state()
            generator.set_state(self._torch[place])
            self._torch[place] = state
        numpy = _numpy.get_bit_generator()
        _numpy.set_bit_generator(self._numpy)
        self._numpy = numpy
        python = random.getstate()
        random.setstate(self._python)
        self._python = python


def reseed(seed: int) -> None:
    """Seed the generators of this process: for the worker processes of a loader."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
