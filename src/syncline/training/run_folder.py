"""The folder of a run and its files.

```text
runs/digits-20261115-101500/
  log.jsonl            the run log: the source of all reports
  config.json          the settings, and what `auto` has chosen
  system.json          versions and machine
  summary.json         the result, written last
  checkpoints/         step-00000100/ …
  trace-rank0.json     with trace: one per rank
  tensorboard/         with tensorboard
  .lock                while a job writes here
```
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.file_lock import FileLock, LockedError
from syncline.specs import parse

__all__ = ["RunFolder", "checkpoints_in", "fresh_name", "make_writable"]

logger = logging.getLogger("syncline")


class RunFolder:
    """The files of a run. The folder is made when the first file is written.

    >>> folder = RunFolder("runs/a")
    >>> folder.trace(rank=2).as_posix(), folder.trace(rank=0, step=100).as_posix()
    ('runs/a/trace-rank2.json', 'runs/a/trace-rank0-from-step-100.json')
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.log = self.path / "log.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"

    def trace(self, rank: int, step: int = 0) -> Path:
        """The trace of a rank. A resumed run has its own: the first one stays."""
        return self.path / (f"trace-rank{rank}.json" if not step else f"trace-rank{rank}-from-step-{step}.json")

    def used(self) -> bool:
        """Whether a run has written here."""
        return self.log.exists() or self.checkpoints.exists()

    def lock(self) -> FileLock:
        """Lock the folder until the lock is released or this process ends. Raises if another job holds it."""
        make_writable(self.path)
        path = self.path / ".lock"
        try:
            lock = FileLock(path, own=True)
        except LockedError:
            holder = path.read_text(errors="replace").strip() if path.exists() else ""
            raise IncompatibleError(
                f"{self.path} is in use by another job{holder and f' ({holder})'}: wait for it or stop it, or name "
                "another folder"
            ) from None
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        return lock

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write `<name>.json` by a rename, so that a reader sees the old or the new content."""
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / f".{name}.json"
        aside.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(aside, self.path / f"{name}.json")

    def remove(self, name: str) -> None:
        """Remove `<name>.json`, if it exists."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def read(self, name: str) -> dict[str, Any] | None:
        """The content of `<name>.json`, or None if it does not exist."""
        path = self.path / f"{name}.json"
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{path} is not JSON ({error}); remove it to continue without it") from None
        if not isinstance(document, dict):
            raise ProtocolError(f"{path} is not a JSON object; remove it to continue without it")
        return document

    def refusal(self) -> str:
        """The error message for a new run in a folder that has one."""
        return (
            f"{self.path} holds a run already: continue it with --resume auto (resume=True in Python), or name "
            "another folder"
        )


def make_writable(folder: Path, option: str = "--out") -> None:
    """Make a folder for the files of a command. Raises if it cannot be written to. `option` has named it.

    >>> make_writable(Path("/dev/null/runs"))
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: /dev/null/runs cannot be written to (Not a directory): name another folder with --out
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise SpecError(f"{folder} cannot be written to ({why}): name another folder with {option}") from None


def fresh_name(workload: str) -> str:
    """A name for the folder of a new run: the workload's name and the time.

    >>> fresh_name("digits(model='cnn')").rpartition("-")[0].partition("-")[0]
    'digits'
    >>> fresh_name("/home/ada/my spirals.py").partition("-")[0]
    'my_spirals'
    """
    script = workload.endswith(".py")
    name = re.sub(r"[^\w.-]", "_", Path(workload).stem) if script else parse(workload)[0].name
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def checkpoints_in(path: str | Path) -> Path:
    """The folder of checkpoints, given a run's folder, its `checkpoints`, or one checkpoint."""
    inside = RunFolder(path).checkpoints
    return inside if inside.is_dir() else Path(path)
