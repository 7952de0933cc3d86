"""`simulate`: the same function on many virtual ranks, under a virtual clock, in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.environment import Environment
from syncline.errors import PeerLostError, WorldError
from syncline.runtime import Kernel
from syncline.runtime.kernel import SimulatedTask
from syncline.transports import Hub, Message, Network, SimulatedTransport
from syncline.transports.base import DEFAULT_TIMEOUT
from syncline.transports.faults import Fault
from syncline.world.world import World, make_current

__all__ = ["Simulation", "simulate"]


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


def simulate(
    fn: Callable[[World], Any],
    ranks: int,
    network: Network | None = None,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    chaos: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    check: bool = False,
    return_exceptions: bool = False,
) -> Simulation:
    """Run `fn(world)` once on each of `ranks` virtual ranks. The same seed gives the same run, bit for bit.

    Events happen in the order of virtual time; the seed draws jitter, faults and the order of what happens at
    the same instant. With `chaos` the seed draws any order that is possible at all: for hunting. What a rank
    raises ends the simulation and is raised here, with a note on how to replay it; with `return_exceptions` it
    is a result, and the others go on.

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
    if ranks < 1:
        raise WorldError(f"a simulation has at least one rank (ranks: {ranks})")
    network = network or Network()
    kernel = Kernel(seed, chaos)
    hub = Hub(kernel, ranks, network, faults)
    everyone = tuple(range(ranks))

    def start(rank: int) -> Any:
        world = _world_of(rank, hub, everyone, timeout, check)
        make_current(world)
        return fn(world)

    mains = [kernel.spawn(rank, "main", functools.partial(start, rank), main=True) for rank in everyone]

    failed: list[SimulatedTask] = []  # the first whose failure ended the simulation

    def ended(task: SimulatedTask) -> None:
        if task.error is None or task not in mains or kernel.stopping:
            return
        failed.append(task)
        if return_exceptions:
            hub.leave(task.rank)  # as a process that ends with a traceback
        else:
            kernel.stop()

    kernel.on_finish = ended
    kernel.run()
    tasks = [*failed, *kernel.tasks]
    _raise_first(kernel, tasks, mains, return_exceptions, f"seed={seed}{', chaos=True' if chaos else ''}")
    results = tuple(task.error if task.error is not None else task.result for task in mains)
    return Simulation(results, kernel.now, tuple(hub.messages), tuple(sorted(hub.killed)), seed)


def _world_of(rank: int, hub: Hub, everyone: tuple[int, ...], timeout: float, check: bool) -> World:
    hosts = [hub.network.host(other) for other in everyone]
    mine = [other for other in everyone if hosts[other] == hosts[rank]]
    environment = Environment(
        source="sl.simulate",
        rank=rank,
        size=len(everyone),
        local_rank=mine.index(rank),
        local_size=len(mine),
        host=f"host{hosts[rank]}",
    )
    transport = SimulatedTransport(hub, everyone, rank, timeout=timeout)
    return World(environment, transport, [f"host{host}" for host in hosts], check)


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
