"""Who and where this rank is, what the engines can do, and the timeline."""

from __future__ import annotations

import importlib.util
from enum import IntEnum

import torch

from syncline.compat.horovod.context import context, is_initialized
from syncline.compat.horovod.process_sets import ProcessSet
from syncline.errors import IncompatibleError

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "size",
    "start_timeline",
    "stop_timeline",
]


class ReduceOp(IntEnum):
    """How tensors are combined, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def rank() -> int:
    """This process among all."""
    return context().world.rank


def size() -> int:
    """How many processes there are."""
    return context().world.size


def local_rank() -> int:
    """This process among those of its host."""
    return context().world.local_rank


def local_size() -> int:
    """How many processes this host has."""
    return context().world.local_size


def cross_rank() -> int:
    """This host among those that have a process with this local rank."""
    hosts = _hosts_of(local_rank())
    return hosts.index(context().world.hosts[rank()])


def cross_size() -> int:
    """How many hosts have a process with this local rank."""
    return len(_hosts_of(local_rank()))


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    hosts = context().world.hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _hosts_of(number: int) -> list[str]:
    hosts = context().world.hosts
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > number]


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """All process sets that can be used."""
    found: list[ProcessSet] = context().sets()
    return {number: list(each.ranks) for each in found if (number := each.process_set_id) is not None}


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what happens to each tensor to a file that chrome://tracing shows, until `stop_timeline`."""
    context().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline."""
    context().stop_timeline()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called by several threads; true where it carries the bytes, for it is asked for so."""
    if not mpi_enabled():
        raise IncompatibleError(
            "Horovod MPI is not enabled: MPI does not carry the bytes of this run; start it with `syncline run --mpi`"
        )
    return True


def mpi_enabled() -> bool:
    """Whether MPI carries the bytes of this run; False before `init()`."""
    return is_initialized() and context().world.transport.name.lower().startswith("mpi")


def mpi_built() -> bool:
    """Whether MPI could: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Whether gloo carries the bytes of this run; False before `init()`."""
    return is_initialized() and context().world.transport.name == "torch.distributed"


def gloo_built() -> bool:
    """Always: it comes with PyTorch."""
    return True


def nccl_built() -> int:
    """NCCL's version as one number, 0 without it."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Never: IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """Never: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built with ROCm."""
    return torch.version.hip is not None
