"""Syncline: train neural networks on many workers; choose the synchronisation strategy in one line.

>>> import torch, syncline as sl
>>> with sl.init() as world:                 # torchrun, mpiexec, srun, or plain python: a world of one
...     sl.allreduce(torch.ones(3), op="sum")
tensor([1., 1., 1.])

The rest is in `sl.strategies`, `sl.codecs`, `sl.server`, `sl.optim`, `sl.checkpoint`, `sl.solvers` and `sl.errors`.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from syncline import checkpoint, codecs, errors, optim, server, solvers, strategies
    from syncline.checkpoint import latest, load, save
    from syncline.codecs import Codec
    from syncline.errors import SynclineError
    from syncline.strategies import Run, Strategy
    from syncline.training.distribute import distribute
    from syncline.training.pipeline import pipeline
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
    "Codec",
    "Group",
    "Link",
    "Network",
    "Pending",
    "Run",
    "Simulation",
    "Strategy",
    "SynclineError",
    "World",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "checkpoint",
    "codecs",
    "distribute",
    "errors",
    "faults",
    "gather",
    "init",
    "latest",
    "load",
    "optim",
    "pipeline",
    "recv",
    "reduce_scatter",
    "save",
    "send",
    "server",
    "simulate",
    "solvers",
    "strategies",
]

_MODULES = {
    "codecs": ("Codec",),
    "errors": ("SynclineError",),
    "strategies": ("Run", "Strategy"),
    "checkpoint": ("latest", "load", "save"),
    "training.distribute": ("distribute",),
    "training.pipeline": ("pipeline",),
    "transports": ("Link", "Network", "faults"),
    "world": (
        *("Group", "Pending", "Simulation", "World", "allgather", "allreduce", "alltoall", "barrier", "broadcast"),
        *("broadcast_object", "gather", "init", "recv", "reduce_scatter", "send", "simulate"),
    ),
}
"""Where each public name is defined."""
_MOVED = {
    "codecs": "BySize Cast Lossless OneBit PerLayer PowerSGD Quantize RandomK Ternary Threshold TopK",
    "errors": "DeadlockError DivergedError IncompatibleError PeerLostError ProtocolError SpecError UnsupportedError "
    "WorldError",
    "optim": "LAMB LARS cosine_decay exponential_decay scale_lr step_decay warmup",
    "server": "Client Future handler store",
    "solvers": "KMeans LeastSquares Logistic Solution aggregate asgd",
    "strategies": "AdaComm AllReduce Average DiLoCo Downpour Ensemble Gossip Hogwild Local Master OneSided Shard Step "
    "Steps Bsp=BSP Easgd=EASGD Ssp=SSP",
    "world": "Team=Group",
}
"""Names that were here in version 0.1, by the module that has them now; OLD=NEW where the name has changed too."""


def __getattr__(name: str) -> _Any:
    """Import a name, or a subpackage, when it is first used: the command shows its help without torch."""
    for home, names in _MODULES.items():
        if name in names:
            return globals().setdefault(name, getattr(_import_module(f"syncline.{home}"), name))
    for home, moved in _MOVED.items():
        for each in moved.split():
            old, _, new = each.partition("=")
            if old == name:
                return _moved(name, home, new or old)
    if not name.startswith("_"):
        try:
            return _import_module(f"syncline.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"syncline.{name}":
                raise
    raise AttributeError(f"module 'syncline' has no attribute {name!r}")


def _moved(name: str, home: str, new: str) -> _Any:
    """A name from its present module, with a warning."""
    import warnings

    place = f"sl.{new}" if new in __all__ else f"sl.{home}.{new}"
    warnings.warn(f"sl.{name} is now {place}; the old name goes with version 0.2", DeprecationWarning, stacklevel=3)
    return getattr(_import_module(f"syncline.{home}"), new)


def __dir__() -> list[str]:
    return sorted(__all__)
