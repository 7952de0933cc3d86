"""The registry of a race: every run that was begun, in one chain that cannot lose a link unnoticed.

```text
{"event": "planned", …, "previous": "",     "hash": "a1…"}
{"event": "begun",   …, "previous": "a1…",  "hash": "b7…"}     hash = SHA-256 of the line without its hash
{"event": "ended",   …, "previous": "b7…",  "hash": "0c…"}     with the SHA-256 of the run's files
```

Lines are only ever appended. A line that is changed, taken out or put in breaks the chain behind it; a file that was
edited after its run no longer has the sum that was written down then.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.training.lock import FileLock, LockedError

__all__ = ["FILES", "Registry", "digest_files", "link", "locked", "read_registry", "sha256"]

FILES = ("log.jsonl", "config.json", "system.json")
"""Of a run, whose sums are kept."""


class Registry:
    """Appends to `registry.jsonl`; each line is on the disk before the call returns.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "registry.jsonl"
    >>> registry = Registry(path)
    >>> registry.append("begun", run="runs/allreduce/4w-seed1")
    >>> registry.append("ended", run="runs/allreduce/4w-seed1", status="finished")
    >>> lines, problems = read_registry(path)
    >>> [line["event"] for line in lines], problems
    (['begun', 'ended'], [])
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        _cut_back(path)
        lines, _ = read_registry(path) if path.exists() else ([], [])
        self._previous = str(lines[-1].get("hash", "")) if lines else ""

    def append(self, event: str, **facts: Any) -> None:
        """Write one line."""
        line = link({"event": event, "time_ms": time.time_ns() // 1_000_000, **facts}, self._previous)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._previous = line["hash"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep others from writing inside: two of them would tear the chain. The lock ends with the process."""
    if not path.exists():
        raise ProtocolError(f"{path} is missing, so it is not known which runs are done; begin a new race")
    try:
        lock = FileLock(path)
    except LockedError:
        where = path.parent
        raise IncompatibleError(f"{where} is in use by another race: wait for it, or stop it") from None
    except OSError as error:
        why = error.strerror or error
        raise SpecError(f"{path} cannot be written to ({why}): a race must be able to write there") from None
    with lock:
        yield


def _cut_back(path: Path) -> None:
    """A last line without an end was never whole: the power went while it was written."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def link(facts: Mapping[str, Any], previous: str) -> dict[str, Any]:
    """A line that hangs on the one before it."""
    line = {**facts, "previous": previous}
    line.pop("hash", None)
    return {**line, "hash": hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()}


def read_registry(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines, and what is wrong with the chain: nothing, as a rule."""
    lines: list[dict[str, Any]] = []
    problems: list[str] = []
    previous = ""
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            problems.append(f"{path.name}, line {number} is not JSON")
            continue
        if not isinstance(line, dict):
            problems.append(f"{path.name}, line {number} is not a JSON object")
            continue
        if line.get("previous") != previous:
            problems.append(f"{path.name}, line {number} does not hang on the line before it: one is missing or moved")
        elif link(line, previous)["hash"] != line.get("hash"):
            problems.append(f"{path.name}, line {number} was changed after it was written")
        previous = str(line.get("hash", ""))
        lines.append(line)
    return lines, problems


def digest_files(folder: Path) -> dict[str, str]:
    """The sums of a run's files; of those that there are."""
    return {name: sha256(folder / name) for name in FILES if (folder / name).exists()}


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
