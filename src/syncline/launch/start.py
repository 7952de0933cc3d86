"""The ways to start a run: here, on hosts, in the lab, or handed over to mpiexec and srun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from syncline.environment.base import SAVES
from syncline.environment.heartbeats import LOST_AFTER_VARIABLE, lost_after, read_lost_after
from syncline.launch.crew import Crew, Several
from syncline.launch.failures import Ended
from syncline.launch.horovod import tell_horovods
from syncline.launch.hosts import HERE, Host
from syncline.launch.local import LocalCrew
from syncline.launch.mpi import mpi_command
from syncline.launch.mpi_layout import lay_out_mpi
from syncline.launch.output import Output
from syncline.launch.prefork import start_prefork
from syncline.launch.programs import EVALUATOR, Place, Program, lay_out, lay_out_evaluator, lay_out_servers
from syncline.launch.remote import RemoteCrew, Share
from syncline.launch.slurm import srun_command
from syncline.launch.ssh import address_towards
from syncline.launch.store import Board, serve_store
from syncline.launch.supervisor import Policy, Supervisor, Tick
from syncline.launch.sweeper import sweep_after_mpiexec
from syncline.launch.variables import carried, common_variables, network_key, role_environment, threads_each

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = [
    "SERVER",
    "Ending",
    "Job",
    "hand_over",
    "local_place",
    "run_by_mpiexec",
    "run_by_srun",
    "run_here",
    "run_on_hosts",
    "run_placed",
    "run_quietly",
]

LOOPBACK = "127.0.0.1"
SERVER = ("-m", "syncline.server")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, whatever the place."""

    target: tuple[str, ...]
    policy: Policy = "stop"
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
    return run_placed(job, [place], serve_store(address, ranks), address)


def local_place(ranks: int) -> Place:
    """This machine, its cores shared among so many ranks."""
    return Place(name=HERE, slots=ranks, variables=threads_each(ranks))


def _start_prefork(job: Job, place: Place) -> None:
    """Start the prefork process early, so that it imports torch while this process imports torch for the store."""
    if not job.mpi:
        start_prefork(job.target, {**os.environ, **place.variables, **job.variables})


def run_placed(job: Job, places: Sequence[Place], store: TCPStore, address: str) -> int:
    """Run at places that are all on this machine; the exit code."""
    common = common_variables(address, store.port)
    programs = [program for programs in _lay_out(job, places, common) for program in programs]
    with _output() as output:
        return _supervise(job, LocalCrew(programs, output), Board(store), places, output)


@dataclass(frozen=True)
class Ending:
    """How a run ended that somebody else tells of."""

    code: int
    failure: Ended | None
    """Who failed first."""
    early: str | None
    """Why it was ended early."""


def run_quietly(job: Job, places: Sequence[Place], store: TCPStore, address: str, log: BinaryIO, tick: Tick) -> Ending:
    """Run at places that are all on this machine; what is printed goes to `log`."""
    common = common_variables(address, store.port)
    programs = [program for programs in _lay_out(job, places, common) for program in programs]
    with Output(log, log) as output:
        told = _supervisor(job, LocalCrew(programs, output), Board(store), places, output.say, tick)
        code = told.run()
    return Ending(code, told.failure, told.ended_early)


def run_on_hosts(job: Job, hosts: Sequence[Host]) -> int:
    """Run on hosts, over ssh where they are not this machine; the exit code."""
    address = job.address or address_towards(hosts)
    for host in hosts:
        if host.name == HERE:
            _start_prefork(job, local_place(host.slots))
    store = serve_store(address, sum(host.slots for host in hosts))
    common = common_variables(address, store.port)
    if any(host.name != HERE for host in hosts):
        common["SYNCLINE_KEY"] = network_key()
    places = [
        Place(
            name=host.name,
            slots=host.slots,
            variables=threads_each(host.slots) if host.name == HERE else carried(),
        )
        for host in hosts
    ]
    laid = _lay_out(job, places, common)
    board = Board(store)
    with _output() as output:
        crews: list[Crew] = []
        numbered = list(enumerate(zip(hosts, laid, strict=True)))
        here = [program for _, (host, programs) in numbered if host.name == HERE for program in programs]
        shares = [Share(number, host, programs) for number, (host, programs) in numbered if host.name != HERE]
        if here:
            crews.append(LocalCrew(here, output))
        if shares:
            crews.append(RemoteCrew(shares, address, store.port, board, output))
        return _supervise(job, Several(crews), board, places, output)


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
    variables |= threads_each(max((host.slots for host in hosts), default=ranks))
    environ = {**os.environ, **variables}
    command = mpi_command(job.target, ranks, hosts, environ, job.servers, job.server, options)
    return subprocess.call(command, env=environ) if wait else hand_over(command, variables, mpi=True)


def run_by_srun(job: Job, ranks: int) -> int:
    """Run with srun, which this process becomes. It is called inside a Slurm job."""
    # The key is in the environment, which srun passes on: every user of a machine can read command lines.
    variables = {"SYNCLINE_KEY": network_key(), **role_environment(ranks, handlers=job.handlers)}
    return hand_over(srun_command(job.target, ranks, os.environ), variables)


def hand_over(command: Sequence[str], variables: Mapping[str, str], mpi: bool = False) -> int:
    """Become another launcher: signals, output and exit code are then its own. `mpi` says that it is mpiexec."""
    if mpi:
        sweep_after_mpiexec()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), {**os.environ, **variables})


def _lay_out(job: Job, places: Sequence[Place], common: Mapping[str, str]) -> list[list[Program]]:
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
        return lay_out_mpi(places, job.target, told, job.servers, job.server, plain=job.plain_rank is not None)
    ranks = lay_out(places, job.target, told, job.plain_rank)
    parts = [lay_out_servers(places, job.server, told, job.servers), tell_horovods(ranks) if job.horovod else ranks]
    if evaluators:
        parts.append(lay_out_evaluator(places, job.target, told))
    return [[program for programs in place for program in programs] for place in zip(*parts, strict=True)]


def _supervise(job: Job, crew: Crew, board: Board, places: Sequence[Place], output: Output) -> int:
    def say(text: str) -> None:
        output.say(f"syncline: {text}")

    if job.announce or sys.stderr.isatty():
        say(f"starting {_describe_programs(job, places)}")
    return _supervisor(job, crew, board, places, say).run()


def _describe_programs(job: Job, places: Sequence[Place]) -> str:
    """The programs that are started, for a message.

    >>> _describe_programs(Job(target=(), servers=2, evaluators=1), [Place(name="here", slots=4)])
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
    crew: Crew,
    board: Board,
    places: Sequence[Place],
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
def _output() -> Iterator[Output]:
    sys.stdout.flush()
    sys.stderr.flush()
    with Output(sys.stdout.buffer, sys.stderr.buffer) as output:
        yield output
