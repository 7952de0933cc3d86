"""The position of a run in its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from syncline.errors import IncompatibleError

__all__ = ["Cursor", "DataPosition"]


class DataPosition:
    """The epoch of one iteration, and the number of its samples that all ranks together have read.

    >>> position = DataPosition(epoch=2)
    >>> position.advance(64)
    >>> position
    DataPosition(epoch=2, samples=64)
    """

    def __init__(self, epoch: int = 0, samples: int = 0, streams: list[int] | None = None) -> None:
        self.epoch = epoch
        self.samples = samples
        self.streams = [] if streams is None else list(streams)
        """The number of items that each loader process has read, if each reads its own stream."""

    def advance(self, samples: int) -> None:
        """Count samples that all ranks together have read."""
        self.samples += samples

    def __repr__(self) -> str:
        kind = "Cursor" if isinstance(self, Cursor) else "DataPosition"
        return f"{kind}(epoch={self.epoch}, samples={self.samples})"


class Cursor(DataPosition):
    """The position of the latest batch. A checkpoint stores it.

    An iteration starts a new epoch, as with a DataLoader. Only the first one after `load_state_dict` continues where
    the checkpoint was saved. The cursor moves before a batch is returned, so that a checkpoint in the loop's body
    counts that batch. In the body of the epoch's last batch the epoch is not over, and a run resumed from there first
    sees an empty epoch. So this loop does the same, wherever it was interrupted:

        for epoch in range(cursor.epoch, epochs):
            for batch in data: ...
            scheduler.step()

    >>> cursor = Cursor()
    >>> position = cursor.begin()
    >>> position.advance(64)
    >>> cursor.follow(position)
    >>> cursor.state_dict()
    {'epoch': 0, 'samples': 64, 'streams': []}
    >>> cursor.begin()
    DataPosition(epoch=1, samples=0)
    """

    def __init__(self, epoch: int = 0, samples: int = 0) -> None:
        super().__init__(epoch, samples)
        self.pending = samples > 0
        """Whether the next iteration continues from here."""
        self.start = samples
        """The position at which the latest iteration started, or the pending one starts."""
        self.over = False
        """Whether the latest iteration has returned its last batch, or was left."""
        self._latest: _Iteration | None = None
        self._loaded = 0

    @property
    def next_epoch(self) -> int:
        """The epoch that is being read; between two iterations, the epoch of the next one."""
        return self.epoch + (self.over and self.samples > 0)

    def begin(self, read_once: bool = False, work: int | None = None) -> DataPosition:
        """Start an iteration: at the start of the next epoch, unless a resumed one is pending.

        `read_once`: the data can be read only once, so a second iteration continues in the same epoch. `work` is the
        number of training steps so far, if it is known: an unfinished iteration that started at the same number only
        peeked at the data, and is undone.
        """
        if self._latest is not None and self._latest.unused(work):
            self._restore(self._latest.before)
        latest = None if self.over else self._latest
        before = _CursorState(
            self.epoch, self.samples, tuple(self.streams), self.start, self.pending, self.over, latest
        )
        if self.samples and not (self.pending or read_once):
            self._end_epoch()
        self.pending, self.over, self.start = False, False, self.samples
        self._latest = _Iteration(self, before, None if read_once else work, self._loaded)
        return self._latest

    def follow(self, position: DataPosition, last: bool = False) -> None:
        """Move to the position of a batch; `last`: it is the last one of the epoch.

        An iteration that started before a checkpoint was loaded does not move the cursor any more.
        """
        if isinstance(position, _Iteration) and position.loaded == self._loaded:
            self._latest, self.over = position, last
            self.epoch, self.samples, self.streams = position.epoch, position.samples, list(position.streams)

    def finish(self, position: DataPosition) -> None:
        """An iteration is complete: move to the start of the next epoch."""
        if position is self._latest:
            self._end_epoch()

    def leave(self, position: DataPosition, work: int | None = None) -> None:
        """An iteration ends early. If nothing was trained during it, the cursor moves back to where it was before."""
        if self._latest is None or position is not self._latest:
            return
        if self._latest.unused(work):
            self._restore(self._latest.before)
        elif self.over:
            self._end_epoch()
        else:
            self.over = True

    def state_dict(self) -> dict[str, int | list[int]]:
        """Whole numbers for a checkpoint."""
        return {"epoch": self.epoch, "samples": self.samples, "streams": list(self.streams)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of `state_dict()`. The next iteration continues there."""
        epoch, samples, streams = state.get("epoch"), state.get("samples"), state.get("streams", [])
        if not isinstance(streams, list) or not all(map(_is_count, (epoch, samples, *streams))):
            raise IncompatibleError(
                f"the position in the data cannot be read from {dict(state)}: expected the whole numbers epoch and "
                "samples of Cursor.state_dict()"
            )
        assert epoch is not None
        assert samples is not None
        self._loaded += 1
        self._restore(_CursorState(epoch, samples, tuple(streams), samples, True, False, None))

    def _end_epoch(self) -> None:
        self._restore(_CursorState(self.epoch + 1, 0, (), 0, False, False, None))

    def _restore(self, state: _CursorState) -> None:
        self.epoch, self.samples, streams, self.start, self.pending, self.over, self._latest = state
        self.streams = list(streams)


class _CursorState(NamedTuple):
    """The whole state of a cursor."""

    epoch: int
    samples: int
    streams: tuple[int, ...]
    start: int
    pending: bool
    over: bool
    latest: _Iteration | None


class _Iteration(DataPosition):
    """The position of one iteration, and the cursor's state before it."""

    def __init__(self, cursor: Cursor, before: _CursorState, work: int | None, loaded: int) -> None:
        super().__init__(cursor.epoch, cursor.samples, cursor.streams)
        self.before = before
        self.work = work
        self.loaded = loaded

    def unused(self, work: int | None) -> bool:
        """Whether nothing was trained since it started."""
        return self.work is not None and self.work == work


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
