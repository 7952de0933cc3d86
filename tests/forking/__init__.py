"""Starts the Python processes of the tests as forks of a server that has imported torch and syncline.

These imports take three seconds of CPU, and the first step of an optimizer one more; most processes of the tests need
less. A forked process has the arguments, environment variables, folder and open files of the request. It runs its
program as `__main__` and ends as any interpreter: with exit handlers, traceback and exit code.

    test ── starts ──▶ client.py ── sends a request to ──▶ server.py ── forks ──▶ the process

The small client represents the process. It ends with the exit code or the signal of the process and forwards signals
to it; if the client is killed, the process is killed, too. So `subprocess` and mpiexec start clients instead of
processes.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("client.py")
READ_AT_IMPORT = ("TORCH_", "NUMBA_", "CUDA_", "KMP_", "MKL_")
"""Prefixes of variables that are read when torch is imported. The server has imported it with its own values."""


def forked_python(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command that runs Python with these arguments, in a forked process if the result is the same."""
    plain = command[0] in ("-c", "-m") or not command[0].startswith("-")
    usual = environ.get("OMP_NUM_THREADS") == "1" and not any(name.startswith(READ_AT_IMPORT) for name in environ)
    if not plain or not usual or not hasattr(os, "pidfd_open"):
        return [sys.executable, *command]
    return [sys.executable, "-S", "-E", str(CLIENT), _server(), *command]


@cache
def _server() -> str:
    """Start the server of this process; return the path of its socket. The server ends with this process."""
    path = str(Path(tempfile.mkdtemp(prefix="syncline-forking-")) / "socket")
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.forking.server import main; main()", path],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def end() -> None:
        process.communicate()

    atexit.register(end)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n", "the fork server did not start"
    return path
