"""Sources of data: the contract (`Source`), and one class for each kind of data.

| source | data | sharing |
|---|---|---|
| `SampleSource` | a DataLoader over a dataset with indices | every k-th sample of a global batch |
| `BatchSource` | a DataLoader with the user's batch sampler | batch i to rank i mod k |
| `ReadyBatchSource` | any iterable of batches | batch i to rank i mod k |
| `StreamSource` | a DataLoader over an IterableDataset | item i to rank i mod k |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from syncline.data.claims import EpochClaims
from syncline.data.cursor import DataPosition
from syncline.data.loader import BatchReader, BatchRequest, loader_like
from syncline.data.order import CommonRandomState, Order, length_of, order_of, reseed
from syncline.data.partition import (
    EpochItems,
    LostShares,
    RankPartition,
    RankShare,
    count_shares,
    ends_unevenly,
    mix_seeds,
    share_batches,
    share_samples,
)
from syncline.errors import IncompatibleError

__all__ = [
    "BatchSource",
    "IndexedSource",
    "Piece",
    "PieceCounts",
    "ReadyBatchSource",
    "SampleSource",
    "Source",
    "StreamSource",
    "check_length",
]


@dataclass(frozen=True)
class Piece:
    """One rank's batch of one step, and its weight in the mean over all ranks.

    >>> Piece(batch=[1, 2, 3], weight=0.75, last=True, count=3, total=1.25).weight
    0.75
    """

    batch: Any
    weight: float
    """Samples of this batch ÷ the batch size: 1.0 unless the batch is short."""
    last: bool = False
    """Whether it is this rank's last batch of the epoch; False if that is unknown before the end."""
    count: int | None = None
    """Samples of this batch, if they can be counted."""
    total: float | None = None
    """The sum of the weights of all ranks in this step, if it is known without communication."""


class PieceCounts(NamedTuple):
    """The number of pieces of ranks in the rest of an epoch. Rank 0 has the most, the last rank the fewest."""

    most: int
    own: int
    fewest: int


class Source(ABC):
    """The contract of a source: data of one kind, and this rank's pieces of it."""

    batch: int
    """Samples of a full batch of one rank; 1 for ready batches."""
    _part: RankPartition

    @property
    def read_once(self) -> bool:
        """Whether a second iteration continues where the first one stopped, as with an iterator."""
        return False

    @abstractmethod
    def read(self, position: DataPosition) -> Iterator[Piece]:
        """The pieces of the rest of the epoch. The position advances before each piece is returned."""

    @abstractmethod
    def uneven(self, start: int) -> bool:
        """Whether some rank may have fewer pieces than another in an epoch from `start` on."""

    @abstractmethod
    def pieces(self, rank: int, start: int = 0) -> int | None:
        """The number of pieces of `rank` in an epoch from `start` on; None if it is unknown."""

    @abstractmethod
    def regroup(self, part: RankPartition) -> None:
        """Continue with another number of ranks. Data that leaves some rank without any is refused."""

    @property
    def restarts(self) -> bool:
        """Whether an iteration must start again at its position after `regroup`, because it has read ahead."""
        return False

    @property
    def deals_again(self) -> bool:
        """Whether the source can go back, so that shares that lost ranks have not trained are distributed again."""
        return False

    def untrained(self, position: DataPosition, lost: LostShares) -> int:
        """The number of samples of lost shares. `position` has the lost shares before them."""
        return 0

    def rest(self, position: DataPosition) -> int:
        """The samples of the short global batch after this rank's last share."""
        return 0

    def divides(self, size: int) -> bool:
        """Whether each of `size` ranks has the same number of samples (or batches) of a full global batch."""
        return True


class IndexedSource(Source):
    """Data with indices, so that every part of an epoch can be read again."""

    reader: BatchReader[Any]
    _drop_last: bool
    _order: Order
    _batches = False
    """Whether the items of the order are batches."""

    @property
    def _step_items(self) -> int:
        """The number of items of a global batch."""
        return self._part.size

    @property
    def restarts(self) -> bool:
        return True

    @property
    def deals_again(self) -> bool:
        return True

    def regroup(self, part: RankPartition) -> None:
        self._part = part
        if not part.may_be_empty:
            what = "batches" if self._batches else "samples"
            check_length(self._order.length, part.size, self._step_items, self._drop_last, what)

    def untrained(self, position: DataPosition, lost: LostShares) -> int:
        if not self._batches:
            return sum(len(range(rank, lost.samples, lost.size)) for rank in lost.ranks)
        items = EpochItems(self._order.begin(position.epoch), self._batches)
        items.skip(lost.start, position.lost_shares)
        return items.count(lost.split(list(chain.from_iterable(items.draw(lost.samples))))[1])

    @abstractmethod
    def batches_of(self, epoch: int) -> list[list[Any]]:
        """The batches of all workers in an epoch, in its order: the indices of each."""

    def read_claimed(self, position: DataPosition, batches: list[list[Any]], claims: EpochClaims) -> Iterator[Piece]:
        """The batches that this worker can claim at the moment."""
        part, epoch = self._part, position.epoch
        starts = [0, *accumulate(map(len, batches))]

        def requests() -> Iterator[BatchRequest[int]]:
            for number in claims.take():
                yield number, batches[number], (part.seed, epoch, starts[number], part.who)

        for number, data in self.reader.read(requests(), mix_seeds(part.seed, epoch, part.who)):
            claims.returned(number)
            position.samples = max(1, starts[claims.first_open])
            count = len(batches[number])
            yield Piece(data, count / self.batch, count=count)

    def rest(self, position: DataPosition) -> int:
        if self._drop_last:
            return 0
        items = EpochItems(self._order.begin(position.epoch), self._batches)
        items.skip(position.samples, position.lost_shares)
        return items.count(items.take(self._step_items))


class SampleSource(IndexedSource):
    """Single samples: rank r of k takes every k-th of a global batch, starting with r.

    A global batch has `global_batch` samples, by default k times the loader's batch size.
    """

    def __init__(
        self, loader: DataLoader[Any], part: RankPartition, drop_last: bool | None, global_batch: int | None = None
    ) -> None:
        assert loader.batch_size is not None
        self.batch = loader.batch_size
        self._fixed_step_items = global_batch
        self._drop_last = loader.drop_last if drop_last is None else drop_last
        self._order = order_of(loader, part.seed)
        self.regroup(part)
        self.reader: BatchReader[Any] = BatchReader(loader)

    @property
    def _step_items(self) -> int:
        return self.batch * self._part.size if self._fixed_step_items is None else self._fixed_step_items

    def divides(self, size: int) -> bool:
        return self._fixed_step_items is None or self._fixed_step_items % size == 0

    def regroup(self, part: RankPartition) -> None:
        if self._fixed_step_items is not None and self._fixed_step_items < part.size:
            raise IncompatibleError(
                f"a global batch of {self._fixed_step_items} cannot be split over {part.size} workers: each needs at "
                "least one sample. Use a larger global_batch or fewer workers"
            )
        super().regroup(part)

    def shares(self, position: DataPosition) -> Iterator[RankShare]:
        """This rank's shares in the rest of the epoch. A position behind the end belongs to other data."""
        length, count = self._order.length, position.samples
        if length is not None and count > length:
            raise IncompatibleError(
                f"the run stands at sample {count} of epoch {position.epoch}, but an epoch of this data has "
                f"{length}: it was saved with other data"
            )
        items = EpochItems(self._order.begin(position.epoch))
        items.skip(count, position.lost_shares)
        return share_samples(items.take, self._part, self._step_items, self._drop_last, count)

    def read(self, position: DataPosition) -> Iterator[Piece]:
        yield from _read_shares(self.reader, self.shares(position), self._part, self.batch, position)

    def batches_of(self, epoch: int) -> list[list[Any]]:
        take, batches = self._order.begin(epoch), list[list[Any]]()
        while len(indices := take(self.batch)) >= (self.batch if self._drop_last else 1):
            batches.append(indices)
        return batches

    def uneven(self, start: int) -> bool:
        length = self._order.length
        return length is None or ends_unevenly(
            max(length - start, 0), self._step_items, self._part.size, self._drop_last
        )

    def pieces(self, rank: int, start: int = 0) -> int | None:
        length = self._order.length
        if length is None:
            return None
        return count_shares(max(length - start, 0), self._step_items, rank, self._drop_last)


class BatchSource(IndexedSource):
    """Batches of a user's batch sampler: batch i goes to rank i mod k."""

    _batches = True

    def __init__(self, loader: DataLoader[Any], part: RankPartition, drop_last: bool | None) -> None:
        usual = getattr(loader.batch_sampler, "batch_size", None)
        self.batch = usual if isinstance(usual, int) and usual > 0 else 1
        self._usual = self.batch if self.batch == usual else None
        self._drop_last = bool(drop_last)
        self._order = order_of(loader, part.seed)
        self.regroup(part)
        self.reader: BatchReader[Any] = BatchReader(loader)

    def read(self, position: DataPosition) -> Iterator[Piece]:
        items = EpochItems(self._order.begin(position.epoch), self._batches)
        first = items.take(1)  # of the epoch, so that all ranks know it, also after a resume
        usual = self._usual or max([1, *map(len, first)])
        items.put_back(first)
        items.skip(position.samples, position.lost_shares)
        shares = share_batches(items.take, self._part, self._drop_last, position.samples)
        yield from _read_shares(self.reader, shares, self._part, usual, position)

    def batches_of(self, epoch: int) -> list[list[Any]]:
        take, batches = self._order.begin(epoch), list[list[Any]]()
        while found := take(1):
            batches += map(list, found)
        return batches

    def uneven(self, start: int) -> bool:
        # The number of batches before `start` is unknown until they are drawn.
        length = self._order.length
        return length is None or (not self._drop_last and (start > 0 or length % self._part.size != 0))

    def pieces(self, rank: int, start: int = 0) -> int | None:
        length = self._order.length
        if length is None or start > 0:
            return None
        return count_shares(length, self._part.size, rank, self._drop_last)


def _read_shares(
    reader: BatchReader[RankShare], shares: Iterator[RankShare], part: RankPartition, batch: int, position: DataPosition
) -> Iterator[Piece]:
    """The pieces of a rank's shares. The position advances before each piece is returned."""

    def requests() -> Iterator[BatchRequest[RankShare]]:
        for each in shares:
            yield each, each.indices, (part.seed, epoch, each.start, part.who)

    epoch = position.epoch
    for each, data in reader.read(requests(), mix_seeds(part.seed, epoch, part.who)):
        position.advance(each.samples)
        count = len(each.indices)
        yield Piece(data, count / batch, each.last, count, each.samples / batch)


def check_length(length: int | None, size: int, batch: int, drop_last: bool, what: str = "samples") -> None:
    """Refuse data that leaves some rank without data in every epoch."""
    if length == 0:
        raise IncompatibleError(f"the data is empty (0 {what}): nothing to train on")
    if length is not None and length < size:
        raise IncompatibleError(
            f"{length} {what} cannot be split over {size} workers: each needs at least one. Use at most {length} "
            "workers, or pass split=False if each worker has data of its own"
        )
    if length is not None and drop_last and length < batch:
        raise IncompatibleError(
            f"drop_last leaves nothing of {length} {what}: one step of {size} workers takes {batch}. Use a smaller "
            "batch, fewer workers, or drop_last=False"
        )


class ReadyBatchSource(Source):
    """Any iterable of ready batches: batch i goes to rank i mod k, and each has weight 1.

    A rank reads all k batches of a step before it returns its own, so that all ranks know which ranks have one.
    """

    def __init__(self, data: Iterable[Any], part: RankPartition, drop_last: bool | None) -> None:
        self.batch = 1
        self._data = data
        self._drop_last = bool(drop_last)
        self._length = length_of(data)
        self._read = 0  # items read from an iterator, which cannot go back
        self.regroup(part)

    def regroup(self, part: RankPartition) -> None:
        self._part = part
        if not part.may_be_empty:
            check_length(self._length, part.size, part.size, self._drop_last, "batches")

    @property
    def read_once(self) -> bool:
        return isinstance(self._data, Iterator) and self._read > 0

    def read(self, position: DataPosition) -> Iterator[Piece]:
        fresh = position.samples == 0 and not self._part.may_be_empty
        # The random numbers of a generator must be the same on all ranks.
        state = CommonRandomState(mix_seeds(self._part.seed, position.epoch))
        with state.active():
            batches = iter(self._data)
            behind = self._read if batches is self._data else 0
            deque(islice(batches, max(0, position.samples - behind)), maxlen=0)
        while True:
            rank, size = self._part.rank, self._part.size  # they may change between two steps
            with state.active():
                mine, seen = self._step(batches)
            self._read = position.samples + seen
            if fresh and (seen > 0 or batches is not self._data):
                check_length(seen, size, size, self._drop_last, "batches")
            fresh = False
            if seen <= rank or (self._drop_last and seen < size):
                return
            position.advance(seen)
            yield Piece(mine, 1.0, self._is_last(position.samples), total=float(seen))

    def _is_last(self, consumed: int) -> bool:
        if self._length is None:
            return False
        return count_shares(self._length - consumed, self._part.size, self._part.rank, self._drop_last) == 0

    def _step(self, batches: Iterator[Any]) -> tuple[Any, int]:
        mine, seen = None, 0
        for batch in islice(batches, self._part.size):
            if seen == self._part.rank:
                mine = batch
            seen += 1
        return mine, seen

    def uneven(self, start: int) -> bool:
        if self._drop_last:
            return False
        return self._length is None or (self._length - start) % self._part.size != 0

    def pieces(self, rank: int, start: int = 0) -> int | None:
        if self._length is None:
            return None
        return count_shares(max(self._length - start, 0), self._part.size, rank, self._drop_last)


class StreamSource(Source):
    """An iterable dataset: item i of the stream goes to rank i mod k, and b items are a rank's batch.

    Every rank reads the whole stream, because its length is unknown. Each worker process of the loader reads its own
    stream, which is shared in the same way. So a step reads k·b items of one stream, and the processes take turns. A
    batch has the number of its process, because the other streams continue when one has ended.
    """

    def __init__(self, loader: DataLoader[Any], part: RankPartition, drop_last: bool | None) -> None:
        self.batch = 1 if loader.batch_size is None else loader.batch_size
        self._part = part
        self._drop_last = loader.drop_last if drop_last is None else drop_last
        self._processes = loader.num_workers
        self._dataset = _SharedStream(loader, part, self.batch, self._drop_last)
        self._generator = torch.Generator()
        # All ranks drop a short batch or none does, which only the shared dataset knows.
        self._loader = loader_like(
            loader,
            self._dataset,
            generator=self._generator,
            batch_size=loader.batch_size,
            collate_fn=_CountingCollate(loader.collate_fn, loader.batch_size is not None),
        )

    def regroup(self, part: RankPartition) -> None:
        self._part = part
        self._dataset.regroup(part)

    @property
    def restarts(self) -> bool:
        return self._processes > 0

    def read(self, position: DataPosition) -> Iterator[Piece]:
        epoch = position.epoch
        self._generator.manual_seed(mix_seeds(self._part.seed, epoch))
        position.streams = self._streams(position)
        self._dataset.begin(epoch, position.streams or [position.samples])
        # All ranks must see the same stream, so it draws from a state that they have in common. A worker process of
        # the loader has its own state.
        state = CommonRandomState(mix_seeds(self._part.seed, epoch))
        drawing: Callable[[], Any] = nullcontext if self._processes else state.active
        with drawing():
            batches = iter(self._loader)
        while True:
            with drawing():
                found = next(batches, None)
            if found is None:
                return
            process, count, data = found
            if count == 0:
                continue
            step = self.batch * self._part.size
            position.advance(step)
            if position.streams:
                position.streams[process] += step
            yield Piece(data, count / self.batch, count=count)

    def _streams(self, position: DataPosition) -> list[int]:
        """The position in each process's stream; empty if there is only one stream."""
        if self._processes < 2 and not position.streams:
            return []
        if position.samples == 0:
            return [0] * self._processes
        if len(position.streams) == self._processes:
            return position.streams
        raise IncompatibleError(
            f"the run was saved in the middle of an epoch (item {position.samples}), which "
            f"{max(1, len(position.streams))} loader processes read, and now num_workers={self._processes}: resume "
            "with as many, or from an epoch's end"
        )

    def uneven(self, start: int) -> bool:
        return not (self._drop_last and self._processes < 2)

    def pieces(self, rank: int, start: int = 0) -> int | None:
        length = length_of(self._dataset.inner)
        if length is None or self._processes > 1:  # the length of several streams is unknown
            return None
        return count_shares(max(length - start, 0), self.batch * self._part.size, rank, self._drop_last)


class _SharedStream(IterableDataset[Any]):
    """A rank's share of an iterable dataset."""

    def __init__(self, loader: DataLoader[Any], part: RankPartition, batch: int, drop_last: bool) -> None:
        self.inner: Any = loader.dataset
        self._part = part
        self._batch = batch
        self._drop_last = drop_last
        self._unit = 1 if loader.batch_size is None else batch
        self._single = loader.num_workers < 2
        # The epoch, the position in each process's stream, and the team: in shared memory, for persistent workers.
        self._position = torch.zeros(1 + max(1, loader.num_workers), dtype=torch.int64)
        self._team = torch.tensor([part.rank, part.size])
        if loader.num_workers:
            self._position.share_memory_()  # type: ignore[no-untyped-call]
            self._team.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int, consumed: list[int]) -> None:
        self._position.copy_(torch.tensor([epoch, *consumed]))

    def regroup(self, part: RankPartition) -> None:
        self._team.copy_(torch.tensor([part.rank, part.size]))

    def __iter__(self) -> Iterator[Any]:
        epoch, *consumed = self._position.tolist()
        info = get_worker_info()
        process = 0 if info is None else info.id
        if info is not None:
            reseed(mix_seeds(self._part.seed, epoch, process))
        items = iter(self.inner)
        deque(islice(items, consumed[process]), maxlen=0)
        if process < consumed.index(min(consumed)):
            # Its batch of this round was read before: an empty one takes its turn.
            yield from [_AlreadyRead] * self._unit
        first = self._single and consumed[process] == 0 and not self._part.may_be_empty
        while True:
            rank, size = self._team.tolist()
            mine, seen, group = [], 0, self._batch * size
            for item in islice(items, group):
                if seen % size == rank:
                    mine.append(item)
                seen += 1
            if first:
                check_length(seen, size, group, self._drop_last, "items")
                first = False
            if seen < (group if self._drop_last else 1):
                return
            yield from mine


class _AlreadyRead:
    """Stands for an item that was read before the run was resumed."""


class _CountingCollate:
    """Collates with the user's function, and adds the number of the process and of the items."""

    def __init__(self, collate: Callable[[Any], Any], together: bool) -> None:
        self._collate = collate
        self._together = together

    def __call__(self, items: Any) -> tuple[int, int, Any]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        if (items[0] if self._together else items) is _AlreadyRead:
            return process, 0, None
        return process, len(items) if self._together else 1, self._collate(items)
