"""What torch was built with and which GPUs it can use, read from its files: importing torch takes a second or two."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["gpu_names", "has_backend", "nccl_version"]

BINDINGS = "libtorch_python.*"
"""The library in torch/lib/ that defines torch's Python classes."""
CUDA_DRIVER = "libcuda.so.1"


@functools.cache
def has_backend(name: str) -> bool:
    """Whether torch was built with a backend of torch.distributed.

    >>> has_backend("Gloo"), has_backend("Carrier pigeons")
    (True, False)
    """
    name = f"ProcessGroup{name}"
    for path in (_folder() / "lib").glob(BINDINGS):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(f"\0{name}\0".encode()) >= 0  # the name of a class as a whole C string
    import torch

    return hasattr(getattr(torch._C, "_distributed_c10d", None), name)


def nccl_version() -> str | None:
    """The version of NCCL that torch uses; None where it was built without it."""
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
    """The GPUs that torch can use. Torch is imported only where it supports them and there is a driver."""
    build = _version()
    if build.hip is None and (build.cuda is None or not _has_cuda_driver()):
        return []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(number) for number in range(count)]


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def _folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is a dependency of this package"
    return Path(str(found.origin)).parent


def _version() -> ModuleType:
    """torch/version.py, without the package around it."""
    found = importlib.util.spec_from_file_location("torch_version", _folder() / "version.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
