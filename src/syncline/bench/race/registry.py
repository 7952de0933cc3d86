"""The registry of a race, and the digests of its samples: what proves later that nothing was changed.

```text
{"event": "planned", …, "previous": "",     "hash": "a1…"}
{"event": "begun",   …, "previous": "a1…",  "hash": "b7…"}     hash = SHA-256 of the line without its hash
{"event": "ended",   …, "previous": "b7…",  "hash": "0c…"}     with the SHA-256 of the run's files
```

Lines are only appended. If a line is changed, removed or inserted, the chain of hashes breaks at the next line. If a
file is edited after its run, its SHA-256 differs from the one in the registry.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.file_lock import FileLock, LockedError

if TYPE_CHECKING:
    import torch

    from syncline.workloads.base import Workload

__all__ = [
    "MAX_SPLIT_DIGESTS",
    "RUN_FILES",
    "SPLITS",
    "RunRegistry",
    "digest_files",
    "digest_sample",
    "link",
    "lock_registry",
    "read_registry",
    "read_splits",
    "sha256",
    "write_splits",
]

RUN_FILES = ("log.jsonl", "config.json", "system.json")
"""Files of a run whose SHA-256 is in the registry."""
SPLITS = ("train", "validation", "test")
MAX_SPLIT_DIGESTS = 1 << 17
"""The smallest digests of a large split are stored. Two overlapping splits share some of these, too."""


class RunRegistry:
    """Appends to `registry.jsonl`. Each line is on the disk before the call returns.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "registry.jsonl"
    >>> registry = RunRegistry(path)
    >>> registry.append("begun", run="runs/allreduce/4w-seed1")
    >>> registry.append("ended", run="runs/allreduce/4w-seed1", status="finished")
    >>> lines, problems = read_registry(path)
    >>> [line["event"] for line in lines], problems
    (['begun', 'ended'], [])
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        data = path.read_bytes() if path.exists() else b""
        if data and not data.endswith(b"\n"):  # a crash cut off the last line
            os.truncate(path, data.rfind(b"\n") + 1)
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
def lock_registry(path: Path) -> Iterator[None]:
    """Keep other processes from writing to the registry. The lock ends with the process."""
    if not path.exists():
        raise ProtocolError(f"{path} is missing, so it is not known which runs are done; begin a new race")
    try:
        lock = FileLock(path)
    except LockedError:
        raise IncompatibleError(f"{path.parent} is in use by another race: wait for it, or stop it") from None
    except OSError as error:
        why = error.strerror or error
        raise SpecError(f"{path} cannot be written to ({why}): a race must be able to write there") from None
    with lock:
        yield


def link(facts: Mapping[str, Any], previous: str) -> dict[str, Any]:
    """A line with the hash of the line before it, and its own."""
    line = {**facts, "previous": previous}
    line.pop("hash", None)
    return {**line, "hash": hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()}


def read_registry(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines, and a sentence for each defect of the chain."""
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
            problems.append(f"{path.name}, line {number} does not continue the line before it: one is missing or moved")
        elif link(line, previous)["hash"] != line.get("hash"):
            problems.append(f"{path.name}, line {number} was changed after it was written")
        previous = str(line.get("hash", ""))
        lines.append(line)
    return lines, problems


def digest_files(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that a run has written."""
    return {name: sha256(folder / name) for name in RUN_FILES if (folder / name).exists()}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_splits(workload: Workload, folder: Path) -> dict[str, str]:
    """Write `splits/<name>.u64`, the sorted 8-byte digests of all samples; return the SHA-256 of each file."""
    from syncline.workloads.base import batches

    place = folder / "splits"
    place.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name in SPLITS:
        digests = [
            digest_sample(inputs[row], targets[row])
            for inputs, targets in batches(getattr(workload.splits(), name), 512)
            for row in range(len(inputs))
        ]
        smallest = sorted(digests)[:MAX_SPLIT_DIGESTS]
        data = struct.pack(f"<{len(smallest)}Q", *smallest)
        (place / f"{name}.u64").write_bytes(data)
        sums[name] = hashlib.sha256(data).hexdigest()
    return sums


def read_splits(folder: Path) -> dict[str, frozenset[int]]:
    """The digests that `write_splits` stored, by split. Missing files are left out."""
    digests = {}
    for name in SPLITS:
        path = folder / "splits" / f"{name}.u64"
        if path.exists():
            data = path.read_bytes()
            count = len(data) // 8
            digests[name] = frozenset(struct.unpack(f"<{count}Q", data[: 8 * count]))
    return digests


def digest_sample(inputs: torch.Tensor, target: torch.Tensor) -> int:
    """A 64-bit digest of the bytes of an input and its target."""
    import torch

    digest = hashlib.blake2b(digest_size=8)
    for tensor in (inputs, target):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")
