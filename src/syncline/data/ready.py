"""Any iterable of ready batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from syncline.data.base import Piece, Source
from syncline.data.cursor import Place
from syncline.data.indexed import check_length
from syncline.data.plan import Part, count_pieces, mixed
from syncline.data.randomness import Randomness
from syncline.data.samplers import length_of

__all__ = ["Ready"]


class Ready(Source):
    """Batch i goes to rank i mod k, and each counts as one.

    A rank reads all k batches of a step before it hands out its own, so all ranks know alike who has one.
    """

    def __init__(self, data: Iterable[Any], part: Part, drop_last: bool | None) -> None:
        self.batch = 1
        self._data = data
        self._part = part
        self._drop_last = bool(drop_last)
        self._length = length_of(data)
        self._read = 0  # of an iterator, which can only go forward
        if not part.may_be_empty:
            check_length(self._length, part.size, part.size, self._drop_last, "batches")

    @property
    def goes_on(self) -> bool:
        return isinstance(self._data, Iterator) and self._read > 0

    def read(self, place: Place) -> Iterator[Piece]:
        rank, size = self._part.rank, self._part.size
        fresh = place.samples == 0 and not self._part.may_be_empty
        # What a generator draws must be the same on all ranks.
        randomness = Randomness(mixed(self._part.seed, place.epoch))
        with randomness.used():
            batches = iter(self._data)
            behind = self._read if batches is self._data else 0
            deque(islice(batches, max(0, place.samples - behind)), maxlen=0)
        while True:
            with randomness.used():
                mine, seen = self._step(batches)
            self._read = place.samples + seen
            if fresh and (seen > 0 or batches is not self._data):
                check_length(seen, size, size, self._drop_last, "batches")
            fresh = False
            if seen <= rank or (self._drop_last and seen < size):
                return
            place.advance(seen)
            yield Piece(mine, 1.0, self._is_last(place.samples), total=float(seen))

    def _is_last(self, consumed: int) -> bool:
        if self._length is None:
            return False
        return count_pieces(self._length - consumed, self._part.size, self._part.rank, self._drop_last) == 0

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
        return count_pieces(max(self._length - start, 0), self._part.size, rank, self._drop_last)
