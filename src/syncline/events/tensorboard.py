"""Numbers of a run as TensorBoard shows them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from syncline.errors import UnsupportedError
from syncline.events.base import Event

__all__ = ["TensorBoardSink"]

TAGS = {
    "train_loss": "loss/training",
    "eval_loss": "loss/validation",
    "sl_learning_rate": "learning rate",
    "sl_samples_per_second": "speed/samples per second",
    "sl_bytes_per_second": "speed/bytes per second",
    "sl_exposed_share": "speed/exposed share",
}
"""What a number of the run log is called there; others keep their key."""


class TensorBoardSink:
    """A sink that writes numbers whose metadata tell a `step` as scalars. Needs the package tensorboard.

    Everything else (texts, spans, points without a step) is left to the run log.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
        except ImportError:
            raise UnsupportedError(
                "TensorBoard's files need the package tensorboard: pip install 'syncline[tensorboard]'"
            ) from None
        self._closed = False

    def write(self, event: Event) -> None:
        step, value = event.metadata.get("step"), event.value
        if self._closed or event.kind != "POINT_IN_TIME" or step is None:
            return
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._writer.add_scalar(TAGS.get(event.key, event.key), value, global_step=int(step))

    def close(self) -> None:
        """Flush and close. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._writer.close()
