"""`Sharded`: this rank's share of any data, shuffled and resumable."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from syncline.data.claims import EpochClaims, Epochs
from syncline.data.cursor import Cursor, DataPosition
from syncline.data.order import refuse_distributed
from syncline.data.partition import RankPartition, mix_seeds
from syncline.data.sources import (
    BatchSource,
    IndexedSource,
    Piece,
    PieceCounts,
    ReadyBatchSource,
    SampleSource,
    Source,
    StreamSource,
    check_length,
)
from syncline.errors import IncompatibleError, SpecError

__all__ = ["EpochReader", "Sharded", "as_loader", "partition_of"]

logger = logging.getLogger("syncline")


class _HasLast(Protocol):
    @property
    def last(self) -> bool: ...


T = TypeVar("T", bound=_HasLast)


class EpochReader(ABC, Generic[T]):
    """One rank's share of the epochs of a source. A subclass reads an epoch; iterating starts a new one."""

    def __init__(self, source: Source, part: RankPartition, cursor: Cursor | None, split: bool = True) -> None:
        self.cursor = Cursor() if cursor is None else cursor
        self.claims: Epochs | None = None
        """Which worker reads which batch, in an elastic job in which each worker has its own pace; else None."""
        self.teams = 0
        """How often the number of ranks has changed."""
        self._source = source
        self._part = part
        self._split = split
        self._next_part: RankPartition | None = None
        self._open: weakref.WeakSet[DataPosition] = weakref.WeakSet()
        self._warned = False

    @abstractmethod
    def _read(self, position: DataPosition) -> Generator[T, None, None]:
        """The items of the rest of an epoch. The position advances before each item is returned."""

    def read(self, position: DataPosition) -> Iterator[T]:
        """The items of an iteration. The cursor moves before each item is returned."""
        position.ended = False
        while True:
            part, items = self._part, self._read(position)
            for item in items:
                self.cursor.follow(position, item.last)
                yield item
                if self._part is not part and self._source.restarts:
                    items.close()  # what was read ahead belongs to shares of another number of ranks
                    break
            else:
                break
        position.end()
        self.cursor.finish(position)

    def regroup(self, rank: int, size: int, lost: tuple[int, ...] = (), steps: int = 1) -> bool:
        """Continue as rank `rank` of `size` from the next global batch on. Every rank calls it, in the same step.

        `lost` are the ranks that have not trained their shares of the current global batch, in the numbering of the
        team over which it was distributed; another call in the same step adds to them. The next global batches begin
        with these shares. Between two epochs there is no current global batch, and nothing is distributed again.
        `steps` is the number of latest global batches that are not trained yet, the current one included, if gradients
        are accumulated. A rank that has run out of data counts the one after its last share as the current one, also if
        there is none.

        Returns whether this rank has read all its shares of the epoch, and another global batch follows now.
        """
        self.teams += 1
        if not self._split:
            return False
        part = partition_of(rank, size, self._part.seed, pad=not self._part.may_be_empty)
        if part.may_be_empty and self._open:
            self._next_part = part  # in an evaluation each rank reads at its own pace, and keeps its share
            return False
        if lost and rank == 0 and not (self._source.deals_again or self._warned):
            self._warned = True
            logger.warning(
                f"{len(lost)} of {self._part.size} workers were lost, and this data cannot go back: their latest "
                "batches are not trained in this epoch. A DataLoader over a dataset with indices distributes them again"
            )
        untrained = {position: self._distribute_again(position, lost, steps) for position in self._open}
        self._source.regroup(part)
        self._part = part
        for position, count in untrained.items():
            pieces = self._source.pieces(rank, position.samples)
            over = self.cursor.over and count == 0 if pieces is None else pieces == 0
            self.cursor.regroup(position, over)
        return any(position.ended and count > 0 for position, count in untrained.items())

    def _distribute_again(self, position: DataPosition, lost: tuple[int, ...], steps: int) -> int:
        """Move a position back to the last trained sample. Returns the number of samples that are distributed again."""
        source, size = self._source, position.former_size or self._part.size
        if position.ended and position.former_size is None:
            rest = source.rest(position)
            if rest:
                position.advance(rest)
            position.complete = rest == 0
        if position.ended and position.complete:
            steps -= 1
        if steps == 0 or not position.started or not source.deals_again:
            return 0
        # Every k-th sample of several global batches is a rank's only if k divides each of them.
        steps = steps if source.divides(size) else 1
        return position.lose(size, lost, steps, lambda batch: source.untrained(position, batch))

    def read_ahead(self, epoch: int) -> Generator[T, None, None]:
        """The items of an epoch, without a change of any position. Nothing if the data cannot be read again."""
        if self._source.deals_again:
            yield from self._read(DataPosition(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position for a checkpoint."""
        return self.cursor.state_dict()

    @property
    def next_state(self) -> dict[str, Any]:
        """The position of the next global batch, for a rank that joins: an epoch that was left early is over."""
        left = self.cursor.over and not self._open and not self._source.read_once
        return Cursor(self.cursor.epoch + 1).state_dict() if left else self.cursor.state_dict()

    @property
    def uneven(self) -> bool:
        """Whether ranks may end at different times, in this epoch or another. The same on every rank."""
        start = self.cursor.start
        if self.claims is not None:
            return False
        return not self._split or self._source.uneven(0) or (start > 0 and self._source.uneven(start))

    @property
    def steps(self) -> int | None:
        """The number of steps of a whole epoch, the same on every rank; None if it is unknown before the end."""
        return self._source.pieces(0)

    def counts(self, position: DataPosition) -> PieceCounts | None:
        """The number of steps of the ranks in an epoch from `position` on, if it is known for all."""
        ranks = (0, self._part.rank, self._part.size - 1)
        most, own, fewest = (self._source.pieces(rank, position.samples) for rank in ranks)
        if most is None or own is None or fewest is None or not self._split or self.claims is not None:
            return None
        return PieceCounts(most, own, fewest)

    def __len__(self) -> int:
        """The number of steps of this rank in a whole epoch."""
        found = self._source.pieces(self._part.rank)
        if found is None:
            raise TypeError("the length of this data is unknown before it was read")
        return found

    def begin(self, work: int | None = None) -> DataPosition:
        """Start an iteration; see `Cursor.begin` for `work`."""
        if self._next_part is not None:
            self._source.regroup(self._next_part)
            self._part, self._next_part = self._next_part, None
        position = self.cursor.begin(self._source.read_once, work)
        self._open.add(position)
        return position

    def leave(self, position: DataPosition, work: int | None = None) -> None:
        """An iteration is complete or ends early; see `Cursor.leave` for `work`."""
        self._open.discard(position)
        if position.ended:
            self.cursor.finish(position)
        else:
            self.cursor.leave(position, work)

    def __iter__(self) -> Iterator[T]:
        position = self.begin()
        try:
            yield from self.read(position)
        finally:
            self.leave(position)


class Sharded(EpochReader[Piece]):
    """One rank's share of the data that `size` ranks read together. Iterating returns the `Piece`s of an epoch.

    `data` is a DataLoader, whose batch size is that of one rank; a Dataset, with the samples of a rank in `batch`
    (shuffled, unless `shuffle` is False); or any iterable of ready batches. All options of a DataLoader stay. Every
    rank passes the same data and seed; with `split=False` each passes its own data, and nothing is shared.

    Each iteration is a new epoch, as with a DataLoader; the first one after the cursor was loaded continues where the
    checkpoint was saved. With `pad=False`, for evaluation, a rank may have no data at all.

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
        self._pad = pad
        loader = as_loader(data, batch, shuffle)
        self.data = data if loader is None else loader
        """The DataLoader that is read, also for a Dataset; else the iterable."""
        part = partition_of(rank, size, seed, split, pad)
        super().__init__(_source(data, loader, part, split, drop_last), part, cursor, split)
        self._claimed: tuple[tuple[int, int], list[list[Any]], EpochClaims] | None = None
        """The epoch whose batches are claimed, after how many loads of a position, all its batches, and the claims."""

    @property
    def batch(self) -> int:
        """Samples of a full batch of one rank, which has the weight 1.0."""
        return self._source.batch

    @property
    def claimable(self) -> bool:
        """Whether workers can claim the batches: the data has indices, and is shared among them."""
        return self._split and isinstance(self._source, IndexedSource)

    def _read_claimed(self, position: DataPosition, epochs: Epochs) -> Generator[Piece, None, None]:
        source = self._source
        assert isinstance(source, IndexedSource), "`claimable` was asked before"
        batches, first = source.batches_of(position.epoch), 0
        # A resumed epoch. Shares of lost ranks that were not trained begin at these places, or later.
        trained = min([position.samples, *(lost.start for lost in position.lost_shares)])
        while first < len(batches) and len(batches[first]) <= trained:
            trained, first = trained - len(batches[first]), first + 1
        claims = epochs.begin(position.epoch, self.cursor.loads, len(batches), first)
        self._claimed = (position.epoch, self.cursor.loads), batches, claims
        try:
            while True:
                yield from source.read_claimed(position, batches, claims)
                if not claims.wait_for_more():
                    return
        finally:
            claims.leave()

    def state_dict(self) -> dict[str, Any]:
        """The position for a checkpoint. If batches are claimed, it is before the first that was not reported."""
        now = self.cursor.epoch, self.cursor.loads
        if self._claimed is None or self._claimed[0] != now:
            return super().state_dict()
        _, batches, claims = self._claimed
        return Cursor(now[0], sum(map(len, batches[: claims.first_open]))).state_dict()

    def _read(self, position: DataPosition) -> Generator[Piece, None, None]:
        if self.claims is not None:
            yield from self._read_claimed(position, self.claims)
            return
        empty = position.samples == 0
        for piece in self._source.read(position):
            empty = False
            yield piece
        if empty and self._pad:
            raise IncompatibleError(
                f"epoch {position.epoch} has no data for rank {self._part.rank}: an iterator or generator can be read "
                "only once (pass an iterable that starts again), and every worker needs at least one batch"
            )


def partition_of(rank: int, size: int, seed: int, split: bool = True, pad: bool = True) -> RankPartition:
    """The partition of a rank. Without a split each rank is alone, with its own seed."""
    if not 0 <= rank < size:
        raise SpecError(f"rank={rank} is not one of {size} ranks")
    if split:
        return RankPartition(rank, size, seed, rank, not pad)
    return RankPartition(0, 1, mix_seeds(seed, rank), rank, not pad)


def as_loader(data: Any, batch: int | None, shuffle: bool | None) -> DataLoader[Any] | None:
    """`data` if it is a DataLoader, a DataLoader over it if it is a Dataset, else None."""
    if isinstance(data, DataLoader):
        if batch is not None or shuffle is not None:
            raise SpecError(f"batch={batch}, shuffle={shuffle}: a DataLoader has its own; leave them out")
        # A subclass with its own __iter__ is read as an iterable of ready batches.
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


def _source(
    data: Any, loader: DataLoader[Any] | None, part: RankPartition, split: bool, drop_last: bool | None
) -> Source:
    if loader is None:
        if not isinstance(data, Iterable):
            raise IncompatibleError(
                f"a {type(data).__name__} cannot be sharded: pass a DataLoader, a Dataset or an iterable of batches"
            )
        return ReadyBatchSource(data, part, drop_last)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, part, drop_last)
    if split:
        refuse_distributed(loader)
    if loader.batch_sampler is None:
        raise IncompatibleError(
            "the loader has batch_size=None over a dataset with indices: say how many samples each "
            "worker takes in a step, for example DataLoader(..., batch_size=32)"
        )
    return (BatchSource if loader.batch_size is None else SampleSource)(loader, part, drop_last)
