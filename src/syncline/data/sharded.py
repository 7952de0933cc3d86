"""`Sharded`: this rank's share of any data, shuffled, resumable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from syncline.data.base import Counts, Piece, Source
from syncline.data.cursor import Cursor, Place
from syncline.data.indexed import Batches, Samples, check_length
from syncline.data.plan import Part, mixed
from syncline.data.ready import Ready
from syncline.data.samplers import refuse_distributed
from syncline.data.streams import Stream
from syncline.errors import IncompatibleError, SpecError

__all__ = ["Sharded", "as_loader", "part_of"]


class Sharded:
    """The share of `rank` of what `size` ranks read together; iterating gives an epoch's `Piece`s.

    `data` is a DataLoader, whose batch size is that of one rank; a Dataset, with `batch` saying how many samples a
    rank takes (shuffled, unless `shuffle` is False); or any iterable of ready batches. All that a DataLoader was told
    is kept. Every rank passes the same data and seed; with `split=False` each passes its own, and nothing is shared.

    Each iteration is a fresh epoch, as with a DataLoader; the first one after the cursor was loaded goes on where the
    checkpoint was made. With `pad=False`, for evaluation, a rank may have nothing at all.

    >>> loader = DataLoader(range(10), batch_size=2)
    >>> for rank in (0, 1):
    ...     [piece.batch.tolist() for piece in Sharded(loader, rank=rank, size=2)]
    [[0, 2], [4, 6], [8]]
    [[1, 3], [5, 7], [9]]
    """

    def __init__(
        self,
        data: Any,
        *,
        rank: int,
        size: int,
        seed: int = 0,
        split: bool = True,
        drop_last: bool | None = None,
        batch: int | None = None,
        shuffle: bool | None = None,
        cursor: Cursor | None = None,
        pad: bool = True,
    ) -> None:
        self.cursor = Cursor() if cursor is None else cursor
        self._split = split
        self._size = size
        self._rank = rank if split else 0
        self._pad = pad
        loader = as_loader(data, batch, shuffle)
        self.data = data if loader is None else loader
        """The DataLoader that is read, also where a Dataset was given; else the iterable."""
        self._source = _source(data, loader, part_of(rank, size, seed, split, pad), split, drop_last)

    @property
    def batch(self) -> int:
        """Samples in a usual batch of one rank: what a weight of 1.0 stands for."""
        return self._source.batch

    @property
    def uneven(self) -> bool:
        """Whether ranks may end at different times, in this epoch or another. The same on every rank."""
        if not self._split:
            return True
        start = self.cursor.start
        return self._source.uneven(0) or (start > 0 and self._source.uneven(start))

    @property
    def steps(self) -> int | None:
        """How many steps a whole epoch has, the same on every rank; None where that shows only at the end."""
        return self._source.pieces(0)

    def counts(self, place: Place) -> Counts | None:
        """How many pieces the ranks have in an epoch read from `place` on, where that is known for all."""
        ranks = (0, self._rank, self._size - 1)
        most, own, fewest = (self._source.pieces(rank, place.samples) for rank in ranks)
        if most is None or own is None or fewest is None or not self._split:
            return None
        return Counts(most, own, fewest)

    def __len__(self) -> int:
        """How many pieces this rank has in a whole epoch."""
        found = self._source.pieces(self._rank)
        if found is None:
            raise TypeError("the length of this data is not known before it was read")
        return found

    def begin(self, work: int | None = None) -> Place:
        """Begin an iteration; `work`: as `Cursor.begin` has it."""
        return self.cursor.begin(self._source.goes_on, work)

    def read(self, place: Place) -> Iterator[Piece]:
        """The pieces of an iteration that has begun; the cursor moves before each is handed out."""
        nothing = place.samples == 0
        for piece in self._source.read(place):
            nothing = False
            self.cursor.follow(place, piece.last)
            yield piece
        if nothing and self._pad:
            raise IncompatibleError(
                f"epoch {place.epoch} has no data for rank {self._rank}: an iterator or generator can be read "
                "only once (pass an iterable that begins anew), and every worker needs one batch at least"
            )
        self.cursor.finish(place)

    def __iter__(self) -> Iterator[Piece]:
        place = self.begin()
        try:
            yield from self.read(place)
        finally:
            self.cursor.leave(place)


def part_of(rank: int, size: int, seed: int, split: bool = True, pad: bool = True) -> Part:
    """Who takes which share; where nothing is split each rank is alone, and shuffles in its own way."""
    if not 0 <= rank < size:
        raise SpecError(f"rank={rank} is not one of {size} ranks")
    return Part(rank, size, seed, rank, not pad) if split else Part(0, 1, mixed(seed, rank), rank, not pad)


def as_loader(data: Any, batch: int | None, shuffle: bool | None) -> DataLoader[Any] | None:
    """The DataLoader that `data` is, or one over the Dataset that it is; None for anything else."""
    if isinstance(data, DataLoader):
        if batch is not None or shuffle is not None:
            raise SpecError(f"batch={batch}, shuffle={shuffle}: a DataLoader has said both already; leave them out")
        # One that iterates in its own way has its reasons: it is an iterable of ready batches to us.
        return data if type(data).__iter__ is DataLoader.__iter__ else None
    if not isinstance(data, Dataset):
        return None
    if batch is None or batch < 1:
        raise SpecError(
            f"batch={batch} for a {type(data).__name__}: say how many samples each worker takes in a step, for example "
            "batch=32, or pass a DataLoader"
        )
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch)
    check_length(len(data), 1, batch, drop_last=False)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=batch, shuffle=shuffle is not False)


def _source(data: Any, loader: DataLoader[Any] | None, part: Part, split: bool, drop_last: bool | None) -> Source:
    if loader is None:
        if not isinstance(data, Iterable):
            raise IncompatibleError(
                f"a {type(data).__name__} cannot be shared out: pass a DataLoader, a Dataset or an iterable of batches"
            )
        return Ready(data, part, drop_last)
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader, part, drop_last)
    if split:
        refuse_distributed(loader)
    if loader.batch_sampler is None:
        raise IncompatibleError(
            "the loader has batch_size=None over a dataset whose samples have numbers: say how many samples each "
            "worker takes in a step, for example DataLoader(..., batch_size=32)"
        )
    return (Batches if loader.batch_size is None else Samples)(loader, part, drop_last)
