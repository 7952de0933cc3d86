"""Dealing samples to ranks, and dealing the rest again after a reset."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any

import torch

from syncline.compat.horovod.context import context

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its share of a dataset's indices; what was recorded as done is not dealt again this epoch.

    Record each batch with `record_batch` (every rank does, with the same size), or the samples themselves with
    `record_indices`; call `set_epoch` at the end of an epoch, not at its beginning. As part of a `TorchState` its
    progress is committed and restored with the rest. All ranks get the same number of samples: a few come twice
    where the rest cannot be dealt evenly.

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
        """Samples of all ranks that `record_batch` has counted, from the beginning of what was dealt."""
        self.processed_indices: set[int] = set()
        """Samples that `record_indices` has named, on this rank."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: another order, and nothing done yet."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """A batch of so many samples is done, on this rank and on all others."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """These samples are done, on this rank."""
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank, by its number since the last reset."""
        return self._mine()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is; plain values, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. What only Horovod's older or newer releases have written is read too."""
        self.epoch = int(state_dict["epoch"])
        self.processed_num = int(state_dict.get("processed_num", 0))
        self.processed_indices = {int(index) for index in state_dict.get("processed_indices", ())}
        self.reset()

    def reset(self) -> None:
        """Deal what is left to the ranks that are there now."""
        world = context().world
        self.rank, self.num_replicas = world.rank, world.size
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        # First those that are known by name, then the count: it counts along what was dealt, which left them out.
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
