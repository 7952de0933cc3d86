"""The run log: append-only, one JSON object a line, keys as in MLPerf's mllog, ours under `sl_`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from syncline.errors import ProtocolError
from syncline.events.base import Event

__all__ = ["RunLog", "read_log"]


class RunLog:
    """A sink that appends to `<folder>/log.jsonl`. Each line is flushed: a killed run keeps its log.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> log = RunLog(folder)
    >>> log.write(Event("seed", 7, seconds=0.5))
    >>> log.close()
    >>> read_log(folder)[0]["value"]
    7
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        _cut_back(path / "log.jsonl")
        self._file = open(path / "log.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (held open)

    def write(self, event: Event) -> None:
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


def _cut_back(path: Path) -> None:
    """Take away a last line that a crash cut off, before the next line grows together with it."""
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
