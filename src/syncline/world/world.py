"""The world: the ranks of a run and their transport; `init()` and the current world."""

from __future__ import annotations

import atexit
import contextvars
import importlib
import logging
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, cast

import torch

from syncline.collectives import NATIVE, BufferPool, Channel
from syncline.collectives.channel import move_pieces
from syncline.environment import Environment, detect, hide, restore
from syncline.environment.base import check_versions, package_version
from syncline.errors import SpecError, SynclineError, UnsupportedError, WorldError, warn_deprecated
from syncline.events import Recorder
from syncline.runtime import Runtime
from syncline.specs import nearest
from syncline.transports import SingleTransport, Transport
from syncline.transports.base import DEFAULT_TIMEOUT_S, check_ranks
from syncline.transports.key_value_store import KeyValueStore
from syncline.world.elastic import (
    ELASTIC_ENGINES,
    ElasticLimits,
    ElasticMember,
    TeamListener,
    check_elastic_engine,
    compare_with_job,
    describe_job,
    read_elastic,
)
from syncline.world.group import Group
from syncline.world.mesh import Mesh
from syncline.world.team_channels import Introduction

__all__ = ["World", "current_world", "init"]

logger = logging.getLogger("syncline")

INTRODUCTION_BYTES = 256
MAX_HOST_CHARS = 160
"""Longest host name that is sent to the other ranks; the version of Syncline follows it."""
WANTS_CHECK = 1
"""The flag of a rank that wants every collective compared."""
LEAVE_TIMEOUT_S = 5.0
"""Timeout in seconds of operations in progress when the world is left after an error."""
ENGINES = ("torch_dist", "mpi", "zeromq")
TRANSPORT_VARIABLE = "SYNCLINE_TRANSPORT"
"""Names the transport if the script does not."""
WORKERS_VARIABLE = "SYNCLINE_WORKERS"
"""The number of workers at the start of a job with servers. Set by the launcher."""
OTHER_NAMES = {
    **dict.fromkeys(("gloo", "nccl", "torch", "torchdistributed", "distributed", "ddp"), "torch_dist"),
    **dict.fromkeys(("mpi4py", "openmpi", "mpich"), "mpi"),
    **dict.fromkeys(("zmq", "pyzmq", "tcp"), "zeromq"),
}
"""Other names of the engines, each with the name of our transport."""

_current: contextvars.ContextVar[World | None] = contextvars.ContextVar("syncline_world", default=None)
_process_worlds: list[World] = []
"""At most one: the world of this process. Threads of the user see it too."""


class Closeable(Protocol):
    """An object that a world closes at its end. Other ranks need not do the same."""

    def close(self) -> None: ...


class OpenRun(TeamListener, Protocol):
    """A run of `sl.distribute` that is not closed: the members that the world uses."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def strategy(self) -> object: ...

    def close(self) -> None: ...

    def close_at_exit(self) -> None:
        """End the run at the exit of the process if other ranks still need this one."""
        ...


K = TypeVar("K", bound=Closeable)


class World:
    """The ranks of a run, seen from one of them. `sl.init()` and `sl.simulate()` make it; it is a context manager.

    >>> import syncline as sl
    >>> with sl.init() as world:
    ...     world.rank, world.size
    (0, 1)
    """

    def __init__(
        self, environment: Environment, transport: Transport, hosts: Sequence[str], check: bool, lanes: int = 1
    ) -> None:
        self.environment = environment
        self.rank = environment.rank
        self.size = environment.size
        self.local_rank = environment.local_rank
        self.local_size = environment.local_size
        self.host = environment.host
        self.launcher = environment.source
        self.check = check
        self.closed = False
        self.claimed = False
        self.runs: list[OpenRun] = []
        """Runs that `sl.distribute` has made on this rank and that are not closed, in order."""
        self.hosts = tuple(hosts)
        self.events = Recorder(transport.runtime.now, lock=transport.runtime.lock())
        self.engine = transport.name
        """The name of the transport in `init`."""
        self.transport = transport
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self._host_numbers = tuple(numbers[host] for host in hosts)
        self.lanes = lanes
        """Parts of a large reduction that overlap: 2 where every rank has a second processor."""
        self.everyone = Group(self, range(self.size), transport, self._host_numbers, lanes)
        self._groups = [self.everyone]
        self.left: list[Callable[[], None]] = []
        """Functions that end an epoch whose loop was left early, while other ranks wait for this one."""
        self._other_transports: list[Transport] = []
        self._resources: dict[Hashable, Closeable] = {}
        self._resources_lock = transport.runtime.lock()
        self._hidden: dict[str, str] = {}
        self._mesh: Mesh | None = None
        self.elastic: ElasticMember | None = None
        """The changing team of an elastic world; None if the ranks of the world are fixed."""

    @property
    def device(self) -> torch.device:
        """The GPU with this process's local rank; the CPU if there is no GPU."""
        if torch.cuda.is_available() and not self.transport.timing.virtual:
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def mesh(self) -> Mesh:
        """How the latest run arranges the ranks: pipeline stages, data, shared data and tensors.

        >>> import syncline as sl
        >>> with sl.init() as world:
        ...     print(world.mesh)
        mesh of 1 rank: data 1
        """
        return self._mesh or Mesh(data=self.size)

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def spare(self) -> bool:
        """Whether every rank has a second processor, for messages."""
        return self.lanes > 1

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables of this process, with the hidden ones of the launcher."""
        return {**self._hidden, **os.environ}

    @property
    def runtime(self) -> Runtime:
        """Tasks, events, sleep and the clock of this rank: threads, or the simulator's."""
        return self.transport.runtime

    @property
    def job_channel(self) -> Transport:
        """The channel of all processes of the job: the ranks first, then servers and evaluators where there are any."""
        return self.transport.job_channel

    def control_store(self) -> KeyValueStore:
        """The key-value store of all processes of the job: the launcher's, rank 0's, or one in memory."""
        return self.transport.control_store()

    @property
    def wide(self) -> Transport | None:
        """Deprecated: use `job_channel`."""
        warn_deprecated("world.wide", "world.job_channel")
        return self.job_channel if self.transport.extra_roles else None

    @property
    def lost(self) -> dict[int, str]:
        """The lost ranks, each with the reason, from the launcher and the transports."""
        found = self.transport.lost()
        if self.elastic is not None:  # by rank in the present team
            found = {rank: found[each] for rank, each in enumerate(self.transport.members) if each in found}
        for transport in self._other_transports:
            found = {**{rank: why for rank, why in transport.lost().items() if rank < self.size}, **found}
        return found

    def gone_reason(self, rank: int) -> str:
        """Why a rank sends nothing more: it is lost or has left its world. Empty while it is present."""
        transports = (self.transport, *self._other_transports)
        return next((reason for each in transports if (reason := each.gone_reason(rank))), "")

    def count_losses_of(self, transport: Transport) -> None:
        """Count ranks that are lost on another transport as lost here too. Its first members are this world's ranks."""
        self._other_transports.append(transport)

    def group(self, ranks: Sequence[int] | None = None) -> Group:
        """Make a group of `ranks` (all: None) with its own channel. Every rank calls it in the same order."""
        self.check_open()
        elastic = self.elastic
        if elastic is not None and not elastic.manual and ranks is not None and len(ranks) != self.size:
            raise UnsupportedError(
                f"world.group({list(ranks)}): a group of some workers cannot continue when the team of an elastic job "
                "changes; leave --elastic out"
            )
        if self.elastic is not None and self.elastic.joining:  # alone until the team admits this process
            return Group(self, (0,), self.transport.split((0,)), (0,), 1)
        return self.group_of_survivors(range(self.size) if ranks is None else ranks)

    def group_of_survivors(self, ranks: Sequence[int]) -> Group:
        """Make a group for one attempt of an operation. After a loss its user makes another one, also in elastic jobs.

        Each of `ranks` calls it.
        """
        members = check_ranks(ranks, self.size)
        hosts = tuple(self._host_numbers[rank] for rank in members)
        group = Group(self, members, self.transport.split(members), hosts, self.lanes)
        self._groups.append(group)
        return group

    def add_group(self, group: Group) -> None:
        """Close a group with this world."""
        self._groups.append(group)

    def team(self, ranks: Sequence[int] | None = None) -> Group:
        """Deprecated: use `group`."""
        warn_deprecated("world.team()", "world.group()")
        return self.group(ranks)

    def twin(self, team: Group) -> Group:
        """Deprecated: use `Group.duplicate`."""
        warn_deprecated("world.twin(team)", "group.duplicate()")
        return team.duplicate()

    def keep(self, key: Hashable, make: Callable[[], K]) -> K:
        """An object of this world, one for each key: made by the first call, closed with the world.

        >>> import io, syncline as sl
        >>> with sl.init() as world:
        ...     resource = world.keep("notes", io.StringIO)
        ...     resource is world.keep("notes", io.StringIO)
        True
        >>> resource.closed
        True
        """
        self.check_open()
        with self._resources_lock:
            resource = self._resources.get(key)
        if resource is None:  # outside the lock, because `make` may wait for the other ranks
            resource = make()
            with self._resources_lock:
                self._resources[key] = resource
        return cast(K, resource)

    def check_open(self) -> None:
        """Raise a `WorldError` if this world is closed."""
        if self.closed:
            raise WorldError("this world is closed; call sl.init() again")

    def finish_left(self) -> None:
        """End the epochs that were left early. Called before every collective."""
        while self.left:
            self.left.pop()()

    def barrier(self, group: Group | None = None) -> None:
        """Wait until every rank has called it."""
        from syncline.world.functional import barrier

        barrier(group or self.everyone)

    def compute(self, seconds: float) -> None:
        """Simulate a computation of so many seconds: virtual seconds in a simulation, a sleep otherwise."""
        self.runtime.sleep(seconds * self.transport.timing.slowdown())

    def rebind(self, transport: Transport, introduction: Introduction) -> None:
        """Continue with another team on this channel. Groups of the runs are rebound by their communicators."""
        hosts, lanes = introduction.hosts, introduction.lanes
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self.rank, self.size = transport.rank, transport.size
        self.hosts = hosts
        self._host_numbers = tuple(numbers[host] for host in hosts)
        self.local_size = hosts.count(self.host)
        self.lanes = lanes
        self.transport = transport
        self.everyone.rebind(transport, range(self.size), self._host_numbers, lanes)

    def rebind_group(self, group: Group, transport: Transport) -> None:
        """Continue a group of all ranks with the present team, on this channel."""
        group.rebind(transport, range(self.size), self._host_numbers, self.lanes)

    def init_simulated(self, options: InitOptions) -> World:
        """The result of `init` on a simulated rank: this world, set up with these options."""
        if self.claimed and not self.closed:
            return self.init_again(options)
        if options.process_group:
            raise UnsupportedError(
                f"process_group=True: a process has one default process group, and these {self.size} ranks are "
                "simulated in one process; start the script with syncline run"
            )
        self.claimed, self.closed = True, False
        self.check = self.check or options.check
        if options.timeout != DEFAULT_TIMEOUT_S:
            self.transport.timeout = options.timeout
        return self

    def init_again(self, options: InitOptions) -> World:
        """The result of a second `init`: this world. Raises if the options differ."""
        allowed: dict[str, tuple[object, ...]] = {  # the present value first
            "transport": (self.engine, None, self.transport),
            "timeout": (self.transport.timeout, DEFAULT_TIMEOUT_S),
            "check": (self.check, False),
        }
        for name, values in allowed.items():
            wanted = getattr(options, name)
            if wanted not in values:
                raise WorldError(
                    f"this process has a world already, with {name}={values[0]!r}, and now {name}={wanted!r} "
                    f"is asked for: call close() of {self!r} first"
                )
        return self.set_up(options)

    def set_up(self, options: InitOptions) -> World:
        """Make the default process group and hide the launcher's variables, if the options say so."""
        if self.transport.timing.virtual:
            return self
        if options.process_group:
            torch_dist = importlib.import_module("syncline.transports.torch_dist.process_groups")
            self.keep("process group", lambda: torch_dist.DefaultGroup(self.environment, self.transport.timeout))
        if options.hide:
            self._hidden |= hide(os.environ)
        return self

    def close(self) -> None:
        """Close the open runs, wait for the asynchronous calls in progress, and leave the world.

        Every rank calls it. A second call does nothing; without a call the world is closed at exit.
        """
        if self.closed:
            return
        for run in list(self.runs):
            run.close()
        if self.elastic is not None and not self.elastic.joining and not self.elastic.manual:
            self.barrier()  # no worker leaves while another may need the result of its last operation
        for group in self._groups:
            group.drain()
        self._leave()

    def _leave_at_exit(self) -> None:
        """At exit: end the runs that other ranks still need, unless an error ends the process."""
        if getattr(sys, "last_value", None) is None:
            for run in list(self.runs):
                try:
                    run.close_at_exit()
                except SynclineError as error:
                    logger.warning("rank %d leaves, and its run could not be closed: %s", self.rank, error)
        self._leave()

    def _leave(self) -> None:
        """Leave at once, without waiting for operations in progress."""
        if self.closed:
            return
        self.closed = True
        self.events.close()
        restore(os.environ, self._hidden)
        self.everyone.stop_task()
        self.release_groups()
        if self.transport.extra_roles:
            self.job_channel.close()
        self.transport.close()
        self.elastic_leave()
        if self in _process_worlds:
            _process_worlds.remove(self)
            atexit.unregister(self._leave_at_exit)

    def leave(self, reason: str) -> None:
        """Leave an elastic job at once. The others continue without this worker."""
        if self.elastic is not None:
            self.elastic.formation.leave(reason)
        self._leave()

    def elastic_leave(self) -> None:
        """Tell the other members of an elastic job that this one has ended by itself."""
        elastic, self.elastic = self.elastic, None
        if elastic is not None:
            elastic.close("it has closed its world")

    def release_groups(self) -> None:
        """Close the resources and every group but `everyone`, whatever is still in progress."""
        self._close_resources()
        while len(self._groups) > 1:
            group = self._groups.pop()
            if group.member:
                group.release()

    def _close_resources(self) -> None:
        """Close in reverse order, because one may use an earlier one. An error does not stop the others."""
        while self._resources:
            key, resource = self._resources.popitem()
            try:
                resource.close()
            except SynclineError as error:
                logger.warning("rank %d leaves, and %s did not close: %s", self.rank, key, error)

    def __copy__(self) -> World:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a world holds connections to the other ranks and cannot be pickled: pass on what is needed of it, such as "
            "world.rank, or leave it out of what is saved or sent to other processes"
        )

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.close()
        finally:
            if not self.closed:  # report the error soon; do not wait for messages that are not delivered
                self.transport.timeout = min(self.transport.timeout, LEAVE_TIMEOUT_S)
                self._leave()

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}, "
            f"host {self.host}, {self.transport.name}, started by {self.launcher})"
        )


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The arguments of `init`."""

    transport: str | Transport | None
    timeout: float
    check: bool
    process_group: bool
    hide: bool


def init(
    transport: str | Transport | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    check: bool = False,
    process_group: bool = False,
    hide: bool = False,
) -> World:
    """Join the world that the launcher made: `syncline run`, torchrun, mpiexec, srun, or a world of one under `python`.

    `transport` is "single", "torch_dist", "mpi", "zeromq", a `Transport` object, or None. With None the variable
    SYNCLINE_TRANSPORT names it (`syncline run --mpi` sets it); otherwise it is "torch_dist", or "single" for one rank.
    A wait for a peer raises a `PeerLostError` after `timeout` seconds. If any rank sets `check`, the ranks compare
    their calls before every collective, and a difference raises an error on every rank. Otherwise they compare only the
    first calls.

    With `process_group` torch.distributed gets its default group among the same ranks, for samplers, metrics and
    SyncBatchNorm; it is destroyed with the world. With `hide` the launcher's variables (RANK, WORLD_SIZE, …) are
    hidden until the world is closed: a framework that would wrap the model for torch.distributed then sees one
    process. A second call returns the same world, and raises if its options differ.

    >>> import torch, syncline as sl
    >>> with sl.init() as world:
    ...     sl.allreduce(torch.ones(2), op="sum")
    tensor([1., 1.])
    """
    options = InitOptions(transport=transport, timeout=timeout, check=check, process_group=process_group, hide=hide)
    simulated = _current.get()
    if simulated is not None:
        return simulated.init_simulated(options)
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise WorldError(f"timeout={timeout!r} is not a number of seconds above 0")
    if _process_worlds:
        return _process_worlds[0].init_again(options)
    world = _join(options)
    _process_worlds.append(world)
    atexit.register(world._leave_at_exit)
    try:
        world.set_up(options)
    except BaseException:
        world._leave()
        raise
    logger.info("%r", world)
    return world


def _join(options: InitOptions) -> World:
    environment = detect()
    if isinstance(options.transport, Transport):
        engine, name = options.transport, options.transport.name
        place = environment.rendezvous
        environment = Environment(
            source="its own transport", rank=engine.rank, size=engine.size, local_size=1, rendezvous=place
        )
    elif (limits := read_elastic(os.environ)) is not None:
        return _join_elastic(options, environment, limits)
    else:
        default = "single" if environment.size == 1 else "torch_dist"
        name = options.transport or os.environ.get(TRANSPORT_VARIABLE) or default
        engine = _connect(name, environment, options.timeout)
        if engine.size == 1 and environment.size > 1:
            environment = Environment(source=environment.source)
        elif engine.size != environment.size:
            environment = _environment_of(environment, engine)
    hosts, lanes, check = [environment.host], 1, options.check
    if engine.size > 1:
        hosts, lanes, check = exchange_introductions(engine, environment, check)
    if not environment.local_known:
        mine = [rank for rank, host in enumerate(hosts) if host == environment.host]
        local_rank, local_size = mine.index(environment.rank), len(mine)
        environment = replace(environment, local_rank=local_rank, local_size=local_size, local_known=True)
    world = World(environment, engine, hosts, check, lanes)
    world.engine = name
    return world


def _join_elastic(options: InitOptions, environment: Environment, limits: ElasticLimits) -> World:
    """Join an elastic job: with the first team, or alone until the team admits this newcomer."""
    name = str(options.transport or os.environ.get(TRANSPORT_VARIABLE) or "torch_dist")
    check_elastic_engine(name)
    engine = importlib.import_module(f"syncline.transports.{name}")
    connector = getattr(engine, ELASTIC_ENGINES[name])(environment, options.timeout, limits.member)
    launched = int(os.environ.get(WORKERS_VARIABLE) or environment.size)  # a newcomer is launched alone
    try:
        compare_with_job(connector.store, describe_job(name, os.environ))
    except BaseException:
        connector.close()
        raise
    world = elastic_world(
        ElasticMember(connector, limits, launched, options.timeout), environment, options.check, options.timeout
    )
    world.engine = name
    return world


def _introduce_members(
    transport: Transport, members: Sequence[int], environment: Environment, check: bool
) -> Introduction:
    """Exchange introductions on the channel of a new team."""
    transport.members = tuple(members)
    if transport.size == 1:
        return Introduction((environment.host,), 1)
    place = replace(environment, rank=transport.rank, size=transport.size, local_rank=0, local_size=1)
    try:
        hosts, lanes, _ = exchange_introductions(transport, place, check)
    except SynclineError:
        transport.abort()  # another member may wait for this one, and not for the lost one
        raise
    return Introduction(tuple(hosts), lanes)


def elastic_world(elastic: ElasticMember, environment: Environment, check: bool, timeout: float) -> World:
    """The world of a member of an elastic job."""
    connector = elastic.connector
    elastic.introduce = lambda transport, members: _introduce_members(transport, members, environment, check)
    try:
        elastic.formation.refuse_second_world()
        if elastic.joining:
            alone = replace(environment, rank=0, size=1, local_rank=0, local_size=1)
            transport = connector.add_roles(SingleTransport(connector.runtime, timeout))
            world = World(alone, transport, [environment.host], check)
            team = elastic.formation.latest()
            world.rank, world.size = (1, 2) if team is None else (len(team.members), len(team.members) + 1)
        else:
            transport, found = elastic.start()
            place = replace(environment, rank=transport.rank, size=transport.size, local_rank=0, local_size=1)
            world = World(place, transport, found.hosts, check, found.lanes)
            world.local_size = found.hosts.count(environment.host)
    except BaseException:
        connector.close()
        raise
    world.local_rank = environment.local_rank
    world.elastic = elastic
    return world


def current_world() -> World:
    """The world of this rank. Raises a `WorldError` without one."""
    world = _current.get()
    if world is None and _process_worlds:
        world = _process_worlds[0]
    if world is None:
        raise WorldError("there is no world yet: call sl.init() first")
    world.check_open()
    return world


def make_current(world: World) -> None:
    """Make `world` the current one of this task and of the tasks it spawns."""
    _current.set(world)


def _connect(name: str, environment: Environment, timeout: float) -> Transport:
    if name == "single":
        return SingleTransport(timeout=timeout)
    if name not in ENGINES:
        raise SpecError(f"unknown transport {name!r}; {nearest(str(name), ['single', *ENGINES], OTHER_NAMES)}")
    # Imported here: an engine that is not used need not be installed.
    engine = importlib.import_module(f"syncline.transports.{name}")
    transport: Transport = engine.connect(environment, timeout)
    return transport


def _environment_of(environment: Environment, engine: Transport) -> Environment:
    """The environment according to the engine: it knows more than the variables, or the job has servers too."""
    rank, size = engine.rank, engine.size
    if not engine.extra_roles:
        place = environment.rendezvous
        return Environment(source=engine.name, rank=rank, size=size, local_known=False, rendezvous=place)
    if environment.local_size == environment.size:
        return replace(environment, rank=rank, size=size, local_rank=rank, local_size=size)
    return replace(environment, rank=rank, size=size, local_rank=0, local_size=1, local_known=False)


def exchange_introductions(transport: Transport, environment: Environment, check: bool) -> tuple[list[str], int, bool]:
    """Exchange host, version, processors and the wish for `check` among all ranks.

    Returns all hosts, the number of lanes that suits all, and whether a rank wants `check`. One lane reduces while the
    engine's thread moves the bytes of another: that needs two processors per rank.
    """
    table = torch.zeros(transport.size, INTRODUCTION_BYTES, dtype=torch.uint8)
    pairs = len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 0
    words = f"{environment.host[:MAX_HOST_CHARS]}\0{package_version()}".encode()[: INTRODUCTION_BYTES - 2]
    mine = bytes([WANTS_CHECK * check, min(pairs, 255)]) + words.ljust(INTRODUCTION_BYTES - 2, b"\0")
    table[transport.rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    move_pieces(Channel(transport, (), BufferPool(transport.runtime)), "allgather", dict(enumerate(table)), NATIVE)
    texts = [bytes(row[2:].tolist()).rstrip(b"\0").decode(errors="replace").partition("\0") for row in table]
    check_versions({f"rank {rank}": version for rank, (_, _, version) in enumerate(texts)})
    hosts = [host for host, _, _ in texts]
    # The hosts of a lab are one machine.
    sharing = [transport.size if "SYNCLINE_LAB" in os.environ else hosts.count(host) for host in hosts]
    spare = all(int(row[1]) >= count for row, count in zip(table, sharing, strict=True))
    lanes = 2 if spare and not transport.timing.virtual else 1
    return hosts, lanes, any(int(row[0]) & WANTS_CHECK for row in table)
