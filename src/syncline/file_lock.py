"""A lock on a file, for processes that write into the same folder."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["FileLock", "LockedError"]

logger = logging.getLogger("syncline")


class LockedError(Exception):
    """Another process holds the lock. Callers raise their own error."""


class FileLock:
    """A lock on a file, held by one process; the kernel releases it when that process ends. A context manager.

    The file is made if it does not exist. With `wait` it waits for the process that holds the lock; otherwise it raises
    a `LockedError`. With `own` the file exists only for the lock, and is removed on release. On a file system without
    locks nothing is locked, and without `wait` a warning says so.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lock"
    >>> with FileLock(path, own=True):
    ...     FileLock(path)
    Traceback (most recent call last):
    ...
    syncline.file_lock.LockedError: ...
    >>> path.exists()
    False
    """

    def __init__(self, path: Path, *, wait: bool = False, own: bool = False) -> None:
        self.path = path
        self._own = own
        self._handle = self._take(wait)

    def _take(self, wait: bool) -> int:
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(handle, self.path, wait)
                # The previous holder may have removed the file; then other processes would not find this one.
                if self.path.exists() and os.path.samestat(os.fstat(handle), self.path.stat()):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def write(self, text: str) -> None:
        """Write a line that other processes show if the file is locked."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, text.encode(), 0)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._handle >= 0:
            if self._own:
                with suppress(FileNotFoundError):
                    self.path.unlink()
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _lock(handle: int, path: Path, wait: bool) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(str(path)) from None
    except OSError as error:
        if wait:  # such callers continue without the lock
            return
        logger.warning("%s cannot be locked (%s): nothing keeps another process from writing there", path, error)
