"""Print what a bug report needs: versions, machine, launcher, network. No secret is shown.

examples:
  syncline env
  syncline env --json
  syncline run -n 2 -m syncline env                what a worker sees
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import socket
from collections.abc import Mapping

from syncline.environment import detect
from syncline.errors import SynclineError
from syncline.launch import machine
from syncline.launch.mpi import find_mpiexec, flavour_of, installed_mpis, mpiexec_version
from syncline.training.system import describe_machine, describe_versions, has_backend, nccl_version

__all__ = ["collect", "configure", "run"]

SHOWN_NAMES = re.compile(
    r"(SYNCLINE|TORCHELASTIC|OMP|MKL|NCCL|GLOO|TP|UCX|CUDA|SLURM|PMI|OMPI|PMIX|I_MPI|MPI)_|"
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT)$"
)
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSW|CRED|COOKIE|AUTH", re.IGNORECASE)

Facts = dict[str, dict[str, object]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the facts."""
    facts = collect(os.environ)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, found in facts.items():
        print(title)
        for name, value in found.items():
            print(f"  {name}: {_text(value)}")
    return 0


def collect(environ: Mapping[str, str]) -> Facts:
    """All facts, by heading."""
    return {
        "versions": describe_versions(),
        "machine": _machine(),
        "engines": _engines(),
        "launcher": _launcher(environ),
        "environment variables": visible(environ),
    }


def visible(environ: Mapping[str, str]) -> dict[str, object]:
    """The relevant environment variables; "set" for secrets.

    >>> visible({"SYNCLINE_KEY": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "OMP_NUM_THREADS": "2", "HOME": "/root"})
    {'OMP_NUM_THREADS': '2', 'SYNCLINE_KEY': 'set'}
    """
    return {
        name: "set" if SECRET.search(name) else environ[name] for name in sorted(environ) if SHOWN_NAMES.match(name)
    }


def _machine() -> dict[str, object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        **describe_machine(),
        "cores usable": machine.cores(),
        "cores by control group": machine.cpu_quota(),
        "memory available GiB": _gib(machine.available_memory()),
        "memory by control group GiB": _gib(machine.memory_limit()),
        "network interfaces": [name for _, name in socket.if_nameindex()],
        "open files": {"soft": soft, "hard": hard},
    }


def _engines() -> dict[str, object]:
    mpiexec = find_mpiexec()
    version = _mpi_version(mpiexec)
    return {
        "gloo": has_backend("Gloo"),
        "nccl": nccl_version(),
        "mpiexec": mpiexec,
        "mpi": None if version is None else _first_version(version),
        "mpi packages": installed_mpis(),
    }


def _mpi_version(mpiexec: str | None) -> str | None:
    try:
        return None if mpiexec is None else mpiexec_version(mpiexec)
    except SynclineError:
        return None


def _first_version(text: str) -> str:
    number = re.search(r"\d+\.\d+[\w.]*", text)
    return f"{flavour_of(text)} {number[0] if number else ''}".strip()


def _launcher(environ: Mapping[str, str]) -> dict[str, object]:
    try:
        found = detect(environ)
    except SynclineError as error:  # incomplete variables belong into a bug report
        return {"problem": str(error)}
    place = found.rendezvous
    return {
        "started by": found.source,
        "rank": f"{found.rank} of {found.size}",
        "local rank": f"{found.local_rank} of {found.local_size}",
        "meeting point": None if place is None else f"{place.address}:{place.port}",
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 1)


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
