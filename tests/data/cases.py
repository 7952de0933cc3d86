"""Datasets and samplers that several tests of reading use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from syncline.data import Cursor, Sharded


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Sample i is i and what three generators draw, as an augmentation would."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), np.random.rand(), random.random()


class Several(Numbers):
    """Reads a whole batch at once, and not into a list."""

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        assert type(indices) is list
        return {"x": torch.tensor(indices)}


class Counting(IterableDataset[int]):
    """A stream of the numbers below `length`; with loader processes each reads every n-th of them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, processes = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            assert info.dataset is self
        yield from range(number, self.length, processes)


class Sized(Counting):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.length


class Restless(IterableDataset[int]):
    """A stream whose order is drawn anew each time, a number at a time, from the global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Mixed(Sampler[int]):
    """Draws from all three global generators, and does not say how many."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()
        for _ in range(self.length):
            yield random.randrange(self.length)
            yield int(np.random.randint(self.length))


class Buckets(Sampler[list[int]]):
    """Batches of growing length: 1, 2, 3, …"""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        begin = 0
        for length in (1 + torch.randperm(self.batches)).tolist():
            yield list(range(begin, begin + length))
            begin += length

    def __len__(self) -> int:
        return self.batches


def flat(batch: Any) -> list[int]:
    """The samples of a batch."""
    return [int(each) for each in (batch.tolist() if isinstance(batch, torch.Tensor) else batch)]


def joined(batches: list[list[int]]) -> list[int]:
    """All samples of some batches."""
    return [index for batch in batches for index in batch]


def read(data: Any, rank: int = 0, size: int = 1, cursor: Cursor | None = None, **options: Any) -> list[list[int]]:
    """This rank's batches of the rest of an epoch."""
    return [flat(piece.batch) for piece in Sharded(data, rank=rank, size=size, cursor=cursor, **options)]


def resumed(cursor: Cursor) -> Cursor:
    """A cursor that goes on where another one stands, as after a checkpoint."""
    found = Cursor()
    found.load_state_dict(cursor.state_dict())
    return found


def merged(shares: list[list[list[int]]]) -> list[int]:
    """The global order again, from all ranks' batches: step by step, every k-th from each rank."""
    found: list[int] = []
    for step in range(max(map(len, shares))):
        present = [share[step] for share in shares if step < len(share)]
        for place in range(max(map(len, present))):
            found += [batch[place] for batch in present if place < len(batch)]
    return found


def together(data: Any, size: int, cursor: Cursor | None = None, **options: Any) -> list[int]:
    """What all ranks together read, in the global order."""
    places = [resumed(cursor or Cursor()) for _ in range(size)]
    return merged([read(data, rank, size, places[rank], **options) for rank in range(size)])


def states() -> tuple[bytes, bytes, object]:
    """The global generators' states."""
    numpy: Any = np.random.get_state(legacy=False)
    return bytes(torch.get_rng_state().tolist()), numpy["state"]["key"].tobytes(), random.getstate()
