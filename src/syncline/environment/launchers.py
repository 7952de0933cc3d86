"""Reads what each launcher says about this process: torchrun and `syncline run`, mpiexec, srun.

MPI itself is not needed. The variables of Open MPI, Intel MPI and MPICH are enough.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from syncline.environment.base import Environment, Variables
from syncline.errors import WorldError

__all__ = ["detect", "expand_hosts", "read_intel", "read_mpich", "read_openmpi", "read_slurm", "tasks_per_node"]

LAUNCHER_VARIABLES = {"SYNCLINE_RUN_ID": "syncline run", "TORCHELASTIC_RUN_ID": "torchrun"}
"""The environment variable that identifies each launcher."""


def read_torchrun(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of torchrun or `syncline run`, or None."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    source = next((name for mark, name in LAUNCHER_VARIABLES.items() if mark in environ), "RANK and WORLD_SIZE")
    variables = Variables(source, environ)
    size = variables.whole("WORLD_SIZE")
    local_rank = variables.whole("LOCAL_RANK", 0)
    rendezvous = variables.rendezvous(None, None)
    if rendezvous is None and size > 1:
        raise WorldError(f"{variables.source}: a world of {size} needs MASTER_ADDR and MASTER_PORT to meet")
    return Environment(
        source=variables.source,
        rank=variables.whole("RANK"),
        size=size,
        local_rank=local_rank,
        local_size=variables.whole("LOCAL_WORLD_SIZE", local_rank + 1),
        local_known="LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ,
        rendezvous=rendezvous,
    )


OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
"""The variables with rank, size, local rank and local size."""
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""MPICH and Intel MPI share the process manager Hydra and so its names."""


def read_openmpi(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process started by Open MPI's mpiexec, or None."""
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return _read_mpi("Open MPI", OPENMPI, environ, job)


def read_intel(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process started by Intel MPI's mpiexec, or None."""
    if not any(name.startswith("I_MPI_HYDRA") for name in environ):
        return None
    return _read_mpi("Intel MPI", HYDRA, environ, environ.get("I_MPI_HYDRA_UUID"))


def read_mpich(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process started by MPICH's mpiexec, or None."""
    return _read_mpi("MPICH", HYDRA, environ, None)


def _read_mpi(source: str, names: tuple[str, ...], environ: Mapping[str, str], job: str | None) -> Environment | None:
    # All four: srun with PMI-2 sets PMI_RANK and PMI_SIZE too, and knows more by its own variables.
    if any(name not in environ for name in names):
        return None
    variables = Variables(source, environ)
    rank, size, local_rank, local_size = map(variables.whole, names)
    # On one host the ranks share a parent, the process manager's proxy: its number names the job.
    # Over several hosts no variable names the first one, so MASTER_ADDR and MASTER_PORT must.
    one_host = local_size == size
    job = job or f"{source} {os.getppid()}"
    return Environment(
        source=source,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous=variables.rendezvous(job, "127.0.0.1" if one_host else None),
    )


def read_slurm(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a task of an srun step, or None. A batch script's own shell is no worker: only a step is."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    variables = Variables("Slurm", environ)
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = variables.whole("SLURM_NODEID", 0)
    if not 0 <= node < len(tasks):
        raise WorldError(f"Slurm: SLURM_NODEID={node} but SLURM_STEP_TASKS_PER_NODE names {len(tasks)} nodes")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    first: str | None = "127.0.0.1"
    if len(tasks) > 1 and "MASTER_ADDR" not in environ:
        first = next(iter(expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))), None)
    return Environment(
        source="Slurm",
        rank=variables.whole("SLURM_PROCID"),
        size=variables.whole("SLURM_STEP_NUM_TASKS"),
        local_rank=variables.whole("SLURM_LOCALID", 0),
        local_size=tasks[node],
        rendezvous=variables.rendezvous(job, first),
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's run-length list of tasks.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise WorldError(f"Slurm: SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Slurm's compressed host list.

    >>> expand_hosts("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    parts = re.split(r",(?![^\[]*\])", text) if text else []  # commas outside brackets
    return [host for part in parts for host in _expand(part, text)]


def _expand(part: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[\],]*)(?:\[([0-9,-]+)\](.*))?", part)
    if match is None or not part:
        raise WorldError(f"Slurm: host list {text!r} cannot be read")
    prefix, ranges, rest = match[1], match[2], match[3]
    if ranges is None:
        return [prefix]
    numbers: list[str] = []
    for span in ranges.split(","):
        limits = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", span)
        if limits is None or int(limits[1]) > int(limits[2] or limits[1]):
            raise WorldError(f"Slurm: host list {text!r} cannot be read")
        low, high = limits[1], limits[2] or limits[1]
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    tails = _expand(rest, text) if rest else [""]
    return [prefix + number + tail for number in numbers for tail in tails]


# torchrun may run inside a Slurm step, and mpiexec inside a Slurm job: the innermost launcher wins.
READERS = (read_torchrun, read_openmpi, read_intel, read_mpich, read_slurm)


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """Rank, size and rendezvous of this process, from its launcher's variables; a world of one without a launcher.

    >>> detect({}).source
    'no launcher'
    >>> found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    >>> found.rank, found.size
    (1, 2)
    """
    environ = os.environ if environ is None else environ
    for read in READERS:
        found = read(environ)
        if found is not None:
            return found
    return Environment(source="no launcher")
