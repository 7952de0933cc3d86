"""Cleans up after a supervisor that was killed.

The kernel ends the workers of a killed supervisor; this process ends the child processes of the workers.

    python cleanup_process.py FOLDER [--mpi] < pipe

Each line of the pipe is the number of a process group that has started (+12) or ended (-12). The pipe closes when the
supervisor ends for any reason. Then the remaining groups are killed, and the folder is removed. With `--mpi` it also
removes the shared memory that MPICH leaves in /dev/shm when its ranks are killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - MPICH chooses it
SEGMENTS = "mpich_shm_*"
"""The file names of MPICH's shared memory."""
EXIT_TIMEOUT_S, POLL_EVERY_S = 2.0, 0.1
"""Seconds that killed ranks may take to release the memory, and between two checks."""


class CleanupProcess:
    """The supervisor's end of the pipe to the cleanup process."""

    def __init__(self, folder: str, mpi: bool = False) -> None:
        # -I and -S: it needs only the standard library, and starts in a few milliseconds.
        command = [sys.executable, "-I", "-S", str(Path(__file__)), folder, *(["--mpi"] if mpi else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def add_group(self, group: int) -> None:
        """A process group has started."""
        self._tell(f"+{group}\n")

    def remove_group(self, group: int) -> None:
        """A process group has ended; the system may reuse its number."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End it. It removes the folder."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def inherit_pipe(self) -> None:
        """Keep the pipe open in the program that this process becomes by exec, and in its children."""
        assert self._process.stdin is not None
        os.set_inheritable(self._process.stdin.fileno(), True)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed; the run continues without it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def clean_up_after_mpiexec() -> None:
    """Start a cleanup process for the mpiexec that this process is about to become."""
    CleanupProcess("", mpi=True).inherit_pipe()


def remove_unmapped_memory(since: float, folder: str = SHARED_MEMORY, proc: str = "/proc") -> list[Path]:
    """Remove this user's MPICH memory since `since` that no process has mapped. Returns what is still mapped."""
    made = [path for path in Path(folder).glob(SEGMENTS) if _is_ours(path, since)]
    mapped = _mapped(proc) if made else set()
    for path in made:
        if str(path) not in mapped:
            with contextlib.suppress(OSError):
                path.unlink()
    return [path for path in made if str(path) in mapped]


def _is_ours(path: Path, since: float) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and found.st_ctime >= since


def _mapped(proc: str) -> set[str]:
    """The files that processes have mapped."""
    found = set()
    for path in Path(proc).glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            fields = (line.split(None, 5) for line in path.read_text().splitlines())
            found |= {each[5] for each in fields if len(each) == 6}
    return found


def remaining_groups(lines: Iterable[str]) -> set[int]:
    """The groups that have started and not ended.

    >>> remaining_groups(["+12", "+13", "-12"])
    {13}
    """
    groups: set[int] = set()
    for line in lines:
        group = abs(int(line))
        groups.add(group) if line.startswith("+") else groups.discard(group)
    return groups


def main() -> None:
    """Wait for the end of the supervisor, then clean up."""
    since = time.time()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in remaining_groups(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    if sys.argv[1]:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
    until = time.monotonic() + EXIT_TIMEOUT_S
    while "--mpi" in sys.argv[2:] and remove_unmapped_memory(since) and time.monotonic() < until:
        time.sleep(POLL_EVERY_S)


if __name__ == "__main__":
    main()
