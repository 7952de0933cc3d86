"""Where in the data a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from syncline.errors import IncompatibleError

__all__ = ["Cursor", "Place"]


class Place:
    """The epoch that one iteration reads, and how many of its samples all ranks together have consumed.

    >>> place = Place(epoch=2)
    >>> place.advance(64)
    >>> place
    Place(epoch=2, samples=64)
    """

    def __init__(self, epoch: int = 0, samples: int = 0, streams: list[int] | None = None) -> None:
        self.epoch = epoch
        self.samples = samples
        self.streams = [] if streams is None else list(streams)
        """The number of consumed items of each loader process, where each reads a stream of its own."""

    def advance(self, samples: int) -> None:
        """Count samples as consumed by all ranks together."""
        self.samples += samples

    def __repr__(self) -> str:
        kind = "Cursor" if isinstance(self, Cursor) else "Place"
        return f"{kind}(epoch={self.epoch}, samples={self.samples})"


class Cursor(Place):
    """The place of the batch that was handed out last: what a checkpoint keeps.

    An iteration begins a fresh epoch, as with a DataLoader. Only after `load_state_dict` the first one goes on where
    the checkpoint was made. The cursor moves before a batch is handed out, so that a checkpoint made in the loop's
    body counts that batch. In the body of the epoch's last batch the epoch is not over, and a run resumed from there
    first sees an epoch with nothing left. So this loop does the same whether or not, and wherever, it was interrupted:

        for epoch in range(cursor.epoch, epochs):
            for batch in data: ...
            scheduler.step()

    >>> cursor = Cursor()
    >>> place = cursor.begin()
    >>> place.advance(64)
    >>> cursor.follow(place)
    >>> cursor.state_dict()
    {'epoch': 0, 'samples': 64, 'streams': []}
    >>> cursor.begin()
    Place(epoch=1, samples=0)
    """

    def __init__(self, epoch: int = 0, samples: int = 0) -> None:
        super().__init__(epoch, samples)
        self.pending = samples > 0
        """Whether the next iteration continues from here."""
        self.start = samples
        """Where in its epoch the latest iteration began, or the pending one begins."""
        self.over = False
        """Whether the latest iteration has handed out its last batch, or was left."""
        self._latest: _Iteration | None = None
        self._loaded = 0

    @property
    def next_epoch(self) -> int:
        """The epoch that is being read; between two iterations, the one that the next of them reads."""
        return self.epoch + (self.over and self.samples > 0)

    def begin(self, goes_on: bool = False, work: int | None = None) -> Place:
        """An iteration begins: at the start of the next epoch, unless a resumed one is pending.

        `goes_on`: the data can be read only once, and a second iteration reads on in the same epoch. `work` counts
        the training done so far, where it is known: an unfinished iteration that began at the same count only
        peeked at the data, and is undone.
        """
        if self._latest is not None and self._latest.unused(work):
            self._restore(self._latest.before)
        latest = None if self.over else self._latest
        before = _Standing(self.epoch, self.samples, tuple(self.streams), self.start, self.pending, self.over, latest)
        if self.samples and not (self.pending or goes_on):
            self._end_epoch()
        self.pending, self.over, self.start = False, False, self.samples
        self._latest = _Iteration(self, before, None if goes_on else work, self._loaded)
        return self._latest

    def follow(self, place: Place, last: bool = False) -> None:
        """A batch is handed out; `last`: the last one of the epoch.

        An iteration that began before a checkpoint was loaded does not move the cursor any more.
        """
        if isinstance(place, _Iteration) and place.loaded == self._loaded:
            self._latest, self.over = place, last
            self.epoch, self.samples, self.streams = place.epoch, place.samples, list(place.streams)

    def finish(self, place: Place) -> None:
        """An iteration has nothing more to hand out: go to the beginning of the next epoch."""
        if place is self._latest:
            self._end_epoch()

    def leave(self, place: Place, work: int | None = None) -> None:
        """An iteration ends early. If nothing was trained during it, the cursor goes back to where it was before."""
        if self._latest is None or place is not self._latest:
            return
        if self._latest.unused(work):
            self._restore(self._latest.before)
        elif self.over:
            self._end_epoch()
        else:
            self.over = True

    def state_dict(self) -> dict[str, int | list[int]]:
        """Whole numbers that a checkpoint keeps."""
        return {"epoch": self.epoch, "samples": self.samples, "streams": list(self.streams)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict()` was taken; the next iteration continues there."""
        epoch, samples, streams = state.get("epoch"), state.get("samples"), state.get("streams", [])
        if not isinstance(streams, list) or not all(map(_is_count, (epoch, samples, *streams))):
            raise IncompatibleError(
                f"the place in the data cannot be read from {dict(state)}: expected whole numbers epoch and samples, "
                "as Cursor.state_dict() writes them"
            )
        assert epoch is not None
        assert samples is not None
        self._loaded += 1
        self._restore(_Standing(epoch, samples, tuple(streams), samples, True, False, None))

    def _end_epoch(self) -> None:
        self._restore(_Standing(self.epoch + 1, 0, (), 0, False, False, None))

    def _restore(self, standing: _Standing) -> None:
        self.epoch, self.samples, streams, self.start, self.pending, self.over, self._latest = standing
        self.streams = list(streams)


class _Standing(NamedTuple):
    """The whole state of a cursor."""

    epoch: int
    samples: int
    streams: tuple[int, ...]
    start: int
    pending: bool
    over: bool
    latest: _Iteration | None


class _Iteration(Place):
    """The place of one iteration, and the cursor's state before it."""

    def __init__(self, cursor: Cursor, before: _Standing, work: int | None, loaded: int) -> None:
        super().__init__(cursor.epoch, cursor.samples, cursor.streams)
        self.before = before
        self.work = work
        self.loaded = loaded

    def unused(self, work: int | None) -> bool:
        """Whether nothing was trained since it began."""
        return self.work is not None and self.work == work


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
