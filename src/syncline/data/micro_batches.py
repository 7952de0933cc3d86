"""`MicroBatches`: a global batch of one size for any number of workers (strong scaling)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from syncline.data.cursor import Cursor, DataPosition
from syncline.data.loader import BatchReader, BatchRequest
from syncline.data.order import order_of, refuse_distributed
from syncline.data.partition import RankShare, count_shares, ends_unevenly, mix_seeds, share_samples, split_evenly
from syncline.data.sharded import as_loader, partition_of
from syncline.data.sources import PieceCounts, check_length, check_position, skip
from syncline.errors import IncompatibleError, SpecError, UnsupportedError

__all__ = ["Micro", "MicroBatches", "MicroStep"]

TaggedShare = tuple[RankShare, list[int]]
"""A share, and the number of samples of each of its micro-batches."""


class Micro(NamedTuple):
    """A micro-batch: a part of a rank's share of a global batch."""

    batch: Any
    fraction: float
    """Its samples ÷ this rank's samples in this step. Multiply a mean loss by it before `backward()`."""
    last: bool
    """Whether it is the last of the share: the gradients are reduced in its `backward()`."""


class MicroStep:
    """One rank's share of one global batch. Iterating returns its `Micro`s, once."""

    def __init__(self, tag: TaggedShare, first: Any, rest: Iterator[tuple[TaggedShare, Any]], usual: float) -> None:
        share, self._sizes = tag
        self.parts = len(self._sizes)
        self.count = len(share.indices)
        self.weight = self.count / usual
        self.total = share.samples / usual
        self.last = share.last
        self.unread = self.parts
        self._first = first
        self._rest = rest

    def __iter__(self) -> Iterator[Micro]:
        while self.unread:
            position = self.parts - self.unread
            batch = next(self._rest)[1] if position else self._first
            self._first = None
            self.unread -= 1
            yield Micro(batch, self._sizes[position] / self.count, self.unread == 0)


class MicroBatches:
    """Global batches of `global_batch` samples, split over the ranks; each share is split into micro-batches.

    `data` is a DataLoader or a Dataset with indices. A micro-batch has at most `micro_batch` samples: by default the
    loader's batch size, and for a Dataset the whole share. Iterating returns the `MicroStep`s of an epoch. The `weight`
    of a step is its samples ÷ (global batch ÷ ranks), so that the weights of a full batch sum to the number of ranks.

    >>> steps = MicroBatches(DataLoader(range(8), batch_size=2), global_batch=8, rank=0, size=2)
    >>> [[(batch.tolist(), fraction, last) for batch, fraction, last in step] for step in steps]
    [[([0, 2], 0.5, False), ([4, 6], 0.5, True)]]
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch: int,
        rank: int,
        size: int,
        micro_batch: int | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        shuffle: bool | None = None,
        cursor: Cursor | None = None,
    ) -> None:
        if global_batch < size:
            raise IncompatibleError(
                f"a global batch of {global_batch} cannot be split over {size} workers: each needs at least one "
                "sample. Use a larger global_batch or fewer workers"
            )
        if micro_batch is not None and micro_batch < 1:
            raise SpecError(f"micro_batch={micro_batch}: a micro-batch has at least one sample")
        self.cursor = Cursor() if cursor is None else cursor
        self.global_batch = global_batch
        self._part = partition_of(rank, size, seed)
        loader = as_loader(data, None if isinstance(data, DataLoader) else global_batch, shuffle)
        if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise UnsupportedError(
                f"micro-batches of a {type(data).__name__}: they need a Dataset with indices, or a DataLoader "
                "with a batch_size over one. run.shard takes any data"
            )
        refuse_distributed(loader)
        self.micro_batch = loader.batch_size if micro_batch is None else micro_batch
        self._drop_last = loader.drop_last if drop_last is None else drop_last
        self._order = order_of(loader, seed)
        check_length(self._order.length, size, global_batch, self._drop_last)
        self._reader: BatchReader[TaggedShare] = BatchReader(loader)

    @property
    def uneven(self) -> bool:
        """Whether ranks may end at different times: the same on every rank."""
        length = self._order.length
        if length is None:
            return True
        # A position that was saved with another global batch shifts the last batch of this epoch.
        ends = (length, max(length - self.cursor.start, 0))
        return any(ends_unevenly(end, self.global_batch, self._part.size, self._drop_last) for end in ends)

    @property
    def steps(self) -> int | None:
        """The number of steps of a whole epoch, the same on every rank; None if it is unknown before the end."""
        return self._count(0)

    def counts(self, position: DataPosition) -> PieceCounts | None:
        """The number of steps of the ranks in an epoch from `position` on, if it is known."""
        ranks = (0, self._part.rank, self._part.size - 1)
        most, own, fewest = (self._count(rank, position.samples) for rank in ranks)
        return None if most is None or own is None or fewest is None else PieceCounts(most, own, fewest)

    def __len__(self) -> int:
        """The number of steps of this rank in a whole epoch."""
        found = self._count(self._part.rank)
        if found is None:
            raise TypeError("the length of this data is unknown before it was read")
        return found

    def begin(self, work: int | None = None) -> DataPosition:
        """Start an iteration; see `Cursor.begin` for `work`."""
        return self.cursor.begin(work=work)

    def read(self, position: DataPosition) -> Iterator[MicroStep]:
        """The steps of an iteration. The cursor moves before each step is returned."""
        part = self._part
        check_position(position, self._order)
        take = self._order.begin(position.epoch)
        skip(take, position.samples)
        shares = share_samples(take, part, self.global_batch, self._drop_last, position.samples)
        batches = self._reader.read(
            self._requests(shares, position.epoch), mix_seeds(part.seed, position.epoch, part.who)
        )
        for tag, batch in batches:
            position.advance(tag[0].samples)
            self.cursor.follow(position, tag[0].last)
            step = MicroStep(tag, batch, batches, self.global_batch / part.size)
            yield step
            if step.unread:
                raise IncompatibleError(
                    f"a step was left with {step.unread} of its {step.parts} micro-batches unread: the gradients are "
                    "reduced in the last one, for which the other workers wait. Read them all"
                )
        self.cursor.finish(position)

    def __iter__(self) -> Iterator[MicroStep]:
        position = self.begin()
        try:
            yield from self.read(position)
        finally:
            self.cursor.leave(position)

    def _count(self, rank: int, start: int = 0) -> int | None:
        length = self._order.length
        return (
            None if length is None else count_shares(max(length - start, 0), self.global_batch, rank, self._drop_last)
        )

    def _requests(self, shares: Iterator[RankShare], epoch: int) -> Iterator[BatchRequest[TaggedShare]]:
        for each in shares:
            parts = split_evenly(each.indices, self.micro_batch)
            sizes = [len(part) for part in parts]
            for number, part in enumerate(parts):
                yield (each, sizes), part, (self._part.seed, epoch, each.start, self._part.who, number)
