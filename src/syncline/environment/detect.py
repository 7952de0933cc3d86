"""Ask each launcher in turn; the most specific answers first."""

from __future__ import annotations

import os
from collections.abc import Mapping

from syncline.environment import mpi, slurm, torchrun
from syncline.environment.base import Environment

__all__ = ["detect"]

# torchrun may run inside a Slurm step, and mpiexec inside a Slurm job: the innermost launcher wins.
READERS = (torchrun.read, mpi.read_openmpi, mpi.read_intel, mpi.read_mpich, slurm.read)


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """Who this process is, by the variables of its launcher; alone when no launcher set any.

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
