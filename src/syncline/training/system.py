"""The content of system.json: versions, the machine, the world. It has no environment variables, so no secrets.

Facts about torch are read from its files where possible, because importing torch takes a second or two.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import mmap
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import syncline

if TYPE_CHECKING:
    from syncline.world import World

__all__ = [
    "code_digest",
    "code_version",
    "describe_machine",
    "describe_versions",
    "describe_world",
    "gpu_names",
    "has_backend",
    "has_cuda_driver",
    "nccl_version",
    "torch_version",
]

BINDINGS = "libtorch_python.*"
"""The library in torch/lib/ that defines torch's Python classes."""
CUDA_DRIVER = "libcuda.so.1"
PACKAGES = ("torch", "numpy", "pyzmq", "mpi4py")

Facts = dict[str, object]


def describe_versions() -> Facts:
    """Versions of Syncline, Python and its dependencies; None for a missing package."""
    found: Facts = {"syncline": syncline.__version__, "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def describe_machine() -> Facts:
    """System, processors, memory and GPUs of this machine."""
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
    """The whole document: versions, rank 0's machine, and the world of the run.

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
    """The version of Syncline, with the commit if it runs from a git checkout."""
    commit = _commit(Path(syncline.__file__).parents[2] / ".git")
    return f"{syncline.__version__}+{commit[:12]}" if commit else syncline.__version__


@functools.cache
def code_digest() -> str:
    """A digest of Syncline's source files, which also changes with uncommitted edits.

    >>> len(code_digest())
    16
    """
    root = Path(syncline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _commit(git: Path) -> str:
    """The commit of a checkout's HEAD, read from its files; "" if there is none."""
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


@functools.cache
def has_backend(name: str) -> bool:
    """Whether torch was built with a backend of torch.distributed.

    >>> has_backend("Gloo"), has_backend("Carrier pigeons")
    (True, False)
    """
    name = f"ProcessGroup{name}"
    for path in (_torch_folder() / "lib").glob(BINDINGS):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(f"\0{name}\0".encode()) >= 0  # the name of a class as a whole C string
    import torch

    return hasattr(getattr(torch._C, "_distributed_c10d", None), name)


def nccl_version() -> str | None:
    """The version of NCCL that torch uses; None if torch was built without it."""
    if not has_backend("NCCL"):
        return None
    for package in metadata.requires("torch") or ():
        if package.startswith("nvidia-nccl"):
            name = package.partition("==")[0].strip()
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                break
    import torch

    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def gpu_names() -> list[str]:
    """The GPUs that torch can use. Torch is imported only if it supports GPUs and there is a driver."""
    build = torch_version()
    if build.hip is None and (build.cuda is None or not has_cuda_driver()):
        return []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(number) for number in range(count)]


def has_cuda_driver() -> bool:
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is a dependency of this package"
    return Path(str(found.origin)).parent


def torch_version() -> ModuleType:
    """The module torch/version.py, without importing torch."""
    found = importlib.util.spec_from_file_location("torch_version", _torch_folder() / "version.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
