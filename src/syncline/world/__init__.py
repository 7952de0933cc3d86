"""An environment on a transport: `init()`, `simulate()`, teams, and the collectives as functions."""

from syncline.world.functional import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    gather,
    recv,
    reduce_scatter,
    send,
)
from syncline.world.objects import broadcast_object
from syncline.world.simulation import Simulation, simulate
from syncline.world.team import Pending, Team
from syncline.world.world import World, current_world, init

__all__ = [
    "Pending",
    "Simulation",
    "Team",
    "World",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "current_world",
    "gather",
    "init",
    "recv",
    "reduce_scatter",
    "send",
    "simulate",
]
