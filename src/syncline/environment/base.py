"""What a launcher says about this process, read from environment variables, and the user's cache folder."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from syncline.errors import WorldError

__all__ = [
    "JOB_FOLDER_VARIABLE",
    "KEY_VARIABLE",
    "LEFT_CODE",
    "SAVES",
    "Environment",
    "Rendezvous",
    "Variables",
    "cache_folder",
    "check_versions",
    "hide",
    "package_version",
    "restore",
]

LEFT_CODE = 128 + 15
"""The exit code of a worker that was asked to leave an elastic job, and has left. It is not started again."""
KEY_VARIABLE = "SYNCLINE_KEY"
"""The key of a world, the same in all its processes; "none" for none."""
JOB_FOLDER_VARIABLE = "SYNCLINE_JOB_FOLDER"
"""The folder of an elastic job, in which the last workers save a checkpoint. Set by the launcher."""
SAVES = "SYNCLINE_SAVES"
"""Set by the launcher if ranks save and end on Ctrl-C and SIGTERM; servers and the evaluator then end after them."""

FIRST_PORT, PORT_COUNT = 20000, 12000
"""Ports derived from a job's name lie below Linux's ephemeral range (32768 and up)."""


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the ranks find each other. `hosted`: the launcher already serves a store there."""

    address: str
    port: int
    hosted: bool = False


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the launcher says about this process."""

    source: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    local_known: bool = True
    """False if the launcher did not say which ranks share a host: the ranks then find out when they join."""
    host: str = field(default_factory=socket.gethostname)
    rendezvous: Rendezvous | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise WorldError(f"{self.source} says rank {self.rank} of {self.size}: ranks count from 0")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise WorldError(
                f"{self.source} says local rank {self.local_rank} of {self.local_size} in a world of {self.size}"
            )

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to share a host."""
        return self.local_known and self.local_size == self.size


class Variables:
    """The environment variables of one launcher. A missing or wrong one raises an error that names it."""

    def __init__(self, source: str, environ: Mapping[str, str]) -> None:
        self.source = source
        self.environ = environ

    def whole(self, name: str, default: int | None = None) -> int:
        """The variable as a whole number."""
        text = self.environ.get(name)
        if text is None:
            if default is None:
                raise WorldError(f"{self.source}: variable {name} is not set")
            return default
        try:
            return int(text)
        except ValueError:
            raise WorldError(f"{self.source}: {name}={text!r} is not a whole number") from None

    def rendezvous(self, job: str | None, address: str | None) -> Rendezvous | None:
        """MASTER_ADDR and MASTER_PORT if set; otherwise `address`, with a port derived from the job's name."""
        address = self.environ.get("MASTER_ADDR", address)
        if address is None:
            return None
        if "MASTER_PORT" in self.environ:
            port = self.whole("MASTER_PORT")
        elif job is not None:
            port = FIRST_PORT + zlib.crc32(job.encode()) % PORT_COUNT
        else:
            return None
        if not 0 < port < 65536:
            raise WorldError(f"{self.source}: MASTER_PORT={port} is not a port (1 to 65535)")
        return Rendezvous(address, port, hosted=self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def package_version() -> str:
    """The version of Syncline that this process runs."""
    try:
        return importlib.metadata.version("syncline")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def check_versions(versions: Mapping[str, str]) -> None:
    """Refuse processes of one world that run different versions of Syncline. `versions` is by name; "" means unknown.

    >>> check_versions({"rank 0": "1.2", "rank 1": "1.2"})
    >>> check_versions({"rank 0": "1.2", "rank 1": "1.3", "server 0": ""})
    Traceback (most recent call last):
    ...
    syncline.errors.WorldError: rank 0 runs Syncline 1.2, rank 1 runs 1.3, server 0 runs an older one: install the ...
    """
    found: dict[str, list[str]] = {}
    for name, version in versions.items():
        found.setdefault(version, []).append(name)
    if len(found) > 1:
        parts = [f"{names[0]} runs {version or 'an older one'}" for version, names in found.items()]
        parts[0] = parts[0].replace(" runs ", " runs Syncline ", 1)
        raise WorldError(f"{', '.join(parts)}: install the same version of Syncline everywhere")


def cache_folder() -> Path:
    """`SYNCLINE_CACHE`, or syncline/ in the user's cache folder."""
    if "SYNCLINE_CACHE" in os.environ:
        return Path(os.environ["SYNCLINE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "syncline"


RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
)
"""The variables of torchrun, MPI and Slurm that tell a process its rank and the number of ranks."""
MPI_PREFIXES = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")


def hide(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the variables with the rank and the number of ranks, and return them.

    >>> environ = {"RANK": "0", "WORLD_SIZE": "2", "HOME": "/root"}
    >>> hidden = hide(environ)
    >>> environ
    {'HOME': '/root'}
    >>> restore(environ, hidden)
    >>> environ["WORLD_SIZE"]
    '2'
    """
    found = [name for name in environ if name in RANK_VARIABLES or name.startswith(MPI_PREFIXES)]
    return {name: environ.pop(name) for name in found}


def restore(environ: MutableMapping[str, str], hidden: Mapping[str, str]) -> None:
    """Put the hidden variables back, except those that were set again meanwhile."""
    for name, value in hidden.items():
        environ.setdefault(name, value)
