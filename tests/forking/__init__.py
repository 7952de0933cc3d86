"""Python processes of the tests, forked from one that has imported torch and syncline already.

Importing them takes three seconds of CPU, and a first step of an optimizer one more; most processes of these tests
live for less. A forked process has the arguments, variables, folder and files that it was asked for, is its own
`__main__`, and ends as any interpreter does: with its exit handlers, its traceback and its exit code.

    test ── starts ──▶ client.py, which is small ── asks ──▶ server.py ── forks ──▶ the process

The client stands for the process: it ends with its exit code or its signal, hands signals on, and takes it along
when it is killed. So whoever starts Python processes, `subprocess` or mpiexec, starts clients instead.
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
"""Variables that start so are read while torch is imported, which the server has done."""


def forked_python(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command that runs Python with these arguments, in a forked process where that makes no difference."""
    plain = command[0] in ("-c", "-m") or not command[0].startswith("-")
    usual = environ.get("OMP_NUM_THREADS") == "1" and not any(name.startswith(READ_AT_IMPORT) for name in environ)
    if not plain or not usual or not hasattr(os, "pidfd_open"):
        return [sys.executable, *command]
    return [sys.executable, "-S", "-E", str(CLIENT), _server(), *command]


@cache
def _server() -> str:
    """Where the server of this process listens. It ends with this process."""
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
