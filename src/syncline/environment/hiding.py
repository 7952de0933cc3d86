"""Hides the launchers' variables from frameworks that would start torch.distributed themselves."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

__all__ = ["hide", "restore"]

TORCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)
MPI = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
PREFIXES = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")


def hide(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the variables that tell a process its rank and the number of ranks; returns them.

    >>> environ = {"RANK": "0", "WORLD_SIZE": "2", "HOME": "/root"}
    >>> hidden = hide(environ)
    >>> environ
    {'HOME': '/root'}
    >>> restore(environ, hidden)
    >>> environ["WORLD_SIZE"]
    '2'
    """
    found = [name for name in environ if name in (*TORCH, *MPI, *SLURM) or name.startswith(PREFIXES)]
    return {name: environ.pop(name) for name in found}


def restore(environ: MutableMapping[str, str], hidden: Mapping[str, str]) -> None:
    """Put the hidden variables back, except those that were set again meanwhile."""
    for name, value in hidden.items():
        environ.setdefault(name, value)
