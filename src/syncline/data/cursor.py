"""Where in the data a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syncline.errors import IncompatibleError

__all__ = ["Cursor"]


class Cursor:
    """The epoch, and how many of its samples all ranks together have consumed.

    It moves before a batch is handed out, so that a checkpoint made in the loop's body counts that batch. When the
    epoch's last batch was worked on it goes to the next epoch, not before: in the body of the last batch the epoch is
    not over, and a run resumed from there first sees an epoch with nothing left. So this loop does the same whether
    it was interrupted or not, wherever that was:

        for epoch in range(cursor.epoch, epochs):
            for batch in data: ...
            scheduler.step()

    >>> cursor = Cursor()
    >>> cursor.advance(64)
    >>> cursor.state_dict()
    {'epoch': 0, 'samples': 64, 'streams': []}
    >>> cursor.end_epoch()
    >>> cursor
    Cursor(epoch=1, samples=0)
    """

    def __init__(self, epoch: int = 0, samples: int = 0) -> None:
        self.epoch = epoch
        self.samples = samples
        self.streams: list[int] = []
        """Where several loader processes read a stream each: how many items of each are consumed."""

    def advance(self, samples: int) -> None:
        """Count samples as consumed by all ranks together."""
        self.samples += samples

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch += 1
        self.samples = 0
        self.streams = []

    def state_dict(self) -> dict[str, int | list[int]]:
        """Whole numbers that a checkpoint keeps."""
        return {"epoch": self.epoch, "samples": self.samples, "streams": list(self.streams)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where `state_dict()` was taken."""
        epoch, samples, streams = state.get("epoch"), state.get("samples"), state.get("streams", [])
        if not isinstance(streams, list) or not all(map(_is_count, (epoch, samples, *streams))):
            raise IncompatibleError(
                f"the place in the data cannot be read from {dict(state)}: expected whole numbers epoch and samples, "
                "as Cursor.state_dict() writes them"
            )
        assert epoch is not None
        assert samples is not None
        self.epoch, self.samples, self.streams = epoch, samples, list(streams)

    def __repr__(self) -> str:
        return f"Cursor(epoch={self.epoch}, samples={self.samples})"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
