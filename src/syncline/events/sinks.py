"""Sinks: the run log and TensorBoard.

The run log is append-only, one JSON object per line, with keys as in MLPerf's mllog, ours under `sl_`.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from syncline.errors import ProtocolError, UnsupportedError
from syncline.events.recorder import RunEvent

__all__ = ["RunLog", "TensorBoardSink", "read_log"]


class RunLog:
    """A sink that appends to `<folder>/log.jsonl`. Each line is flushed: a killed run keeps its log.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> log = RunLog(folder)
    >>> log.write(RunEvent("seed", 7, seconds=0.5))
    >>> log.close()
    >>> read_log(folder)[0]["value"]
    7
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        _remove_partial_line(path / "log.jsonl")
        self._file = open(path / "log.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (held open)

    def write(self, event: RunEvent) -> None:
        line = {
            "time_ms": time.time_ns() // 1_000_000,
            "seconds": event.seconds,
            "event_type": event.kind,
            "key": event.key,
            "value": event.value,
            "metadata": dict(event.metadata),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


def _remove_partial_line(path: Path) -> None:
    """Remove a last line that a crash cut off, so that the next line does not continue it."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """Every line of a run's log. A last line cut off by a crash is left out; other damage is an error."""
    path = Path(folder) / "log.jsonl"
    lines = path.read_bytes().split(b"\n")
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break  # no newline after it: the writer died in mid-line
            raise ProtocolError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(event, dict):
            raise ProtocolError(f"{path}, line {number} is not a JSON object")
        events.append(event)
    return events


TAGS = {
    "train_loss": "loss/training",
    "eval_loss": "loss/validation",
    "sl_learning_rate": "learning rate",
    "sl_samples_per_second": "speed/samples per second",
    "sl_bytes_per_second": "speed/bytes per second",
    "sl_exposed_share": "speed/exposed share",
}
"""The tag in TensorBoard for a key of the run log. Other keys are their own tags."""


class TensorBoardSink:
    """A sink that writes numbers whose metadata has a `step` as scalars. Needs the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        try:
            self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
        except ImportError:
            raise UnsupportedError(
                "TensorBoard's files need the package tensorboard: pip install 'syncline[tensorboard]'"
            ) from None
        self._closed = False

    def write(self, event: RunEvent) -> None:
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
