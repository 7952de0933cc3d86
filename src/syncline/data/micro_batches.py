"""`MicroBatches`: a global batch of one size for any number of workers (strong scaling)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from syncline.data.cursor import Cursor, DataPosition
from syncline.data.loader import BatchRequest
from syncline.data.order import refuse_distributed
from syncline.data.partition import RankShare, mix_seeds, split_evenly
from syncline.data.sharded import EpochReader, as_loader, partition_of
from syncline.data.sources import SampleSource
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


class MicroBatches(EpochReader[MicroStep]):
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
        if micro_batch is not None and micro_batch < 1:
            raise SpecError(f"micro_batch={micro_batch}: a micro-batch has at least one sample")
        self.global_batch = global_batch
        loader = as_loader(data, None if isinstance(data, DataLoader) else global_batch, shuffle)
        if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise UnsupportedError(
                f"micro-batches of a {type(data).__name__}: they need a Dataset with indices, or a DataLoader "
                "with a batch_size over one. run.shard takes any data"
            )
        refuse_distributed(loader)
        self.micro_batch = loader.batch_size if micro_batch is None else micro_batch
        part = partition_of(rank, size, seed)
        self._samples = SampleSource(loader, part, drop_last, global_batch)
        super().__init__(self._samples, part, cursor)

    def _read(self, position: DataPosition) -> Generator[MicroStep, None, None]:
        part = self._part
        requests = self._requests(self._samples.shares(position), position.epoch)
        batches = self._samples.reader.read(requests, mix_seeds(part.seed, position.epoch, part.who))
        for tag, batch in batches:
            position.advance(tag[0].samples)
            step = MicroStep(tag, batch, batches, self.global_batch / part.size)
            yield step
            if step.unread:
                raise IncompatibleError(
                    f"a step was left with {step.unread} of its {step.parts} micro-batches unread: the gradients are "
                    "reduced in the last one, for which the other workers wait. Read them all"
                )

    def _requests(self, shares: Iterator[RankShare], epoch: int) -> Iterator[BatchRequest[TaggedShare]]:
        for each in shares:
            parts = split_evenly(each.indices, self.micro_batch)
            sizes = [len(part) for part in parts]
            for number, part in enumerate(parts):
                yield (each, sizes), part, (self._part.seed, epoch, each.start, self._part.who, number)
