"""The folder of a run's checkpoints: which there are, writing one aside, and taking old ones away.

step-00000100/              a checkpoint, whole: it got this name by one rename
step-00000100-2/            the same step saved again; the first one goes once this is there
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from syncline.training.checkpoint.files import sync

__all__ = ["Attempt", "Entry", "entries", "prune", "sweep"]

logger = logging.getLogger("syncline")

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_ASIDE = re.compile(r"\.step-\d{8,}\.[0-9a-z]+")


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


class Attempt:
    """A checkpoint being written aside. It becomes one by `commit`, at once and whole, or nothing by `discard`."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.step = step
        self.path = folder / f".{Entry(step, 1).name}.{secrets.token_hex(6)}"
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._lock = _hold(self._lock_path)  # before the folder: one without a lock is nobody's
        try:
            self.path.mkdir()
        except BaseException:
            self._let_go()
            raise

    def commit(self) -> Path:
        """Give it its name. Everything in it is on the disk already."""
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
        self._let_go()
        return target

    def discard(self) -> None:
        """Take away what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._lock >= 0:
            with suppress(FileNotFoundError):
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = -1


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


def prune(folder: Path, written: Entry, keep: int | None) -> None:
    """Keep the newest `keep` checkpoints and the one just written; earlier editions of its step go in any case."""
    others = [entry for entry in entries(folder) if entry != written]
    stale = [entry for entry in others if entry.step == written.step and entry.edition < written.edition]
    rest = [entry for entry in others if entry not in stale]
    if keep is not None:
        stale += rest[: max(0, len(rest) - (keep - 1))]
    for entry in stale:
        # Out of sight first: a checkpoint that is half removed must not look like one.
        aside = folder / f".{Entry(entry.step, 1).name}.{secrets.token_hex(6)}"
        try:
            os.rename(folder / entry.name, aside)
            shutil.rmtree(aside)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s", folder / entry.name, error)


def _hold(path: Path) -> int:
    """A lock file of our own, locked. It is made anew if a sweep takes it away between making and locking."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with suppress(OSError):  # a file system without locks: then nobody sweeps either
                fcntl.flock(handle, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
