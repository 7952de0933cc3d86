"""mpiexec of Open MPI, Intel MPI and MPICH, as their variables tell it (MPI itself is not needed)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from syncline.environment.base import Environment, Variables

__all__ = ["read_intel", "read_mpich", "read_openmpi"]


@dataclass(frozen=True)
class _Names:
    rank: str
    size: str
    local_rank: str
    local_size: str


OPENMPI = _Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""MPICH and Intel MPI share the process manager Hydra and so its names."""


def read_openmpi(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process started by Open MPI's mpiexec, or None."""
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return _read("Open MPI", OPENMPI, environ, job)


def read_intel(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process started by Intel MPI's mpiexec, or None."""
    if not any(name.startswith("I_MPI_HYDRA") for name in environ):
        return None
    return _read("Intel MPI", HYDRA, environ, environ.get("I_MPI_HYDRA_UUID"))


def read_mpich(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process started by MPICH's mpiexec, or None."""
    return _read("MPICH", HYDRA, environ, None)


def _read(source: str, names: _Names, environ: Mapping[str, str], job: str | None) -> Environment | None:
    # All four: srun with PMI-2 sets PMI_RANK and PMI_SIZE too, and knows more by its own variables.
    if any(name not in environ for name in (names.rank, names.size, names.local_rank, names.local_size)):
        return None
    read = Variables(source, environ)
    size = read.whole(names.size)
    local_size = read.whole(names.local_size)
    # On one host the ranks share a parent, the process manager's proxy: its number names the job.
    # Over several hosts no variable names the first one, so MASTER_ADDR and MASTER_PORT must.
    one_host = local_size == size
    job = job or f"{source} {os.getppid()}"
    return Environment(
        source=source,
        rank=read.whole(names.rank),
        size=size,
        local_rank=read.whole(names.local_rank),
        local_size=local_size,
        rendezvous=read.rendezvous(job, "127.0.0.1" if one_host else None),
    )
