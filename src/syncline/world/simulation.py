"""`simulate`: the same function on many virtual ranks, under a virtual clock, in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.environment import Environment
from syncline.errors import PeerLostError, WorldError
from syncline.runtime import Kernel
from syncline.runtime.kernel import SimulatedTask
from syncline.transports import Hub, Message, Network, SimulatedTransport, Transport
from syncline.transports.base import DEFAULT_TIMEOUT_S
from syncline.transports.faults import Fault
from syncline.transports.simulated import wide_channel
from syncline.world.world import World, make_current

__all__ = ["Aside", "Simulation", "simulate"]

SHOW_EVERY_S = 10.0
"""Seconds of real time between two lines of a long simulation."""


@dataclass(frozen=True)
class Simulation:
    """What a simulation gave.

    `results` holds what `fn` returned on each rank (None where the rank was killed, the exception where it
    raised and `return_exceptions` was set), `time` the virtual seconds until the last rank ended, `messages`
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
class Aside:
    """A member of a simulation beside its ranks: what it runs, and as what the ranks know it."""

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
    aside: Sequence[Aside | Callable[[Transport], Any]] = (),
    progress: Callable[[float], None] | None = None,
    threads: bool = False,
) -> Simulation:
    """Run `fn(world)` once on each of `ranks` virtual ranks. The same seed gives the same run, bit for bit.

    Events happen in the order of virtual time; the seed draws jitter, faults and the order of what happens at
    the same instant. With `chaos` the seed draws any order that is possible at all: for hunting. What a rank
    raises ends the simulation and is raised here, with a note on how to replay it; with `return_exceptions` it
    is a result, and the others go on.

    Each function of `aside` runs as `fn(transport)` on a member beside the ranks: a server, or what `Aside` names.
    They are numbered after the ranks, so that a fault may strike them; the ranks reach them by `world.job_channel`. The
    simulation ends with the ranks, whatever these still do.

    `progress` is called about once a second of real time with the virtual time; an exception from it ends the
    simulation. By default a line is printed every ten seconds if standard error is a terminal.

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
    kernel = Kernel(seed, chaos, threads)
    asides = [each if isinstance(each, Aside) else Aside(each) for each in aside]
    hub = Hub(kernel, ranks + len(asides), network or Network(), faults)
    roles = tuple(each.role for each in asides)
    hosts = tuple(f"host{hub.network.host(rank)}" for rank in range(ranks))
    mains = [
        kernel.spawn(rank, "main", _start, fn, rank, hub, hosts, roles, timeout, check, main=True)
        for rank in range(ranks)
    ]
    beside = [
        kernel.spawn(member, "aside", _start_aside, each, member, hub, timeout)
        for member, each in enumerate(asides, start=ranks)
    ]
    failed = _note_failures(kernel, hub, [*mains, *beside], return_exceptions)
    shown = _ProgressPrinter(ranks).show if progress is None and sys.stderr.isatty() else progress
    kernel.run(None if shown is None else lambda: shown(kernel.now))
    tasks = [*failed, *kernel.tasks]
    _raise_first(kernel, tasks, mains, return_exceptions, f"seed={seed}{', chaos=True' if chaos else ''}")
    results = tuple(task.error if task.error is not None else task.result for task in mains)
    return Simulation(results, kernel.now, tuple(hub.messages), tuple(sorted(hub.killed)), seed)


class _ProgressPrinter:
    """Prints the progress of a long simulation."""

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._clock = ranks, clock
        self._began = self._shown = clock()

    def show(self, now: float) -> None:
        """Print the virtual time, at most every `SHOW_EVERY_S` seconds."""
        if self._clock() - self._shown >= SHOW_EVERY_S:
            self._shown = self._clock()
            passed = self._shown - self._began
            print(f"syncline: {self._ranks} simulated ranks: {now:.4g} virtual s in {passed:.0f} s", file=sys.stderr)


def _note_failures(
    kernel: Kernel, hub: Hub, members: Sequence[SimulatedTask], return_exceptions: bool
) -> list[SimulatedTask]:
    """The members that fail, in a list that fills as they do; the first ends the simulation, unless others go on."""
    failed: list[SimulatedTask] = []
    noted = set(members)

    def ended(task: SimulatedTask) -> None:
        if task.error is None or task not in noted or kernel.stopping:
            return
        failed.append(task)
        if return_exceptions:
            lost = task.error.peer if isinstance(task.error, PeerLostError) else None
            hub.leave(task.rank, because_of=lost)  # like a process that ends with a traceback
        else:
            kernel.stop()

    kernel.on_finish = ended
    return failed


def _start(
    fn: Callable[[World], Any],
    rank: int,
    hub: Hub,
    hosts: tuple[str, ...],
    beside: tuple[str, ...],
    timeout: float,
    check: bool,
) -> Any:
    world = _world_of(rank, hub, hosts, beside, timeout, check)
    make_current(world)
    return fn(world)


def _start_aside(aside: Aside, member: int, hub: Hub, timeout: float) -> Any:
    return aside.run(wide_channel(hub, member, timeout))


def _world_of(
    rank: int, hub: Hub, hosts: tuple[str, ...], beside: tuple[str, ...], timeout: float, check: bool
) -> World:
    environment = Environment(
        source="sl.simulate",
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        host=hosts[rank],
    )
    transport = SimulatedTransport(hub, tuple(range(len(hosts))), rank, timeout=timeout)
    if beside:
        transport.add_roles(wide_channel(hub, rank, timeout), beside)
    return World(environment, transport, hosts, check)


def _raise_first(
    kernel: Kernel,
    tasks: Sequence[SimulatedTask],
    mains: Sequence[SimulatedTask],
    return_exceptions: bool,
    replay: str,
) -> None:
    if kernel.deadlock is not None:
        raise _noted(kernel.deadlock, f"replay: {replay}")
    for task in tasks:
        main = task in mains
        if task.error is None or task.claimed or (main and return_exceptions):
            continue
        if not main and isinstance(task.error, PeerLostError) and return_exceptions:
            continue  # a comm task of a rank that told its caller
        raise _noted(task.error, f"in {task} of a simulation at t={kernel.now:.6g} s; replay: {replay}")


def _noted(error: BaseException, note: str) -> BaseException:
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(note)
    return error
