"""The contract of a source: this rank's pieces of an epoch, from a place in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from syncline.data.cursor import Place

__all__ = ["Counts", "Piece", "Source"]


@dataclass(frozen=True)
class Piece:
    """One rank's batch of one step, and how much it counts in the mean over all ranks.

    >>> Piece(batch=[1, 2, 3], weight=0.75, last=True, count=3, total=1.25).weight
    0.75
    """

    batch: Any
    weight: float
    """Samples of this batch ÷ the batch size: 1.0 but for a short one."""
    last: bool = False
    """Whether this rank has nothing more in this epoch; never True where that shows only afterwards."""
    count: int | None = None
    """Samples of this batch, where they can be counted."""
    total: float | None = None
    """The weights of all ranks in this step, summed, where that is known without asking them."""


class Counts(NamedTuple):
    """How many pieces ranks have in the rest of an epoch. The first rank has the most, the last one the fewest."""

    most: int
    own: int
    fewest: int


class Source(ABC):
    """Data of one kind, and how it is shared out."""

    batch: int
    """Samples in a usual batch of one rank; 1 where batches are ready made and count as one."""

    @property
    def goes_on(self) -> bool:
        """Whether a second iteration continues where the first one stopped, as with an iterator."""
        return False

    @abstractmethod
    def read(self, place: Place) -> Iterator[Piece]:
        """The rest of the epoch; the place moves before each piece is handed out."""

    @abstractmethod
    def uneven(self, start: int) -> bool:
        """Whether some rank may have fewer pieces than another in an epoch read from `start` on."""

    @abstractmethod
    def pieces(self, rank: int, start: int = 0) -> int | None:
        """How many pieces `rank` has in an epoch read from `start` on, where that is known."""
