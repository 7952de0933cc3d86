"""An environment on a transport: `init()`, `simulate()`, groups, and the collectives as functions."""

from typing import Any

from syncline.errors import warn_deprecated
from syncline.world.elastic import DataPlace, RepeatedCall, TeamChange
from syncline.world.functional import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_from,
    broadcast_object,
    gather,
    recv,
    reduce_scatter,
    send,
)
from syncline.world.group import Group, Pending
from syncline.world.simulation import Simulation, simulate
from syncline.world.world import World, current_world, init

__all__ = [
    "DataPlace",
    "Group",
    "Pending",
    "RepeatedCall",
    "Simulation",
    "TeamChange",
    "World",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_from",
    "broadcast_object",
    "current_world",
    "gather",
    "init",
    "recv",
    "reduce_scatter",
    "send",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name == "Team":
        warn_deprecated("syncline.Team", "syncline.Group")
        return Group
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
