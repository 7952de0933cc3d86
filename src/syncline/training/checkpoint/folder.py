"""The folder of a run's checkpoints: which there are, writing one aside, and taking old ones away.

step-00000100/              a checkpoint, whole: it got this name by one rename
step-00000100-2/            the same step saved again; the first one goes once this is there
abandoned-step-00000120/    training went back to an older checkpoint, and this one is of a later step
damaged-step-00000090/      it was found damaged when checkpoints were counted
.step-00000200.3f9a.lock    held by whoever writes the one below, let go of by the kernel when that process dies
.step-00000200.3f9a/        being written, or left by a dead attempt
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import ProtocolError
from syncline.training.checkpoint.files import sync
from syncline.training.checkpoint.manifest import verify_changed
from syncline.training.run_folder import FileLock

__all__ = ["Attempt", "Entry", "Resumed", "entries", "entries_aside", "prune", "set_abandoned_aside", "sweep"]

logger = logging.getLogger("syncline")

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_ASIDE = re.compile(r"\.step-\d{8,}\.[0-9a-z]+")
ABANDONED, DAMAGED = "abandoned", "damaged"
"""Prefixes of the names of checkpoints that `entries` does not list."""


@dataclass(frozen=True, order=True)
class Entry:
    """A checkpoint by its name: the later edition of a step counts as newer."""

    step: int
    edition: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f"-{self.edition}" if self.edition > 1 else "")


def entries(folder: Path) -> list[Entry]:
    """The checkpoints in a folder, oldest first; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    return sorted(Entry(int(match[1]), int(match[2] or 1)) for match in found)


def entries_aside(folder: Path, step: int) -> list[str]:
    """The names of the checkpoints of a step that were set aside."""
    name = Entry(step, 1).name
    return sorted(path.name for kind in (ABANDONED, DAMAGED) for path in folder.glob(f"{kind}-{name}*"))


class Attempt:
    """A checkpoint being written aside. It becomes one by `commit`, at once and whole, or nothing by `discard`."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.step = step
        self.path = folder / f".{Entry(step, 1).name}.{secrets.token_hex(6)}"
        # Before the folder is made: a folder without a lock counts as abandoned.
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"), wait=True, own=True)
        try:
            self.path.mkdir()
        except BaseException:
            self._lock.release()
            raise

    def commit(self) -> int:
        """Rename it to its final name. Everything in it is on the disk already. Returns its edition of the step."""
        same = [entry.edition for entry in entries(self.folder) if entry.step == self.step]
        edition = max(same, default=0) + 1
        while True:
            target = self.folder / Entry(self.step, edition).name
            try:
                os.rename(self.path, target)
            except OSError as error:  # another run that saves here was quicker
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                edition += 1
            else:
                break
        sync(self.folder)
        self._lock.release()
        return edition

    def discard(self) -> None:
        """Take away what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def sweep(folder: Path) -> None:
    """Take away what dead attempts have left. One whose writer lives, in whatever process, holds its lock."""
    for path in folder.glob(".step-*"):
        if _ASIDE.fullmatch(path.name) and not path.with_name(path.name + ".lock").exists():
            shutil.rmtree(path, ignore_errors=True)
    for lock in folder.glob(".step-*.lock"):
        aside = lock.with_suffix("")
        if not _ASIDE.fullmatch(aside.name):
            continue
        try:
            handle = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(aside, ignore_errors=True)
            lock.unlink(missing_ok=True)
        except OSError:  # its writer lives, or the file system has no locks: then it stays
            pass
        finally:
            os.close(handle)


class Resumed:
    """By folder: the step from which training was resumed, until a checkpoint is written there."""

    def __init__(self) -> None:
        self.steps: dict[Path, int] = {}

    def close(self) -> None:
        """Forget them; called when the world is left."""
        self.steps.clear()


def set_abandoned_aside(folder: Path, step: int, resumed: int | None = None) -> None:
    """Rename abandoned checkpoints, and warn; called before one of `step` is written.

    Steps only grow during a run. So checkpoints of later steps belong to training that was given up, and `load` must
    not take one of them for the newest. If training was resumed from step `resumed`, so do all after that step.
    """
    last = step if resumed is None else min(step, resumed)
    names = _set_aside(folder, [entry for entry in entries(folder) if entry.step > last], ABANDONED)
    if names:
        logger.warning(
            "the checkpoint of step %d is written, and %s has others of later steps than %d: training went back to an "
            "older one. They are kept as %s: load() takes them only by their path, and nothing removes them",
            step,
            folder,
            last,
            ", ".join(names),
        )


def prune(folder: Path, written: Entry, keep: int | None) -> None:
    """Keep the newest `keep` good checkpoints and the one just written; earlier editions of its step go in any case.

    A damaged one does not count: it is set aside, and an older good one stays in its place.
    """
    others = [entry for entry in entries(folder) if entry != written]
    stale = [entry for entry in others if entry.step == written.step and entry.edition < written.edition]
    rest = [entry for entry in others if entry not in stale]
    if keep is not None and len(rest) > keep - 1:
        stale += _beyond(folder, rest, keep - 1)
    for entry in stale:
        # Out of sight first: a checkpoint that is half removed must not look like one.
        aside = folder / f".{Entry(entry.step, 1).name}.{secrets.token_hex(6)}"
        try:
            os.rename(folder / entry.name, aside)
            shutil.rmtree(aside)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s", folder / entry.name, error)


def _beyond(folder: Path, found: Sequence[Entry], count: int) -> list[Entry]:
    """Those that are older than the newest `count` good ones; damaged ones among the newer are set aside."""
    good = 0
    for place in range(len(found) - 1, -1, -1):
        if good == count:
            return list(found[: place + 1])
        entry = found[place]
        try:
            verify_changed(folder / entry.name)
        except ProtocolError as error:
            for name in _set_aside(folder, [entry], DAMAGED):
                logger.warning("%s; it does not count in keep, and is renamed to %s", error, name)
        except OSError:  # it cannot be read now: keep it
            good += 1
        else:
            good += 1
    return []


def _set_aside(folder: Path, found: Sequence[Entry], kind: str) -> list[str]:
    """Rename checkpoints so that `entries` does not list them. Returns their new names."""
    names: list[str] = []
    for entry in found:
        first = name = f"{kind}-{Entry(entry.step, 1).name}"
        number = 1
        while (folder / name).exists():
            number += 1
            name = f"{first}-{number}"
        try:
            os.rename(folder / entry.name, folder / name)
        except OSError as error:
            logger.warning("cannot set the checkpoint %s aside: %s", folder / entry.name, error)
        else:
            names.append(name)
    return names
