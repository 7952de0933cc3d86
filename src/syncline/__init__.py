"""Syncline: train neural networks on many workers; choose the synchronisation strategy in one line.

>>> import torch, syncline as sl
>>> with sl.init() as world:                 # torchrun, mpiexec, srun, or plain python: a world of one
...     sl.allreduce(torch.ones(3), op="sum")
tensor([1., 1., 1.])
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any
from warnings import warn as _warn

if _TYPE_CHECKING:
    from syncline.codecs import (
        BySize,
        Cast,
        Codec,
        Lossless,
        OneBit,
        PerLayer,
        PowerSGD,
        Quantize,
        RandomK,
        Ternary,
        Threshold,
        TopK,
    )
    from syncline.errors import (
        DeadlockError,
        DivergedError,
        IncompatibleError,
        PeerLostError,
        ProtocolError,
        SpecError,
        SynclineError,
        UnsupportedError,
        WorldError,
    )
    from syncline.optim import LAMB, LARS, cosine_decay, exponential_decay, scale_lr, step_decay, warmup
    from syncline.server import Client, Future, handler, store
    from syncline.solvers import KMeans, LeastSquares, Logistic, Solution, aggregate, asgd
    from syncline.strategies import (
        BSP,
        EASGD,
        SSP,
        AdaComm,
        AllReduce,
        Average,
        DiLoCo,
        Downpour,
        Ensemble,
        Gossip,
        Hogwild,
        Local,
        Master,
        OneSided,
        Run,
        Shard,
        Step,
        Steps,
        Strategy,
    )
    from syncline.training.checkpoint import latest, load, save
    from syncline.training.distribute import distribute
    from syncline.transports import Link, Network, faults
    from syncline.world import (
        Group,
        Pending,
        Simulation,
        World,
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        broadcast_object,
        gather,
        init,
        recv,
        reduce_scatter,
        send,
        simulate,
    )

try:
    __version__ = _version("syncline")
except _PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0+unknown"

__all__ = [
    "BSP",
    "EASGD",
    "LAMB",
    "LARS",
    "SSP",
    "AdaComm",
    "AllReduce",
    "Average",
    "BySize",
    "Cast",
    "Client",
    "Codec",
    "DeadlockError",
    "DiLoCo",
    "DivergedError",
    "Downpour",
    "Ensemble",
    "Future",
    "Gossip",
    "Group",
    "Hogwild",
    "IncompatibleError",
    "KMeans",
    "LeastSquares",
    "Link",
    "Local",
    "Logistic",
    "Lossless",
    "Master",
    "Network",
    "OneBit",
    "OneSided",
    "PeerLostError",
    "Pending",
    "PerLayer",
    "PowerSGD",
    "ProtocolError",
    "Quantize",
    "RandomK",
    "Run",
    "Shard",
    "Simulation",
    "Solution",
    "SpecError",
    "Step",
    "Steps",
    "Strategy",
    "SynclineError",
    "Ternary",
    "Threshold",
    "TopK",
    "UnsupportedError",
    "World",
    "WorldError",
    "aggregate",
    "allgather",
    "allreduce",
    "alltoall",
    "asgd",
    "barrier",
    "broadcast",
    "broadcast_object",
    "cosine_decay",
    "distribute",
    "exponential_decay",
    "faults",
    "gather",
    "handler",
    "init",
    "latest",
    "load",
    "recv",
    "reduce_scatter",
    "save",
    "scale_lr",
    "send",
    "simulate",
    "step_decay",
    "store",
    "warmup",
]

_MODULES = (
    "errors",
    "codecs",
    "optim",
    "server",
    "strategies",
    "solvers",
    "training.checkpoint",
    "training.distribute",
    "world",
    "transports",
)
"""Where the names are defined."""

_RENAMED = {"Bsp": "BSP", "Ssp": "SSP", "Easgd": "EASGD"}
"""Old names, which still work with a warning."""


def __getattr__(name: str) -> _Any:
    """Import a name, or a subpackage, when it is first used: the command shows its help without torch."""
    if name in _RENAMED:
        _warn(f"syncline.{name} is now called syncline.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name in __all__:
        for module in (_import_module(f"syncline.{each}") for each in _MODULES):
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    elif name == "Team":  # deprecated
        return _import_module("syncline.world").Team
    elif not name.startswith("_"):
        try:
            return _import_module(f"syncline.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"syncline.{name}":
                raise
    raise AttributeError(f"module 'syncline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
