"""`simulate`: the same function on many virtual ranks, under a virtual clock, in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.environment import Environment
from syncline.errors import PeerLostError, WorldError, warn_deprecated
from syncline.runtime import Simulator
from syncline.runtime.simulator import SimulatedTask
from syncline.transports import Message, Network, SimulatedConnector, SimulatedNetwork, SimulatedTransport, Transport
from syncline.transports.base import DEFAULT_TIMEOUT_S
from syncline.transports.faults import Fault, Join
from syncline.transports.simulated import job_channel
from syncline.world.elastic import ElasticLimits, ElasticMember
from syncline.world.world import World, elastic_world, make_current

__all__ = ["ExtraProcess", "Simulation", "simulate"]

SHOW_EVERY_S = 10.0
"""Seconds of real time between two lines of a long simulation."""


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    `results` holds what `fn` returned on each rank: None if the rank was killed, the exception if it raised one and
    `return_exceptions` was set. `time` is the virtual time in seconds at which the last rank ended. `messages` holds
    every message that arrived.

    >>> import syncline as sl
    >>> run = sl.simulate(lambda world: world.compute(2.0 * world.rank), ranks=3)
    >>> run.time, len(run.messages)
    (4.0, 0)
    """

    results: tuple[Any, ...]
    time: float
    messages: tuple[Message, ...]
    killed: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class ExtraProcess:
    """A simulated process that is not a rank, such as a server: its function and its role."""

    run: Callable[[Transport], Any]
    role: str = "server"


def simulate(
    fn: Callable[[World], Any],
    ranks: int,
    network: Network | None = None,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    chaos: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    check: bool = False,
    return_exceptions: bool = False,
    extra: Sequence[ExtraProcess | Callable[[Transport], Any]] = (),
    progress: Callable[[float], None] | None = None,
    threads: bool = False,
    elastic: tuple[int, int] | None = None,
    aside: Sequence[ExtraProcess | Callable[[Transport], Any]] = (),
) -> Simulation:
    """Run `fn(world)` once on each of `ranks` virtual ranks. The same seed gives the same run, bit for bit.

    Events happen in the order of virtual time. The seed draws jitter, faults and the order of simultaneous events.
    With `chaos` the seed draws any possible order, to search for bad interleavings. An exception of a rank ends the
    simulation and is raised here, with a note on how to replay it. With `return_exceptions` it is that rank's result,
    and the other ranks continue.

    Each function of `extra` runs as `fn(transport)` in a process that is not a rank: a server, or the role of an
    `ExtraProcess`. These processes are numbered after the ranks, so that a fault may name them. The ranks reach them
    through `world.job_channel`. The simulation ends when all ranks have ended. `aside` is the old name of `extra`.

    `progress` is called about once a second of real time with the virtual time; an exception from it ends the
    simulation. By default a line is printed every ten seconds if standard error is a terminal.

    `elastic` gives the least and the most workers of an elastic job: it continues when ranks are killed, and a fault
    `Join` starts one more. The results of workers that join follow those of the ranks. They are numbered after the
    processes of `extra`.

    Tasks are greenlets of one thread. With `threads` each is a thread: slower, the same run bit for bit.
    It is for code that waits for other ranks where the simulator cannot switch to another task, such as in a thread
    that `fn` has started. It is also for code with `threading.local` values, which the ranks share otherwise, and for
    hooks that take a lock held around `backward()`: a backward pass runs on another thread otherwise.

    >>> import torch, syncline as sl
    >>> def step(world):
    ...     world.compute(0.010)
    ...     return sl.allreduce(torch.tensor([float(world.rank)]), op="sum")
    >>> run = sl.simulate(step, ranks=64, network=sl.Network(latency=50e-6, bandwidth=1.25e9), seed=7)
    >>> run.results[63]
    tensor([2016.])
    >>> round(run.time, 4)
    0.0163
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise WorldError(f"a simulation has at least one rank (ranks: {ranks!r})")
    if not callable(fn):
        raise WorldError(f"simulate(fn, ranks) runs fn(world) on each rank, and {fn!r} is no function")
    if network is not None and not isinstance(network, Network):
        raise WorldError(f"network={network!r}: write network=sl.Network(latency=1e-4, bandwidth=12.5e6)")
    simulator = Simulator(seed, chaos, threads)
    if aside:
        warn_deprecated("simulate(aside=…)", "simulate(extra=…)")
    processes = [each if isinstance(each, ExtraProcess) else ExtraProcess(each) for each in (*extra, *aside)]
    joins = [fault for fault in faults if isinstance(fault, Join)]
    _check_elastic(elastic, ranks, joins)
    count = ranks + len(processes) + len(joins)
    simulated = SimulatedNetwork(simulator, count, network or Network(), faults, elastic is not None)
    roles = tuple(each.role for each in processes)
    hosts = tuple(f"host{simulated.model.host(rank)}" for rank in range(ranks))
    if elastic is None:
        mains = [
            simulator.spawn(rank, "main", _start, fn, rank, simulated, hosts, roles, timeout, check, main=True)
            for rank in range(ranks)
        ]
    else:
        first = ranks + len(processes)
        starts = [*((rank, None) for rank in range(ranks)), *((first + n, join.at) for n, join in enumerate(joins))]
        mains = [
            simulator.spawn(
                member,
                "main",
                _start_member,
                fn,
                member,
                simulated,
                ranks,
                elastic,
                roles,
                start,
                timeout,
                check,
                main=True,
            )
            for member, start in starts
        ]
    others = [
        simulator.spawn(member, "extra", _start_extra, each, member, simulated, timeout)
        for member, each in enumerate(processes, start=ranks)
    ]
    failed = _collect_failures(simulator, simulated, [*mains, *others], return_exceptions)
    shown = _ProgressPrinter(ranks).show if progress is None and sys.stderr.isatty() else progress
    simulator.run(None if shown is None else lambda: shown(simulator.now))
    tasks = [*failed, *simulator.tasks]
    _raise_first(simulator, tasks, mains, return_exceptions, f"seed={seed}{', chaos=True' if chaos else ''}")
    results = tuple(task.error if task.error is not None else task.result for task in mains)
    return Simulation(results, simulator.now, tuple(simulated.messages), tuple(sorted(simulated.killed)), seed)


class _ProgressPrinter:
    """Prints the progress of a long simulation."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._began = self._shown = time.monotonic()

    def show(self, now: float) -> None:
        """Print the virtual time, at most every `SHOW_EVERY_S` seconds."""
        if time.monotonic() - self._shown >= SHOW_EVERY_S:
            self._shown = time.monotonic()
            passed = self._shown - self._began
            print(f"syncline: {self._ranks} simulated ranks: {now:.4g} virtual s in {passed:.0f} s", file=sys.stderr)


def _collect_failures(
    simulator: Simulator, simulated: SimulatedNetwork, members: Sequence[SimulatedTask], return_exceptions: bool
) -> list[SimulatedTask]:
    """A list to which each failed process is added. The first failure ends the simulation, unless others continue."""
    failed: list[SimulatedTask] = []
    watched = set(members)

    def ended(task: SimulatedTask) -> None:
        if task.error is None or task not in watched or simulator.stopping:
            return
        failed.append(task)
        if return_exceptions:
            lost = task.error.peer if isinstance(task.error, PeerLostError) else None
            simulated.leave(task.rank, because_of=lost)  # like a process that ends with a traceback
        else:
            simulator.stop()

    simulator.on_finish = ended
    return failed


def _start(
    fn: Callable[[World], Any],
    rank: int,
    simulated: SimulatedNetwork,
    hosts: tuple[str, ...],
    roles: tuple[str, ...],
    timeout: float,
    check: bool,
) -> Any:
    environment = Environment(
        source="sl.simulate",
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        host=hosts[rank],
    )
    transport = SimulatedTransport(simulated, tuple(range(len(hosts))), rank, timeout=timeout)
    if roles:
        transport.add_roles(job_channel(simulated, rank, timeout), roles)
    world = World(environment, transport, hosts, check)
    make_current(world)
    return fn(world)


def _check_elastic(elastic: tuple[int, int] | None, ranks: int, joins: Sequence[Join]) -> None:
    if elastic is None:
        if joins:
            raise WorldError(f"{joins[0]!r}: workers join an elastic job only; give elastic=(least, most)")
        return
    least, most = elastic
    if not 1 <= least <= ranks <= most:
        raise WorldError(
            f"elastic={elastic} with {ranks} ranks: expected (fewest workers, most workers), with ranks "
            "neither below the first number nor above the second"
        )


def _start_member(
    fn: Callable[[World], Any],
    member: int,
    simulated: SimulatedNetwork,
    ranks: int,
    limits: tuple[int, int],
    roles: tuple[str, ...],
    start: float | None,
    timeout: float,
    check: bool,
) -> Any:
    """A member of an elastic job; `start` is the time at which a newcomer starts."""
    if start is not None:
        simulated.runtimes[member].sleep(start)
    host = f"host{simulated.model.host(member)}"
    environment = Environment(source="sl.simulate", rank=0, size=1, host=host)
    found = ElasticLimits(minimum=limits[0], maximum=limits[1], member=member, joins=start is not None)
    connector = SimulatedConnector(simulated, member, timeout, roles)
    world = elastic_world(ElasticMember(connector, found, ranks, timeout), environment, check, timeout)
    make_current(world)
    result = None
    try:
        result = fn(world)
    except SystemExit as end:
        if end.code:
            raise
    if not world.closed:
        world.elastic_leave()
    simulated.leave(member, failed=False)  # as the end of a process closes its connections
    return result


def _start_extra(process: ExtraProcess, member: int, simulated: SimulatedNetwork, timeout: float) -> Any:
    return process.run(job_channel(simulated, member, timeout))


def _raise_first(
    simulator: Simulator,
    tasks: Sequence[SimulatedTask],
    mains: Sequence[SimulatedTask],
    return_exceptions: bool,
    replay: str,
) -> None:
    if simulator.deadlock is not None:
        raise _with_note(simulator.deadlock, f"replay: {replay}")
    for task in tasks:
        main = task in mains
        if task.error is None or task.error_seen or (main and return_exceptions):
            continue
        if not main and isinstance(task.error, PeerLostError) and return_exceptions:
            continue  # a communication task whose rank has raised the error already
        raise _with_note(task.error, f"in {task} of a simulation at t={simulator.now:.6g} s; replay: {replay}")


def _with_note(error: BaseException, note: str) -> BaseException:
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(note)
    return error
