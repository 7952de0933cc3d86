"""Handing a run over to srun, inside a Slurm job: it knows the hosts and tells the ranks who they are."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence

from syncline.errors import SpecError, UnsupportedError
from syncline.launch.local import WORKER

__all__ = ["srun_command"]


def srun_command(target: Sequence[str], ranks: int, environ: Mapping[str, str]) -> list[str]:
    """The whole command line."""
    if "SLURM_JOB_ID" not in environ:
        raise UnsupportedError("--hosts slurm needs a Slurm job around it (SLURM_JOB_ID is not set): salloc -N 2")
    srun = shutil.which("srun")
    if srun is None:
        raise UnsupportedError("--hosts slurm: srun is not on PATH of this node; load Slurm's module")
    try:
        nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1")
    except ValueError as error:
        raise SpecError(f"SLURM_JOB_NUM_NODES={environ.get('SLURM_JOB_NUM_NODES')!r} is not a number") from error
    each, odd = divmod(ranks, nodes)
    if odd or not each:
        raise SpecError(f"-n {ranks} cannot be dealt evenly to the {nodes} nodes of this Slurm job")
    count = [f"--ntasks={ranks}", f"--ntasks-per-node={each}", "--kill-on-bad-exit=1"]
    return [srun, *count, sys.executable, str(WORKER), *target]
