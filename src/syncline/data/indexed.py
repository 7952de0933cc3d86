"""Datasets whose samples have numbers: known lengths, one order for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from syncline.data.base import Piece, Source
from syncline.data.cursor import Place
from syncline.data.plan import Deal, Part, Take, count_pieces, deal, deal_batches, ends_unevenly, mixed
from syncline.data.reading import Lot, Reader
from syncline.data.samplers import Order, order_of
from syncline.errors import IncompatibleError

__all__ = ["Batches", "Samples", "check_length", "check_place", "skip"]


class Samples(Source):
    """Samples one by one: a global batch is k·b of them, and rank r takes every k-th beginning with r."""

    def __init__(self, loader: DataLoader[Any], part: Part, drop_last: bool | None) -> None:
        assert loader.batch_size is not None
        self.batch = loader.batch_size
        self._part = part
        self._drop_last = loader.drop_last if drop_last is None else drop_last
        self._order = order_of(loader, part.seed)
        if not part.may_be_empty:
            check_length(self._order.length, part.size, self.batch * part.size, self._drop_last)
        self._reader: Reader[Deal] = Reader(loader)

    def read(self, place: Place) -> Iterator[Piece]:
        take = self._order.begin(place.epoch)
        check_place(place, self._order)
        skip(take, place.samples)
        deals = deal(take, self._part, self.batch * self._part.size, self._drop_last, place.samples)
        yield from read_deals(self._reader, deals, self._part, self.batch, place)

    def uneven(self, start: int) -> bool:
        length = self._order.length
        batch, size = self.batch * self._part.size, self._part.size
        return length is None or ends_unevenly(max(length - start, 0), batch, size, self._drop_last)

    def pieces(self, rank: int, start: int = 0) -> int | None:
        length = self._order.length
        if length is None:
            return None
        return count_pieces(max(length - start, 0), self.batch * self._part.size, rank, self._drop_last)


class Batches(Source):
    """What a batch sampler of the user's puts together: batch i goes to rank i mod k."""

    def __init__(self, loader: DataLoader[Any], part: Part, drop_last: bool | None) -> None:
        usual = getattr(loader.batch_sampler, "batch_size", None)
        self.batch = usual if isinstance(usual, int) and usual > 0 else 1
        self._usual = self.batch if self.batch == usual else None
        self._part = part
        self._drop_last = bool(drop_last)
        self._order = order_of(loader, part.seed)
        if not part.may_be_empty:
            check_length(self._order.length, part.size, part.size, self._drop_last, "batches")
        self._reader: Reader[Deal] = Reader(loader)

    def read(self, place: Place) -> Iterator[Piece]:
        take = self._order.begin(place.epoch)
        batches = chain.from_iterable(iter(partial(take, 1), []))
        first = list(islice(batches, 1))  # the epoch's own, which all ranks know, also those that resume
        usual = self._usual or max([1, *map(len, first)])
        batches = chain(first, batches)
        passed = 0
        while passed < place.samples and (gone := list(islice(batches, 1))):
            passed += len(gone[0])
        deals = deal_batches(lambda count: list(islice(batches, count)), self._part, self._drop_last, place.samples)
        yield from read_deals(self._reader, deals, self._part, usual, place)

    def uneven(self, start: int) -> bool:
        # How many batches the samples before `start` were shows only when they are drawn.
        length = self._order.length
        return length is None or (not self._drop_last and (start > 0 or length % self._part.size != 0))

    def pieces(self, rank: int, start: int = 0) -> int | None:
        length = self._order.length
        if length is None or start > 0:
            return None
        return count_pieces(length, self._part.size, rank, self._drop_last)


def read_deals(reader: Reader[Deal], deals: Iterator[Deal], part: Part, batch: int, place: Place) -> Iterator[Piece]:
    """The pieces of a rank's deals; the place moves before each is handed out."""

    def lots() -> Iterator[Lot[Deal]]:
        for each in deals:
            yield each, each.indices, (part.seed, epoch, each.start, part.who)

    epoch = place.epoch
    for each, data in reader.read(lots(), mixed(part.seed, epoch, part.who)):
        place.advance(each.samples)
        count = len(each.indices)
        yield Piece(data, count / batch, each.last, count, each.samples / batch)


def skip(take: Take, count: int) -> None:
    """Let what was consumed pass, some thousand at a time."""
    while count > 0 and (passed := len(take(min(count, 65536)))):
        count -= passed


def check_length(length: int | None, size: int, batch: int, drop_last: bool, what: str = "samples") -> None:
    """Refuse data that leaves some rank with nothing, epoch after epoch."""
    if length == 0:
        raise IncompatibleError(f"the data is empty (0 {what}): nothing to train on")
    if length is not None and length < size:
        raise IncompatibleError(
            f"{length} {what} cannot be shared out over {size} workers: each needs one at least. Use at most {length} "
            "workers, or pass split=False if each worker has data of its own"
        )
    if length is not None and drop_last and length < batch:
        raise IncompatibleError(
            f"drop_last leaves nothing of {length} {what}: one step of {size} workers takes {batch}. Use a smaller "
            "batch, fewer workers, or drop_last=False"
        )


def check_place(place: Place, order: Order) -> None:
    """Refuse a place behind the end: it was taken in other data."""
    if order.length is not None and place.samples > order.length:
        raise IncompatibleError(
            f"the run stands at sample {place.samples} of epoch {place.epoch}, but an epoch of this data has "
            f"{order.length}: it was saved with other data"
        )
