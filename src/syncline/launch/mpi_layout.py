"""mpiexec as a program of a supervised run: here, or on the hosts of the lab.

```text
supervisor ─ mpiexec, in the network of host 0 ─┬─ proxy ─ ranks of host 0
                                                ├─ door 10.77.0.2 ─ proxy ─ ranks of host 1
                                                └─ …
```

MPICH's mpiexec reaches other hosts by ssh, or by any program that is called like it: the lab's door (`Lab.door`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from syncline.errors import UnsupportedError
from syncline.launch.mpi import find_mpiexec, flavour_of, mpi_command, mpiexec_version, why_no_mpi
from syncline.launch.programs import MPIEXEC, Place, Program

__all__ = ["lay_out_mpi"]

TCP = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
"""All bytes through sockets. MPICH's other way, UCX, finds out that the hosts are one machine and shares its memory;
told to use TCP alone, it looks for the interface outside of the lab."""
PROGRESS = {
    "MPIR_CVAR_ASYNC_PROGRESS": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "10",
}
"""Over TCP a put lands only while its target is inside MPI, so a thread of MPICH always is. It spins, and takes as much
of a processor as the worker itself; throttled, it naps when there is nothing to do."""


def lay_out_mpi(
    places: Sequence[Place],
    target: Iterable[str],
    common: Mapping[str, str],
    servers: int = 0,
    server: Sequence[str] = (),
    *,
    plain: bool = True,
) -> list[list[Program]]:
    """mpiexec at the first place; it starts the ranks of all of them, and the servers after them.

    `plain`: what the ranks print goes to our own streams as it is; else each line begins with its rank, where this
    mpiexec can do that.
    """
    first = places[0]
    own = {"SYNCLINE_TRANSPORT": "mpi", "SYNCLINE_MPIEXEC": "1", "PYTHONUNBUFFERED": "1"}
    variables = {**first.variables, **common, **own}
    options = [] if plain else _prefixed()
    if first.door:
        options += _across(places)
        variables |= TCP | {"FI_TCP_IFACE": first.interface}
        variables |= {name: os.environ.get(name, value) for name, value in PROGRESS.items()}
    ranks = sum(place.slots for place in places)
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
    return [[program], *([] for _ in places[1:])]


def _prefixed() -> list[str]:
    mpiexec = find_mpiexec()
    known = mpiexec is not None and flavour_of(mpiexec_version(mpiexec)) in ("MPICH", "Intel MPI")
    return ["-prepend-rank"] if known else []


def _across(places: Sequence[Place]) -> list[str]:
    """The hosts, and the way to them."""
    reason = why_no_mpi(lab=True)
    if reason is not None:
        raise UnsupportedError(f"--mpi with --lab: {reason}")
    first = places[0]
    hosts = ",".join(f"{place.address}:{place.slots}" for place in places)
    return ["-launcher", "ssh", "-launcher-exec", first.door, "-iface", first.interface, "-hosts", hosts]
