"""Syncline: train neural networks on many workers; how they agree is a choice you swap in one line.

>>> import torch, syncline as sl
>>> with sl.init() as world:                 # torchrun, mpiexec, srun, or plain python: a world of one
...     sl.allreduce(torch.ones(3))
tensor([1., 1., 1.])
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

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
from syncline.strategies import AllReduce, Bsp, Downpour, Hogwild, Local, Master, Run, Shard, Ssp, Step, Steps, Strategy
from syncline.training import distribute, latest, load, save
from syncline.transports import Link, Network, faults
from syncline.world import (
    Pending,
    Simulation,
    Team,
    World,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
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
    "LAMB",
    "LARS",
    "AllReduce",
    "Bsp",
    "BySize",
    "Cast",
    "Client",
    "Codec",
    "DeadlockError",
    "DivergedError",
    "Downpour",
    "Future",
    "Hogwild",
    "IncompatibleError",
    "Link",
    "Local",
    "Lossless",
    "Master",
    "Network",
    "OneBit",
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
    "SpecError",
    "Ssp",
    "Step",
    "Steps",
    "Strategy",
    "SynclineError",
    "Team",
    "Ternary",
    "Threshold",
    "TopK",
    "UnsupportedError",
    "World",
    "WorldError",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
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
