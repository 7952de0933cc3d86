"""Joining the world that mpiexec made."""

from __future__ import annotations

import atexit
import math
import os
from types import ModuleType
from typing import Any, cast

from syncline.environment import Environment
from syncline.environment.base import Variables
from syncline.errors import WorldError
from syncline.runtime import RealRuntime
from syncline.transports.mpi.engine import LONGEST, WARN_AFTER, Engine, abort_job, warn_of_a_wait
from syncline.transports.mpi.library import check_world, load
from syncline.transports.mpi.transport import MpiTransport

__all__ = ["connect"]


def connect(environment: Environment, timeout: float) -> MpiTransport:
    """Join the world that mpiexec started; alone under plain `python`. Every rank calls it, and it returns when all
    are there.

    Where the launcher has started servers too, the first processes are the world, and `wide` reaches all; a server is
    given the wide channel itself.
    """
    wide = _join(environment, timeout)
    told = Variables("syncline run --mpi", os.environ)
    servers = told.whole("SYNCLINE_SERVERS", 0)
    if not servers:
        return wide
    workers = told.whole("SYNCLINE_WORKERS")
    if workers + servers != wide.size:
        raise WorldError(
            f"SYNCLINE_WORKERS={workers} and SYNCLINE_SERVERS={servers}, but MPI has {wide.size} processes: "
            "start them with `syncline run --mpi -n N --servers S`"
        )
    world = wide.split(range(workers))
    if world is None:
        return wide
    world.add_roles(wide, ("server",) * servers)
    return cast(MpiTransport, world)


def _join(environment: Environment, timeout: float) -> MpiTransport:
    """All that mpiexec started.

    MPI itself ends with the process: `Engine.goodbye` says how. Where not all come, nobody can say goodbye, and the
    end of this process ends them all: MPI's own end would wait for those who did not come.
    """
    mpi = load(environment)
    check_world(environment, mpi)
    private = _duplicate(mpi, mpi.COMM_WORLD, timeout)
    private.Set_errhandler(mpi.ERRORS_RETURN)
    engine = Engine(mpi, private, timeout, _neighbours(mpi, private))
    return MpiTransport(engine, _duplicate(mpi, private, timeout), tuple(range(private.Get_size())))


def _duplicate(mpi: ModuleType, comm: Any, timeout: float) -> Any:
    """A communicator of our own with the same ranks."""
    runtime = RealRuntime()
    start = runtime.now()
    warn = start + WARN_AFTER
    copy, request = comm.Idup()
    while not request.Test():
        now = runtime.now()
        if now > warn:
            warn = math.inf
            warn_of_a_wait(comm.Get_rank(), now - start, f"all {comm.Get_size()} ranks to join")
        if now - start > timeout:
            atexit.register(abort_job, mpi)
            raise WorldError(
                f"rank {comm.Get_rank()} of {comm.Get_size()} has waited {timeout:.3g} s for the others to join: every "
                "rank that mpiexec starts calls sl.init(transport='mpi')"
            )
        runtime.sleep(LONGEST)
    return copy


def _neighbours(mpi: ModuleType, comm: Any) -> frozenset[int]:
    """The ranks with which this one shares memory."""
    here = comm.Split_type(mpi.COMM_TYPE_SHARED)
    near, everyone = here.Get_group(), comm.Get_group()
    ranks = near.Translate_ranks(list(range(near.Get_size())), everyone)
    for each in (near, everyone, here):
        each.Free()
    return frozenset(int(rank) for rank in ranks)
