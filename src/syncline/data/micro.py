"""`MicroBatches`: a global batch of one size, whatever the number of workers (strong scaling)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from syncline.data.base import Counts
from syncline.data.cursor import Cursor, Place
from syncline.data.indexed import check_length, check_place, skip
from syncline.data.plan import Deal, count_pieces, cut, deal, ends_unevenly, mixed
from syncline.data.reading import Lot, Reader
from syncline.data.samplers import order_of, refuse_distributed
from syncline.data.sharded import as_loader, part_of
from syncline.errors import IncompatibleError, SpecError, UnsupportedError

__all__ = ["Micro", "MicroBatches", "Step"]

Note = tuple[Deal, list[int]]
"""A share, and how many samples each of its micro-batches has."""


class Micro(NamedTuple):
    """A part of a rank's share of a global batch."""

    batch: Any
    fraction: float
    """Its samples ÷ this rank's in this step. A mean loss is multiplied by it before `backward()`."""
    last: bool
    """Whether the rank's share ends with it: the gradients are exchanged in its `backward()`."""


class Step:
    """One rank's share of one global batch: iterating gives its `Micro`s, once."""

    def __init__(self, note: Note, first: Any, rest: Iterator[tuple[Note, Any]], usual: float) -> None:
        share, self._sizes = note
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
            place = self.parts - self.unread
            batch = next(self._rest)[1] if place else self._first
            self._first = None
            self.unread -= 1
            yield Micro(batch, self._sizes[place] / self.count, self.unread == 0)


class MicroBatches:
    """Global batches of `global_batch` samples, shared out over the ranks, each share cut into micro-batches.

    `data` is a DataLoader or a Dataset whose samples have numbers. A micro-batch has at most `micro_batch` samples: by
    default the loader's batch size, and for a Dataset the whole share. Iterating gives an epoch's `Step`s. A step's
    `weight` is its samples ÷ (global batch ÷ ranks), so that the weights of a full batch sum up to the number of ranks.

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
                f"a global batch of {global_batch} cannot be shared out over {size} workers: each needs one sample at "
                "least. Use a larger global_batch or fewer workers"
            )
        if micro_batch is not None and micro_batch < 1:
            raise SpecError(f"micro_batch={micro_batch}: a micro-batch has one sample at least")
        self.cursor = Cursor() if cursor is None else cursor
        self.global_batch = global_batch
        self._part = part_of(rank, size, seed)
        loader = as_loader(data, None if isinstance(data, DataLoader) else global_batch, shuffle)
        if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise UnsupportedError(
                f"micro-batches of a {type(data).__name__}: they need a Dataset with numbered samples, or a DataLoader "
                "with a batch_size over one. run.shard takes any data"
            )
        refuse_distributed(loader)
        self.micro_batch = loader.batch_size if micro_batch is None else micro_batch
        self._drop_last = loader.drop_last if drop_last is None else drop_last
        self._order = order_of(loader, seed)
        check_length(self._order.length, size, global_batch, self._drop_last)
        self._reader: Reader[Note] = Reader(loader)

    @property
    def uneven(self) -> bool:
        """Whether ranks may end at different times: the same on every rank."""
        length = self._order.length
        if length is None:
            return True
        # A place that was saved with another global batch shifts this epoch's last one.
        ends = (length, max(length - self.cursor.start, 0))
        return any(ends_unevenly(end, self.global_batch, self._part.size, self._drop_last) for end in ends)

    @property
    def steps(self) -> int | None:
        """How many steps a whole epoch has, the same on every rank; None where it is not known before the end."""
        return self._count(0)

    def counts(self, place: Place) -> Counts | None:
        """How many steps the ranks have in an epoch read from `place` on, where that is known."""
        ranks = (0, self._part.rank, self._part.size - 1)
        most, own, fewest = (self._count(rank, place.samples) for rank in ranks)
        return None if most is None or own is None or fewest is None else Counts(most, own, fewest)

    def __len__(self) -> int:
        """How many steps this rank has in a whole epoch."""
        found = self._count(self._part.rank)
        if found is None:
            raise TypeError("the length of this data is not known before it was read")
        return found

    def begin(self, work: int | None = None) -> Place:
        """Begin an iteration; `work`: as `Cursor.begin` has it."""
        return self.cursor.begin(work=work)

    def read(self, place: Place) -> Iterator[Step]:
        """The steps of an iteration that has begun; the cursor moves before each is handed out."""
        part = self._part
        check_place(place, self._order)
        take = self._order.begin(place.epoch)
        skip(take, place.samples)
        deals = deal(take, part, self.global_batch, self._drop_last, place.samples)
        found = self._reader.read(self._lots(deals, place.epoch), mixed(part.seed, place.epoch, part.who))
        for note, batch in found:
            place.advance(note[0].samples)
            self.cursor.follow(place, note[0].last)
            step = Step(note, batch, found, self.global_batch / part.size)
            yield step
            if step.unread:
                raise IncompatibleError(
                    f"a step was left with {step.unread} of its {step.parts} micro-batches unread: the gradients are "
                    "exchanged in the last one, for which the other workers wait. Read them all"
                )
        self.cursor.finish(place)

    def __iter__(self) -> Iterator[Step]:
        place = self.begin()
        try:
            yield from self.read(place)
        finally:
            self.cursor.leave(place)

    def _count(self, rank: int, start: int = 0) -> int | None:
        length = self._order.length
        return (
            None if length is None else count_pieces(max(length - start, 0), self.global_batch, rank, self._drop_last)
        )

    def _lots(self, deals: Iterator[Deal], epoch: int) -> Iterator[Lot[Note]]:
        for each in deals:
            parts = cut(each.indices, self.micro_batch)
            sizes = [len(part) for part in parts]
            for number, part in enumerate(parts):
                yield (each, sizes), part, (self._part.seed, epoch, each.start, self._part.who, number)
