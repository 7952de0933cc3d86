"""The position of a run in its data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from syncline.data.partition import LostShares
from syncline.errors import IncompatibleError, SpecError

__all__ = ["Cursor", "DataPosition"]

MAX_UNTRAINED_STEPS = 1024
"""The largest number of steps whose shares a lost rank may leave to the others."""


class DataPosition:
    """The epoch of one iteration, and the number of its samples that all ranks together have read.

    >>> position = DataPosition(epoch=2)
    >>> position.advance(64)
    >>> position
    DataPosition(epoch=2, samples=64)
    """

    def __init__(
        self,
        epoch: int = 0,
        samples: int = 0,
        streams: list[int] | None = None,
        lost_shares: tuple[LostShares, ...] = (),
    ) -> None:
        self.epoch = epoch
        self.samples = samples
        self.streams = [] if streams is None else list(streams)
        """The number of items that each loader process has read, if each reads its own stream."""
        self.lost_shares = lost_shares
        """The shares of this epoch that lost ranks have not trained, by their start. They change the epoch's order."""
        self.ended = False
        """Whether this rank has read all its shares of the epoch."""
        self.complete = False
        """Whether no global batch follows that of its last share, where it has read all its shares."""
        self._starts: deque[int] = deque(maxlen=MAX_UNTRAINED_STEPS)
        self._batch: LostShares | None = None

    def advance(self, samples: int) -> None:
        """Count samples that all ranks together have read."""
        if self._batch is not None:
            self._starts.clear()  # those batches were distributed over another number of ranks
        self._starts.append(self.samples)
        self.samples += samples
        self._batch = None

    @property
    def started(self) -> bool:
        """Whether a global batch was read."""
        return bool(self._starts)

    @property
    def former_size(self) -> int | None:
        """The number of ranks that shared the latest global batch, if the team has changed since; else None."""
        return None if self._batch is None else self._batch.size

    def lose(self, size: int, ranks: tuple[int, ...], steps: int, untrained: Callable[[LostShares], int]) -> int:
        """Move back behind what was trained of the latest global batches. Returns the number of the other samples.

        `size` ranks shared the last `steps` batches, and `ranks` of these have not trained their shares. A later call
        for the same batch adds ranks. `untrained` counts the samples of lost shares.
        """
        batch = self._batch
        if batch is None or not batch.ranks:
            start = self._starts[-min(steps, len(self._starts))]
            batch = LostShares(start, self.samples - start, size, ())
        if any(rank >= size or rank < 0 for rank in ranks):
            raise SpecError(f"lost={ranks}: the current batch was distributed over {size} ranks")
        if self.lost_shares and self.lost_shares[-1] is batch:
            self.lost_shares = self.lost_shares[:-1]
        self._batch = batch = batch._replace(ranks=tuple(sorted({*batch.ranks, *ranks})))
        count = untrained(batch)
        if count:
            self.lost_shares += (batch,)
        self.samples = batch.start + batch.samples - count
        return count

    def end(self) -> None:
        """This rank has read all its shares. A global batch that other ranks still have is the next one."""
        self.ended = True
        if self._batch is not None:
            self._starts.clear()
            self._batch = None

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
    def loads(self) -> int:
        """How often a position was loaded."""
        return self._loaded

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
            self.epoch,
            self.samples,
            tuple(self.streams),
            self.lost_shares,
            self.start,
            self.pending,
            self.over,
            latest,
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
            self.lost_shares = position.lost_shares

    def regroup(self, position: DataPosition, over: bool) -> None:
        """The number of ranks has changed in the middle of an iteration; `over`: this rank has no more batch in it."""
        if position is self._latest or position.ended:
            self.follow(position, over)
            self.start = self.samples

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

    def pass_epoch(self) -> None:
        """The other workers have finished the epoch that would be read next: the next iteration reads the one after."""
        self._end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Whole numbers for a checkpoint. Lost shares are [start, samples, size, *ranks], if there are any."""
        state: dict[str, Any] = {"epoch": self.epoch, "samples": self.samples, "streams": list(self.streams)}
        if self.lost_shares:
            state["lost_shares"] = [[start, samples, size, *ranks] for start, samples, size, ranks in self.lost_shares]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of `state_dict()`. The next iteration continues there."""
        epoch, samples, streams = state.get("epoch"), state.get("samples"), state.get("streams", [])
        lost = state.get("lost_shares", [])
        lists = all(isinstance(each, list) for each in (streams, lost))
        if not lists or not all(map(_is_count, (epoch, samples, *streams))) or not all(map(_is_lost_share, lost)):
            raise IncompatibleError(
                f"the position in the data cannot be read from {dict(state)}: expected the whole numbers epoch and "
                "samples of Cursor.state_dict()"
            )
        assert epoch is not None
        assert samples is not None
        self._loaded += 1
        lost_shares = tuple(LostShares(start, count, size, tuple(ranks)) for start, count, size, *ranks in lost)
        self._restore(_CursorState(epoch, samples, tuple(streams), lost_shares, samples, True, False, None))

    def _end_epoch(self) -> None:
        self._restore(_CursorState(self.epoch + 1, 0, (), (), 0, False, False, None))

    def _restore(self, state: _CursorState) -> None:
        self.epoch, self.samples, streams, self.lost_shares, self.start, self.pending, self.over, self._latest = state
        self.streams = list(streams)


class _CursorState(NamedTuple):
    """The whole state of a cursor."""

    epoch: int
    samples: int
    streams: tuple[int, ...]
    lost_shares: tuple[LostShares, ...]
    start: int
    pending: bool
    over: bool
    latest: _Iteration | None


class _Iteration(DataPosition):
    """The position of one iteration, and the cursor's state before it."""

    def __init__(self, cursor: Cursor, before: _CursorState, work: int | None, loaded: int) -> None:
        super().__init__(cursor.epoch, cursor.samples, cursor.streams, cursor.lost_shares)
        self.before = before
        self.work = work
        self.loaded = loaded

    def unused(self, work: int | None) -> bool:
        """Whether nothing was trained since it started."""
        return self.work is not None and self.work == work


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_lost_share(value: object) -> bool:
    return isinstance(value, list) and len(value) > 3 and all(map(_is_count, value)) and max(value[3:]) < value[2]
