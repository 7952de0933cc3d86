"""Ends what a killed supervisor leaves behind: the kernel ends its workers, this what the workers had started.

    python sweeper.py FOLDER < pipe

Each line of the pipe is the number of a process group that has begun (+12) or is over (-12). The pipe ends when the
supervisor does, in whatever way; then the groups that are left are killed, and the folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Sweeper"]


class Sweeper:
    """The supervisor's end of the pipe."""

    def __init__(self, folder: str) -> None:
        # -I and -S: it needs nothing but the standard library, and starts in a few milliseconds.
        command = [sys.executable, "-I", "-S", str(Path(__file__)), folder]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def begun(self, group: int) -> None:
        """A process group has begun."""
        self._tell(f"+{group}\n")

    def over(self, group: int) -> None:
        """A process group is over: its number may soon be somebody else's."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """There is nothing left to sweep but the folder."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it: we go on without
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def left(lines: Iterable[str]) -> set[int]:
    """The groups that have begun and are not over.

    >>> left(["+12", "+13", "-12"])
    {13}
    """
    groups: set[int] = set()
    for line in lines:
        group = abs(int(line))
        groups.add(group) if line.startswith("+") else groups.discard(group)
    return groups


def main() -> None:
    """Wait for the end of the supervisor, and sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in left(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
