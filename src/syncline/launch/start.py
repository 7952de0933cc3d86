"""Starts a run: on this machine, on hosts over ssh, in a lab, or with mpiexec or srun."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from syncline.environment.base import SAVES
from syncline.environment.lost_after import LOST_AFTER_VARIABLE, lost_after, read_lost_after
from syncline.errors import SpecError, UnsupportedError
from syncline.launch.cleanup_process import clean_up_after_mpiexec
from syncline.launch.discovery import HostDiscovery
from syncline.launch.elastic import LOST_AFTER_S, ElasticOptions, elastic_variables
from syncline.launch.job_folder import RUN_ID_KEY, RUN_ID_VARIABLE, JobRecord, write_end, write_job
from syncline.launch.lab import Lab, LabHost
from syncline.launch.local import WORKER, LocalProcesses
from syncline.launch.machine import warn_if_oversubscribed
from syncline.launch.mpi import mpi_command, mpiexec_programs
from syncline.launch.output import OutputForwarder
from syncline.launch.prefork_client import start_prefork
from syncline.launch.process_events import ProcessEvents, serve_store
from syncline.launch.processes import CombinedProcesses, Processes, ProcessExit
from syncline.launch.programs import (
    EVALUATOR,
    LOCALHOST,
    Host,
    LaunchHost,
    Program,
    evaluator_programs,
    forwarded_variables,
    network_key,
    rank_programs,
    rendezvous_variables,
    role_environment,
    server_programs,
    thread_variables,
)
from syncline.launch.restarts import ChangingHosts, ElasticRanks
from syncline.launch.server_restarts import ServerRestarts
from syncline.launch.ssh import HostPrograms, RemoteProcesses, address_towards, outward_address
from syncline.launch.supervisor import FailurePolicy, Supervisor, Tick

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
SERVER = ("-m", "syncline.server")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, independent of the place."""

    target: tuple[str, ...]
    policy: FailurePolicy = "stop"
    address: str | None = None
    servers: int = 0
    replicas: int = 1
    """Servers that hold each shard. With 2 or more, the run continues without a lost server."""
    server_restarts: int = 0
    """With replicas: how many times each server that fails is started again."""
    server: tuple[str, ...] = SERVER
    evaluators: int = 0
    """1 to start the target once more as an evaluator beside the ranks (SYNCLINE_ROLE=evaluator)."""
    handlers: str = ""
    """Modules, separated by commas, that register handlers for the servers."""
    mpi: bool = False
    """Whether mpiexec starts the ranks, here or in the lab, and they communicate over MPI."""
    plain_rank: int | None = 0
    """The rank whose output has no prefix; None: every line has its rank."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for every process."""
    saves: bool = False
    """Whether its ranks save and end after Ctrl-C or SIGTERM; servers and evaluator end after them. All processes have
    `SAVES` in their environment. It has no effect with mpiexec, which ends the ranks itself."""
    announce: bool = False
    """Whether to print what is started even if stderr is not a terminal."""
    horovod: bool = False
    """Whether the ranks also get Horovod's variables, HOROVOD_RANK and others."""
    lost_after: str | None = None
    """Seconds without a heartbeat after which a program counts as lost, "0" for no limit; None for the default."""
    elastic: ElasticOptions | None = None
    """The limits of an elastic job, which goes on without the ranks that fail. Its policy is "continue"."""
    discovery: HostDiscovery | None = None
    """Finds out, while an elastic job runs, which hosts it may use."""
    elastic_timeout_s: float = 600.0
    """With `discovery`: seconds that the job waits for more hosts, and that a worker has to leave."""
    folder: Path | None = None
    """The folder of an elastic job, for its `job.json`. The caller has locked it."""
    output: Path | None = None
    """A folder to which the output of the ranks is written too, on the host of each rank. Not with mpiexec or srun."""

    @property
    def silence_limit(self) -> str | None:
        """`lost_after`, which is shorter by default if the job is elastic."""
        usual = LOST_AFTER_S if self.elastic is not None and LOST_AFTER_VARIABLE not in os.environ else None
        return usual if self.lost_after is None else self.lost_after


def run_here(job: Job, ranks: int) -> int:
    """Run on this machine; return the exit code."""
    address, host = job.address or LOOPBACK, local_host(ranks)
    if job.elastic is not None and job.address is not None:  # ranks may join from other hosts
        host = replace(host, variables={**host.variables, "SYNCLINE_KEY": network_key()})
    _start_prefork(job, host)
    return run_supervised(job, [host], serve_store(address, ranks), address)


def local_host(ranks: int) -> LaunchHost:
    """This machine, with its cores divided among the ranks."""
    return LaunchHost(name=LOCALHOST, slots=ranks, variables=thread_variables(ranks))


def _start_prefork(job: Job, host: LaunchHost) -> None:
    """Start the prefork process early, so that it imports torch while this process imports torch for the store."""
    if not job.mpi:
        start_prefork(job.target, {**os.environ, **host.variables, **job.variables})


def run_supervised(job: Job, hosts: Sequence[LaunchHost], store: TCPStore, address: str) -> int:
    """Run on hosts that are all on this machine (a lab, or the machine itself); return the exit code."""
    with _terminal_output() as output:
        programs = _local_programs(job, hosts, store, address)
        return _supervise(job, LocalProcesses(programs, output), programs, ProcessEvents(store), hosts, output)


@dataclass(frozen=True)
class JobExit:
    """How a run ended, for a caller that reports it."""

    code: int
    failure: ProcessExit | None
    """The first failure."""
    early: str | None
    """The reason why `tick` ended it."""


def run_logged(
    job: Job, hosts: Sequence[LaunchHost], store: TCPStore, address: str, log: BinaryIO, tick: Tick
) -> JobExit:
    """Run on hosts that are all on this machine, with all output in `log`."""
    with OutputForwarder(log, log) as output:
        programs = _local_programs(job, hosts, store, address)
        processes = LocalProcesses(programs, output)
        supervisor = _supervisor(job, processes, programs, ProcessEvents(store), hosts, output.say, tick)
        code = supervisor.run()
    return JobExit(code, supervisor.failure, supervisor.ended_early)


def _local_programs(job: Job, hosts: Sequence[LaunchHost], store: TCPStore, address: str) -> list[Program]:
    common = rendezvous_variables(address, store.port)
    return [program for each in _programs(job, hosts, common) for program in each]


def run_on_hosts(job: Job, hosts: Sequence[Host]) -> int:
    """Run on hosts, over ssh except on this machine; return the exit code."""
    changing = job.discovery is not None
    address = job.address or (outward_address(hosts) if changing else address_towards(hosts))
    for host in hosts:
        if host.name == LOCALHOST:
            _start_prefork(job, local_host(host.slots))
    store = serve_store(address, sum(host.slots for host in hosts))
    common = rendezvous_variables(address, store.port)
    if changing or any(host.name != LOCALHOST for host in hosts):
        common["SYNCLINE_KEY"] = network_key()
    launch_hosts = [_launch_host(host) for host in hosts]
    events = ProcessEvents(store)
    numbered = list(enumerate(zip(hosts, _programs(job, launch_hosts, common), strict=True)))
    here = [program for _, (host, programs) in numbered if host.name == LOCALHOST for program in programs]
    remote = [HostPrograms(number, host, programs) for number, (host, programs) in numbered if host.name != LOCALHOST]
    with _terminal_output() as output:
        parts: list[Processes] = [LocalProcesses(here, output, [LOCALHOST])] if here or changing else []
        elastic = job.elastic is not None or job.server_restarts > 0
        if remote or changing:
            parts.append(RemoteProcesses(remote, address, store.port, events, output, elastic=elastic))
        programs = [program for _, (_, each) in numbered for program in each]
        follow = None if job.discovery is None else _changing_hosts(job, job.discovery, common)
        return _supervise(job, CombinedProcesses(parts), programs, events, launch_hosts, output, follow)


def _launch_host(host: Host) -> LaunchHost:
    if host.name == LOCALHOST:
        return local_host(host.slots)
    return LaunchHost(name=host.name, slots=host.slots, variables=forwarded_variables())


def _changing_hosts(job: Job, discovery: HostDiscovery, common: Mapping[str, str]) -> ChangingHosts:
    def make_program(name: str, local_rank: int) -> Program:
        [programs] = _programs(job, [_launch_host(Host(name, local_rank + 1))], common)
        return programs[local_rank]

    return ChangingHosts(discovery, make_program, job.elastic_timeout_s, job.elastic_timeout_s)


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
    # The key is in the environment, which srun forwards: every user of a machine can read command lines.
    variables = {"SYNCLINE_KEY": network_key(), **role_environment(ranks, handlers=job.handlers), **job.variables}
    return become_launcher(srun_command(job.target, ranks, os.environ), variables)


def become_launcher(command: Sequence[str], variables: Mapping[str, str], mpi: bool = False) -> int:
    """Replace this process by another launcher, which handles signals, output and exit code. `mpi`: it is mpiexec."""
    if mpi:
        clean_up_after_mpiexec()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), {**os.environ, **variables})


def _programs(job: Job, hosts: Sequence[LaunchHost], common: Mapping[str, str]) -> list[list[Program]]:
    workers = sum(host.slots for host in hosts)
    # With MPI there is no evaluator: only ranks and servers join its world, and rank 0 evaluates.
    evaluators = 0 if job.mpi else job.evaluators
    # With an address that others can reach, ranks of an elastic job may join from other hosts.
    elsewhere = int(job.elastic is not None and job.address is not None)
    variables = role_environment(
        workers,
        servers=job.servers,
        replicas=job.replicas,
        evaluators=evaluators,
        hosts=len(hosts) + elsewhere,
        handlers=job.handlers,
    )
    limit = {} if job.silence_limit is None else {LOST_AFTER_VARIABLE: job.silence_limit}
    saves = {SAVES: "1"} if job.saves and not job.mpi else {}
    elastic = elastic_variables(job.elastic, os.environ, job.folder)
    variables = {**variables, **limit, **saves, **elastic, **job.variables, **common}
    if job.mpi:
        return mpiexec_programs(hosts, job.target, variables, job.servers, job.server, plain=job.plain_rank is not None)
    parts = [
        server_programs(hosts, job.server, variables, job.servers),
        rank_programs(
            hosts,
            job.target,
            variables,
            job.plain_rank,
            job.horovod,
            job.elastic is not None,
            None if job.output is None else job.output.absolute(),
        ),
    ]
    if evaluators:
        parts.append(evaluator_programs(hosts, job.target, variables))
    return [[program for programs in each for program in programs] for each in zip(*parts, strict=True)]


def _supervise(
    job: Job,
    processes: Processes,
    programs: Sequence[Program],
    events: ProcessEvents,
    hosts: Sequence[LaunchHost],
    output: OutputForwarder,
    follow: ChangingHosts | None = None,
) -> int:
    def say(text: str) -> None:
        output.say(f"syncline: {text}")

    if job.announce or sys.stderr.isatty():
        say(f"starting {_describe_programs(job, hosts)}")
    elastic = None if job.elastic is None else ElasticRanks(job.elastic, programs, events, say, hosts=follow)
    supervisor = _supervisor(job, processes, programs, events, hosts, say, elastic=elastic)
    if job.elastic is None or job.folder is None:
        return supervisor.run()
    if job.announce or sys.stderr.isatty():
        say(f"to see the workers: syncline status {job.folder}; to add one: syncline join {job.folder}")
    record = JobRecord.of(programs, job.elastic, saves=job.saves)
    events.store.set(RUN_ID_KEY, record.environment[RUN_ID_VARIABLE])
    write_job(job.folder, record)
    code: int | None = None
    try:
        code = supervisor.run()
        return code
    finally:
        write_end(job.folder, record, code)


def _describe_programs(job: Job, hosts: Sequence[LaunchHost]) -> str:
    """The programs that are started, for a message.

    >>> _describe_programs(Job(target=(), servers=2, evaluators=1), [LaunchHost(name="here", slots=4)])
    '4 workers, 2 servers and an evaluator'
    """
    workers = sum(host.slots for host in hosts)
    parts = [f"{workers} worker{'s' * (workers > 1)}"]
    parts += [f"{job.servers} server{'s' * (job.servers > 1)}"] if job.servers else []
    parts += ["an evaluator"] if job.evaluators and not job.mpi else []
    whole = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"{whole}{' by mpiexec' if job.mpi else ''}{f' on {len(hosts)} hosts' if len(hosts) > 1 else ''}"


def _supervisor(
    job: Job,
    processes: Processes,
    programs: Sequence[Program],
    events: ProcessEvents,
    hosts: Sequence[LaunchHost],
    say: Callable[[str], None],
    tick: Tick | None = None,
    elastic: ElasticRanks | None = None,
) -> Supervisor:
    ranks = 1 if job.mpi else sum(host.slots for host in hosts)  # mpiexec represents all ranks
    finishing = (EVALUATOR,) if job.evaluators else ()
    replicated = [each for each in programs if each.variables.get("SYNCLINE_ROLE") == "server" and job.replicas > 1]
    given = job.silence_limit
    limit = lost_after() if given is None else read_lost_after(given, f"--lost-after {given}")
    return Supervisor(
        processes,
        events,
        ranks,
        policy=job.policy,
        say=say,
        tick=tick,
        finishing=finishing,
        servers=ServerRestarts(replicated, job.server_restarts, say),
        saves=job.saves and not job.mpi,
        lost_after=limit,
        elastic=elastic,
    )


def _terminal_output() -> OutputForwarder:
    sys.stdout.flush()
    sys.stderr.flush()
    return OutputForwarder(sys.stdout.buffer, sys.stderr.buffer)


def run_in_lab(job: Job, hosts: int, rate: str, ranks: int | None = None) -> int:
    """Create a lab, run in it, and remove it; return the exit code."""
    ranks = hosts if ranks is None else ranks
    if ranks % hosts:
        raise SpecError(
            f"-n {ranks} is not a multiple of the {hosts} hosts of the lab: every host takes the same number"
        )
    warn_if_oversubscribed(ranks)
    with Lab(hosts, rate) as lab:
        measured = "not measured" if lab.measured is None else f"measured {lab.measured / 1e6:.1f} Mbit/s"
        text = f"syncline: a lab of {hosts} hosts at {rate}, {measured}; it adds no latency of its own"
        print(text, file=sys.stderr, flush=True)
        launch_hosts, store, address = hosts_in_lab(lab, ranks, job.address, mpi=job.mpi)
        return run_supervised(job, launch_hosts, store, address)


def hosts_in_lab(
    lab: Lab, ranks: int, address: str | None = None, *, mpi: bool = False
) -> tuple[list[LaunchHost], TCPStore, str]:
    """The hosts of a lab for this number of ranks, a new store for them, and its address.

    With fewer ranks than hosts, the first hosts are used. With `mpi`, mpiexec can reach the hosts too.
    """
    hosts = lab.hosts[:ranks]
    first = hosts[0]
    store_address = address or first.address
    # A socket stays in the network namespace in which it was created, whichever thread uses it later.
    with _hidden_stderr():
        store = first.call(lambda: serve_store(store_address, ranks))
    common = {"SYNCLINE_LAB": f"{len(lab.hosts)}@{lab.rate}", "SYNCLINE_KEY": network_key()}
    remote_shell = lab.remote_shell if mpi else ""
    return [_lab_host(host, ranks // len(hosts), common, remote_shell) for host in hosts], store, store_address


@contextlib.contextmanager
def _hidden_stderr() -> Iterator[None]:
    """Hide c10d's warning that the lab has no host names. c10d writes to the file descriptor itself."""
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


def _lab_host(host: LabHost, slots: int, common: Mapping[str, str], remote_shell: str) -> LaunchHost:
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    variables = {**dict.fromkeys(names, host.interface), **common}
    # All hosts share the cores of this machine, so more threads would only wait for each other.
    variables["OMP_NUM_THREADS"] = "1"
    # The lab has no DNS, and c10d warns about each address that it cannot resolve.
    variables["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    return LaunchHost(
        name=host.name,
        slots=slots,
        enter=host.enter,
        variables=variables,
        address=host.address,
        interface=host.interface,
        remote_shell=remote_shell,
    )


def srun_command(target: Sequence[str], ranks: int, environ: Mapping[str, str]) -> list[str]:
    """The command line of srun. `environ` is that of a Slurm job."""
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
        raise SpecError(f"-n {ranks} cannot be divided evenly among the {nodes} nodes of this Slurm job")
    count = [f"--ntasks={ranks}", f"--ntasks-per-node={each}", "--kill-on-bad-exit=1"]
    return [srun, *count, sys.executable, str(WORKER), *target]
