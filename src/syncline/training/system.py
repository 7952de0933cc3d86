"""What a run ran on: versions, the machine, the world. No environment variables, and so no secrets."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import syncline
from syncline.training.torch_build import gpu_names

if TYPE_CHECKING:
    from syncline.world import World

__all__ = [
    "code_digest",
    "code_version",
    "describe_machine",
    "describe_versions",
    "describe_world",
]

PACKAGES = ("torch", "numpy", "pyzmq", "mpi4py")

Facts = dict[str, object]


def describe_versions() -> Facts:
    """Syncline, Python and the packages that it stands on; None for one that is missing."""
    found: Facts = {"syncline": syncline.__version__, "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def describe_machine() -> Facts:
    """System, processors, memory and GPUs of the machine that this process is on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": _system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "cores usable": usable,
        "memory GiB": _memory(),
        "gpus": gpu_names(),
    }


def describe_world(world: World) -> dict[str, Facts]:
    """All of system.json: versions, rank 0's machine, and the world of the run.

    >>> import syncline as sl
    >>> with sl.init() as world:
    ...     describe_world(world)["world"]["engine"]
    'single'
    """
    import torch

    return {
        "versions": describe_versions(),
        "machine": {"host": world.host, **describe_machine()},
        "world": {
            "size": world.size,
            "hosts": list(world.hosts),
            "engine": world.transport.name,
            "launcher": world.launcher,
            "device": str(world.device),
            "threads": torch.get_num_threads(),
            "lab": os.environ.get("SYNCLINE_LAB", ""),
        },
    }


def code_version() -> str:
    """The version of Syncline, with the commit where it runs from a checkout."""
    commit = _commit(Path(syncline.__file__).parents[2] / ".git")
    return f"{syncline.__version__}+{commit[:12]}" if commit else syncline.__version__


@functools.cache
def code_digest() -> str:
    """A digest of Syncline's own source files: a commit's name does not tell of what was edited since.

    >>> len(code_digest())
    16
    """
    root = Path(syncline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _commit(git: Path) -> str:
    """What a checkout's HEAD points to, read from its files; "" where it is none, or another kind."""
    try:
        head = (git / "HEAD").read_text().strip()
        name = head.removeprefix("ref: ")
        if name == head:
            return head
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    except (OSError, UnicodeDecodeError):
        return ""


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (OSError, ValueError):
        return None
