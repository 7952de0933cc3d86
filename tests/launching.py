"""Starts real processes as a launcher does, and collects their output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.testing.processes import free_port
from tests.forking import forked_python

ROOT = Path(__file__).parent.parent
WAIT_TIMEOUT_S = 120
OTHERS = ("SLURM_", "PMI_", "OMPI_", "KMP_")
"""Variables of other launchers, and those that scikit-learn sets when it is imported."""


@dataclass
class Ended:
    """The exit code and the output of a process."""

    code: int
    out: str
    err: str


def torch_variables(size: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for each of `size` local ranks."""
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(size)
    ]


def start(command: Sequence[str], variables: Mapping[str, str], stdin: int | None = None) -> subprocess.Popen[str]:
    """Start one rank without the variables of other launchers. It is forked from a process that has imported torch."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
    words = forked_python(command, environ)
    return subprocess.Popen(
        words, env=environ, cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """Wait for all processes. If one does not end in time, all are killed."""
    try:
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=WAIT_TIMEOUT_S)
            ended.append(Ended(process.returncode, out, err))
        return ended
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def launch(script: str, variables: Sequence[Mapping[str, str]]) -> list[Ended]:
    """Run the text of a script once for each set of variables, at the same time."""
    return finish([start(["-c", script], each) for each in variables])
