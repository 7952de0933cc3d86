"""The ways to start a run: here, on hosts, in the lab, or handed over to mpiexec and srun."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from syncline.environment.base import SAVES
from syncline.environment.heartbeats import LOST_AFTER_VARIABLE, lost_after, read_lost_after
from syncline.errors import SpecError, UnsupportedError
from syncline.launch.cleanup_process import clean_up_after_mpiexec
from syncline.launch.lab import Lab, LabHost
from syncline.launch.local import WORKER, LocalProcesses
from syncline.launch.machine import warn_if_oversubscribed
from syncline.launch.mpi import mpi_command, mpiexec_programs
from syncline.launch.output import OutputForwarder
from syncline.launch.prefork import start_prefork
from syncline.launch.processes import CombinedProcesses, Processes, ProcessExit
from syncline.launch.programs import (
    EVALUATOR,
    LOCALHOST,
    Host,
    LaunchHost,
    Program,
    add_horovod_variables,
    evaluator_programs,
    forwarded_variables,
    network_key,
    rank_programs,
    rendezvous_variables,
    role_environment,
    server_programs,
    thread_variables,
)
from syncline.launch.ssh import HostPrograms, RemoteProcesses, address_towards
from syncline.launch.store import ProcessEvents, serve_store
from syncline.launch.supervisor import FailurePolicy, Supervisor, Tick

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = [
    "SERVER",
    "Job",
    "JobExit",
    "become_launcher",
    "local_place",
    "places_in_lab",
    "run_by_mpiexec",
    "run_by_srun",
    "run_here",
    "run_in_lab",
    "run_logged",
    "run_on_hosts",
    "run_on_places",
    "srun_command",
]

LOOPBACK = "127.0.0.1"
SERVER = ("-m", "syncline.server")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, whatever the place."""

    target: tuple[str, ...]
    policy: FailurePolicy = "stop"
    address: str | None = None
    servers: int = 0
    server: tuple[str, ...] = SERVER
    evaluators: int = 0
    """1: the target is started once more, to evaluate beside the ranks (SYNCLINE_ROLE=evaluator)."""
    handlers: str = ""
    """Modules, separated by commas, that register handlers for the servers."""
    mpi: bool = False
    """Whether mpiexec starts the ranks, here or in the lab, and MPI carries their bytes."""
    plain_rank: int | None = 0
    """The rank whose output is passed on untouched; None: every line has its rank."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What every process is told beside where and who it is."""
    saves: bool = False
    """Whether its ranks save and end by themselves on Ctrl-C or SIGTERM; servers and evaluator end after them. All have
    `SAVES` in their environment. mpiexec ends its ranks in its own way."""
    announce: bool = False
    """Whether to print what is started even if standard error is no terminal."""
    horovod: bool = False
    """Whether the ranks are told who they are in Horovod's words too."""
    lost_after: str | None = None
    """Seconds without a heartbeat after which a program counts as lost, "0" for no limit; None for the default."""


def run_here(job: Job, ranks: int) -> int:
    """Run on this machine; the exit code."""
    address, place = job.address or LOOPBACK, local_place(ranks)
    _start_prefork(job, place)
    return run_on_places(job, [place], serve_store(address, ranks), address)


def local_place(ranks: int) -> LaunchHost:
    """This machine, its cores shared among so many ranks."""
    return LaunchHost(name=LOCALHOST, slots=ranks, variables=thread_variables(ranks))


def _start_prefork(job: Job, place: LaunchHost) -> None:
    """Start the prefork process early, so that it imports torch while this process imports torch for the store."""
    if not job.mpi:
        start_prefork(job.target, {**os.environ, **place.variables, **job.variables})


def run_on_places(job: Job, places: Sequence[LaunchHost], store: TCPStore, address: str) -> int:
    """Run at places that are all on this machine; the exit code."""
    common = rendezvous_variables(address, store.port)
    programs = [program for programs in _programs(job, places, common) for program in programs]
    with _output() as output:
        return _supervise(job, LocalProcesses(programs, output), ProcessEvents(store), places, output)


@dataclass(frozen=True)
class JobExit:
    """How a run ended that somebody else tells of."""

    code: int
    failure: ProcessExit | None
    """Who failed first."""
    early: str | None
    """Why it was ended early."""


def run_logged(
    job: Job, places: Sequence[LaunchHost], store: TCPStore, address: str, log: BinaryIO, tick: Tick
) -> JobExit:
    """Run at places that are all on this machine; what is printed goes to `log`."""
    common = rendezvous_variables(address, store.port)
    programs = [program for programs in _programs(job, places, common) for program in programs]
    with OutputForwarder(log, log) as output:
        told = _supervisor(job, LocalProcesses(programs, output), ProcessEvents(store), places, output.say, tick)
        code = told.run()
    return JobExit(code, told.failure, told.ended_early)


def run_on_hosts(job: Job, hosts: Sequence[Host]) -> int:
    """Run on hosts, over ssh where they are not this machine; the exit code."""
    address = job.address or address_towards(hosts)
    for host in hosts:
        if host.name == LOCALHOST:
            _start_prefork(job, local_place(host.slots))
    store = serve_store(address, sum(host.slots for host in hosts))
    common = rendezvous_variables(address, store.port)
    if any(host.name != LOCALHOST for host in hosts):
        common["SYNCLINE_KEY"] = network_key()
    places = [
        LaunchHost(
            name=host.name,
            slots=host.slots,
            variables=thread_variables(host.slots) if host.name == LOCALHOST else forwarded_variables(),
        )
        for host in hosts
    ]
    laid = _programs(job, places, common)
    board = ProcessEvents(store)
    with _output() as output:
        crews: list[Processes] = []
        numbered = list(enumerate(zip(hosts, laid, strict=True)))
        here = [program for _, (host, programs) in numbered if host.name == LOCALHOST for program in programs]
        shares = [
            HostPrograms(number, host, programs) for number, (host, programs) in numbered if host.name != LOCALHOST
        ]
        if here:
            crews.append(LocalProcesses(here, output))
        if shares:
            crews.append(RemoteProcesses(shares, address, store.port, board, output))
        return _supervise(job, CombinedProcesses(crews), board, places, output)


def run_by_mpiexec(
    job: Job, ranks: int, hosts: Sequence[Host] = (), options: Sequence[str] = (), *, wait: bool = False
) -> int:
    """Run with mpiexec and without a supervisor; `options` are for mpiexec.

    This process becomes mpiexec. With `wait`, mpiexec is a child process instead, and its exit code is returned.
    """
    roles = role_environment(ranks, servers=job.servers, hosts=len(hosts) or 1, handlers=job.handlers)
    variables = {"SYNCLINE_TRANSPORT": "mpi", "PYTHONUNBUFFERED": "1", **roles, **job.variables}
    if hosts:
        variables["SYNCLINE_KEY"] = network_key()
    variables |= thread_variables(max((host.slots for host in hosts), default=ranks))
    environ = {**os.environ, **variables}
    command = mpi_command(job.target, ranks, hosts, environ, job.servers, job.server, options)
    return subprocess.call(command, env=environ) if wait else become_launcher(command, variables, mpi=True)


def run_by_srun(job: Job, ranks: int) -> int:
    """Run with srun, which this process becomes. It is called inside a Slurm job."""
    # The key is in the environment, which srun passes on: every user of a machine can read command lines.
    variables = {"SYNCLINE_KEY": network_key(), **role_environment(ranks, handlers=job.handlers)}
    return become_launcher(srun_command(job.target, ranks, os.environ), variables)


def become_launcher(command: Sequence[str], variables: Mapping[str, str], mpi: bool = False) -> int:
    """Become another launcher: signals, output and exit code are then its own. `mpi` says that it is mpiexec."""
    if mpi:
        clean_up_after_mpiexec()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), {**os.environ, **variables})


def _programs(job: Job, places: Sequence[LaunchHost], common: Mapping[str, str]) -> list[list[Program]]:
    workers = sum(place.slots for place in places)
    # Nobody beside the ranks and the servers joins MPI's world: there rank 0 evaluates.
    evaluators = 0 if job.mpi else job.evaluators
    told = role_environment(
        workers, servers=job.servers, evaluators=evaluators, hosts=len(places), handlers=job.handlers
    )
    limit = {} if job.lost_after is None else {LOST_AFTER_VARIABLE: job.lost_after}
    saves = {SAVES: "1"} if job.saves and not job.mpi else {}
    told = {**told, **limit, **saves, **job.variables, **common}
    if job.mpi:
        return mpiexec_programs(places, job.target, told, job.servers, job.server, plain=job.plain_rank is not None)
    ranks = rank_programs(places, job.target, told, job.plain_rank)
    parts = [
        server_programs(places, job.server, told, job.servers),
        add_horovod_variables(ranks) if job.horovod else ranks,
    ]
    if evaluators:
        parts.append(evaluator_programs(places, job.target, told))
    return [[program for programs in place for program in programs] for place in zip(*parts, strict=True)]


def _supervise(
    job: Job, crew: Processes, board: ProcessEvents, places: Sequence[LaunchHost], output: OutputForwarder
) -> int:
    def say(text: str) -> None:
        output.say(f"syncline: {text}")

    if job.announce or sys.stderr.isatty():
        say(f"starting {_describe_programs(job, places)}")
    return _supervisor(job, crew, board, places, say).run()


def _describe_programs(job: Job, places: Sequence[LaunchHost]) -> str:
    """The programs that are started, for a message.

    >>> _describe_programs(Job(target=(), servers=2, evaluators=1), [LaunchHost(name="here", slots=4)])
    '4 workers, 2 servers and an evaluator'
    """
    workers = sum(place.slots for place in places)
    parts = [f"{workers} worker{'s' * (workers > 1)}"]
    parts += [f"{job.servers} server{'s' * (job.servers > 1)}"] if job.servers else []
    parts += ["an evaluator"] if job.evaluators and not job.mpi else []
    whole = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"{whole}{' by mpiexec' if job.mpi else ''}{f' on {len(places)} hosts' if len(places) > 1 else ''}"


def _supervisor(
    job: Job,
    crew: Processes,
    board: ProcessEvents,
    places: Sequence[LaunchHost],
    say: Callable[[str], None],
    tick: Tick | None = None,
) -> Supervisor:
    ranks = 1 if job.mpi else sum(place.slots for place in places)  # mpiexec stands for all of them
    finishing = (EVALUATOR,) if job.evaluators else ()
    given = job.lost_after
    limit = lost_after() if given is None else read_lost_after(given, f"--lost-after {given}")
    return Supervisor(
        crew,
        board,
        ranks,
        policy=job.policy,
        say=say,
        tick=tick,
        finishing=finishing,
        saves=job.saves and not job.mpi,
        lost_after=limit,
    )


@contextlib.contextmanager
def _output() -> Iterator[OutputForwarder]:
    sys.stdout.flush()
    sys.stderr.flush()
    with OutputForwarder(sys.stdout.buffer, sys.stderr.buffer) as output:
        yield output


def run_in_lab(job: Job, hosts: int, rate: str, ranks: int | None = None) -> int:
    """Make a lab, run in it, take it down; the exit code."""
    ranks = hosts if ranks is None else ranks
    if ranks % hosts:
        raise SpecError(f"-n {ranks} is not a multiple of the {hosts} hosts of the lab: every host takes as many ranks")
    warn_if_oversubscribed(ranks)
    with Lab(hosts, rate) as lab:
        print(
            f"syncline: a lab of {hosts} hosts at {rate}, {_measured(lab)}; it adds no latency of its own",
            file=sys.stderr,
            flush=True,
        )
        places, store, address = places_in_lab(lab, ranks, job.address, mpi=job.mpi)
        return run_on_places(job, places, store, address)


def places_in_lab(
    lab: Lab, ranks: int, address: str | None = None, *, mpi: bool = False
) -> tuple[list[LaunchHost], TCPStore, str]:
    """Places for so many ranks, a fresh store for them, and its address. With fewer ranks than hosts the first ones.

    `mpi`: places that mpiexec can reach too.
    """
    hosts = lab.hosts[:ranks]
    first = hosts[0]
    meeting = address or first.address
    # A socket stays in the network it was made in, whichever thread uses it later.
    with _unresolved_names():
        store = first.call(lambda: serve_store(meeting, ranks))
    common = {"SYNCLINE_LAB": f"{len(lab.hosts)}@{lab.rate}", "SYNCLINE_KEY": network_key()}
    door = lab.door if mpi else ""
    return [_place(host, ranks // len(hosts), common, door) for host in hosts], store, meeting


@contextlib.contextmanager
def _unresolved_names() -> Iterator[None]:
    """Keep c10d's warning that the lab has no names off the terminal; it writes to the descriptor itself."""
    sys.stderr.flush()
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _measured(lab: Lab) -> str:
    return "not measured" if lab.measured is None else f"measured {lab.measured / 1e6:.1f} Mbit/s"


def _place(host: LabHost, slots: int, common: Mapping[str, str], door: str) -> LaunchHost:
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    variables = {**dict.fromkeys(names, host.interface), **common}
    # All hosts share this machine's cores: more threads would only make them wait for each other.
    variables["OMP_NUM_THREADS"] = "1"
    # Nobody answers for names in the lab, and c10d warns of each address that it cannot name.
    variables["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    return LaunchHost(
        name=host.name,
        slots=slots,
        enter=host.enter,
        variables=variables,
        address=host.address,
        interface=host.interface,
        door=door,
    )


def srun_command(target: Sequence[str], ranks: int, environ: Mapping[str, str]) -> list[str]:
    """The whole command line."""
    if "SLURM_JOB_ID" not in environ:
        raise UnsupportedError("--hosts slurm needs a Slurm job around it (SLURM_JOB_ID is not set): salloc -N 2")
    srun = shutil.which("srun")
    if srun is None:
        raise UnsupportedError("--hosts slurm: srun is not on PATH of this node; load Slurm's module")
    try:
        nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1")
    except ValueError as error:
        raise SpecError(f"SLURM_JOB_NUM_NODES={environ.get('SLURM_JOB_NUM_NODES')!r} is not a number") from error
    each, odd = divmod(ranks, nodes)
    if odd or not each:
        raise SpecError(f"-n {ranks} cannot be dealt evenly to the {nodes} nodes of this Slurm job")
    count = [f"--ntasks={ranks}", f"--ntasks-per-node={each}", "--kill-on-bad-exit=1"]
    return [srun, *count, sys.executable, str(WORKER), *target]
