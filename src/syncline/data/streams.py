"""Iterable datasets: nobody knows their length, every rank reads all of them and keeps its share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from syncline.data.base import Piece, Source
from syncline.data.cursor import Place
from syncline.data.indexed import check_length
from syncline.data.plan import Part, count_pieces, mixed
from syncline.data.randomness import Randomness, reseed
from syncline.data.reading import like
from syncline.data.samplers import length_of
from syncline.errors import IncompatibleError

__all__ = ["Stream"]


class Stream(Source):
    """Item i of the stream goes to rank i mod k, and b of them are a rank's batch.

    A loader's process reads a stream of its own, and each is shared out like that. So a step consumes k·b items of
    one stream, and the processes take turns. Which process a batch came from is told with it: when one stream has
    ended the others go on.
    """

    def __init__(self, loader: DataLoader[Any], part: Part, drop_last: bool | None) -> None:
        self.batch = 1 if loader.batch_size is None else loader.batch_size
        self._part = part
        self._drop_last = loader.drop_last if drop_last is None else drop_last
        self._processes = loader.num_workers
        self._dataset = _Share(loader, part, self.batch, self._drop_last)
        self._generator = torch.Generator()
        # A batch that is short is dropped by all ranks or none, which only the shared dataset can know.
        self._loader = like(
            loader,
            self._dataset,
            generator=self._generator,
            batch_size=loader.batch_size,
            collate_fn=_Counted(loader.collate_fn, loader.batch_size is not None),
        )

    def read(self, place: Place) -> Iterator[Piece]:
        epoch = place.epoch
        self._generator.manual_seed(mixed(self._part.seed, epoch))
        place.streams = self._streams(place)
        self._dataset.begin(epoch, place.streams or [place.samples])
        # All ranks must see the same stream, so what it draws comes from a state they have in common. A loader's
        # process has a state of its own anyway.
        randomness = Randomness(mixed(self._part.seed, epoch))
        apart: Callable[[], Any] = nullcontext if self._processes else randomness.used
        with apart():
            batches = iter(self._loader)
        while True:
            with apart():
                found = next(batches, None)
            if found is None:
                return
            process, count, data = found
            if count == 0:
                continue
            step = self.batch * self._part.size
            place.advance(step)
            if place.streams:
                place.streams[process] += step
            yield Piece(data, count / self.batch, count=count)

    def _streams(self, place: Place) -> list[int]:
        """How far each process's stream was read; nothing where there is but one stream."""
        if self._processes < 2 and not place.streams:
            return []
        if place.samples == 0:
            return [0] * self._processes
        if len(place.streams) == self._processes:
            return place.streams
        raise IncompatibleError(
            f"the run was saved in the middle of an epoch (item {place.samples}) that {max(1, len(place.streams))} "
            f"loader processes read, and now num_workers={self._processes}: resume with as many, or from an epoch's end"
        )

    def uneven(self, start: int) -> bool:
        return not (self._drop_last and self._processes < 2)

    def pieces(self, rank: int, start: int = 0) -> int | None:
        length = length_of(self._dataset.inner)
        if length is None or self._processes > 1:  # with several streams it is not said of which
            return None
        return count_pieces(max(length - start, 0), self.batch * self._part.size, rank, self._drop_last)


class _Share(IterableDataset[Any]):
    """A rank's share of an iterable dataset."""

    def __init__(self, loader: DataLoader[Any], part: Part, batch: int, drop_last: bool) -> None:
        self.inner: Any = loader.dataset
        self._part = part
        self._batch = batch
        self._drop_last = drop_last
        self._unit = 1 if loader.batch_size is None else batch
        self._single = loader.num_workers < 2
        # The epoch, then how far each process's stream was read: shared, for processes that live on.
        self._place = torch.zeros(1 + max(1, loader.num_workers), dtype=torch.int64)
        if loader.num_workers:
            self._place.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int, consumed: list[int]) -> None:
        self._place.copy_(torch.tensor([epoch, *consumed]))

    def __iter__(self) -> Iterator[Any]:
        epoch, *consumed = self._place.tolist()
        info = get_worker_info()
        process = 0 if info is None else info.id
        if info is not None:
            reseed(mixed(self._part.seed, epoch, process))
        items = iter(self.inner)
        deque(islice(items, consumed[process]), maxlen=0)
        if process < consumed.index(min(consumed)):
            # Its batch of this round was consumed: an empty one holds its turn.
            yield from [_Gone] * self._unit
        group = self._batch * self._part.size
        first = self._single and consumed[process] == 0 and not self._part.may_be_empty
        while True:
            mine, seen = [], 0
            for item in islice(items, group):
                if seen % self._part.size == self._part.rank:
                    mine.append(item)
                seen += 1
            if first:
                check_length(seen, self._part.size, group, self._drop_last, "items")
                first = False
            if seen < (group if self._drop_last else 1):
                return
            yield from mine


class _Gone:
    """Stands for an item that was consumed before the run was resumed."""


class _Counted:
    """Collates as the user's function does, and says which process did, and how many items there were."""

    def __init__(self, collate: Callable[[Any], Any], together: bool) -> None:
        self._collate = collate
        self._together = together

    def __call__(self, items: Any) -> tuple[int, int, Any]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        if (items[0] if self._together else items) is _Gone:
            return process, 0, None
        return process, len(items) if self._together else 1, self._collate(items)
