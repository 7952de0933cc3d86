"""`hvd.init()`: the context of one rank with its process sets and handles, and the questions about ranks and builds."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from syncline.compat.horovod.engine import ProcessSetEngine
from syncline.compat.horovod.errors import NotInitializedError, UninitializedOperationError
from syncline.compat.horovod.messages import OperationPlan, OperationRequest
from syncline.compat.horovod.pending import CollectiveCounter, PendingOperation
from syncline.compat.horovod.settings import LEVELS, HorovodSettings, read, without_effect
from syncline.compat.horovod.timeline import Timeline, TimelineObserver
from syncline.errors import (
    IncompatibleError,
    PeerLostError,
    ProtocolError,
    SynclineError,
    UnsupportedError,
    WorldError,
)
from syncline.world import DataPlace, Group, World, broadcast, current_world
from syncline.world import init as init_world

if TYPE_CHECKING:
    from syncline.compat.horovod.optimizer_sync import OptimizerSync


class ProcessSet:
    """A set of ranks. `hvd.init(process_sets=[…])` or `hvd.add_process_set` makes it usable.

    >>> ProcessSet([2, 0]).ranks
    [0, 2]
    """

    mpi_comm = None
    """Horovod's attribute. Here a process set is always made from ranks."""

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        try:
            found = sorted(ranks_or_comm)
        except TypeError:
            found = ["?"]  # type: ignore[list-item]
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in found):
            raise IncompatibleError(f"a process set is made of a list of ranks, not of {ranks_or_comm!r}")
        if len(set(found)) != len(found):
            raise IncompatibleError(f"a process set has each rank once: {found}")
        self._ranks = found
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int]:
        """The ranks of the set."""
        return self._ranks

    def invalidate(self) -> None:
        """Mark the set as removed."""
        self.process_set_id = None

    def included(self) -> bool:
        """Whether this rank is a member."""
        return context().world.rank in self.ranks

    def rank(self) -> int:
        """This rank's number in the set; None if the set was not added. Raises on a rank that is not a member."""
        if self.process_set_id is None:
            return None  # type: ignore[return-value]  # as in Horovod; a set in use has a rank
        return context().engine(self).team.rank

    def size(self) -> int:
        """The number of ranks in the set; None if the set was not added."""
        if self.process_set_id is None:
            return None  # type: ignore[return-value]  # as in Horovod; a set in use has a size
        context().check_set(self)
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalSet(ProcessSet):
    """All ranks of the current world."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(context().world.size)) if is_initialized() else []

    def invalidate(self) -> None:
        raise AssertionError("the global process set cannot be removed")


global_process_set = _GlobalSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set usable after `init()`. Every rank calls it with the same ranks, also a rank that is not a member.

    >>> import torch, syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def pair(world):
    ...     hvd.init()
    ...     last = hvd.add_process_set([1, 2])
    ...     return hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=last) if last.included() else None
    >>> sl.simulate(pair, ranks=3).results
    (None, tensor([2.]), tensor([2.]))
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    here = context()
    if not here.settings.dynamic_process_sets:
        raise IncompatibleError(
            "HOROVOD_DYNAMIC_PROCESS_SETS=0 forbids sets after init(): name them in hvd.init(process_sets=[…])"
        )
    ranks = here.check_new_set(wanted)
    here.request(here.engine(global_process_set), "add", ranks, lambda plan: here.create_set(wanted))
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Returns False for the global one, and for one that was not added.

    Every rank calls it, after the set's operations have ended.
    """
    if process_set.process_set_id in (0, None):
        return False
    here = context()
    number, ranks = here.check_set(process_set), tuple(process_set.ranks)
    here.request(here.engine(global_process_set), "remove", ranks, lambda plan: here.remove_set(number))
    return True


logger = logging.getLogger("syncline")

DYNAMIC = "dynamic"
PLACE = DataPlace("horovod", 0)
"""Where new workers of an elastic job wait: at the next reset of the others."""
UNUSED = "is not usable: name it in hvd.init(process_sets=[…]), or call hvd.add_process_set on every rank"


class HorovodContext:
    """Horovod on one rank, from `init()` to `shutdown()`."""

    def __init__(self, world: World, settings: HorovodSettings, owns: bool) -> None:
        self.world = world
        self.owns = owns
        self.optimizers: list[OptimizerSync] = []
        self.timeline: TimelineObserver | None = None
        self.handles: dict[int, tuple[ProcessSetEngine, PendingOperation]] = {}
        """The operations of the handles that the user has not waited for."""
        self._handle_numbers = count(1)  # never 0: scripts test `if handle`
        self.layer_numbers: dict[torch.nn.Module, int] = {}
        """Layers of `SyncBatchNorm`, in the order in which they are first used."""
        first = world.group()
        self.settings = _settings_of_rank_0(settings, first)
        self._engines: dict[int, ProcessSetEngine | None] = {}
        self.process_sets: dict[int, ProcessSet] = {0: global_process_set}
        self._next = 0
        self._add_engine(first)
        if settings.timeline is not None:
            self.start_timeline(settings.timeline, settings.mark_cycles)

    def engine_of(self, process_set: ProcessSet) -> ProcessSetEngine | None:
        """The engine of a process set on this rank; None if this rank is not a member."""
        number = process_set.process_set_id
        if number is not None and self.process_sets.get(number) is process_set:  # the usual case
            return self._engines[number]
        return self._engines[self.check_set(process_set)]

    def check_set(self, process_set: ProcessSet) -> int:
        """The number of a registered set. The number of a set of an earlier init() may now belong to another set."""
        number = process_set.process_set_id
        known = self.process_sets.get(number) if number is not None else None
        if number is None or known is None or (known is not process_set and known.ranks != process_set.ranks):
            raise IncompatibleError(f"{process_set!r} {UNUSED}")
        return number

    def engine(self, process_set: ProcessSet) -> ProcessSetEngine:
        """The engine of a process set on this rank. Raises if this rank is not a member."""
        engine = self.engine_of(process_set)
        if engine is None:
            raise IncompatibleError(f"rank {self.world.rank} is not a member of the process set {process_set.ranks}")
        return engine

    def add_handle(self, engine: ProcessSetEngine, pending: PendingOperation) -> int:
        """Store an operation and return its handle."""
        number = next(self._handle_numbers)
        self.handles[number] = (engine, pending)
        return number

    def data_team(self, process_set: ProcessSet) -> tuple[Group, CollectiveCounter]:
        """A new team of the members of a set, and the counter of its collectives. Every member calls it."""
        engine = self.engine(process_set)

        def make(plan: OperationPlan) -> tuple[Group, CollectiveCounter]:
            team = engine.team.duplicate()

            def give_up() -> None:
                with suppress(SynclineError):  # closed meanwhile
                    team.transport.abort()

            engine.channels.append(CollectiveCounter(self.world.runtime, give_up))
            return team, engine.channels[-1]

        return self.request(engine, "team", (), make)  # type: ignore[no-any-return]

    def leave(self, reason: str) -> None:
        """Tell the other ranks at once that an operation failed here; closing may take longer."""
        for engine in list(self._engines.values()):
            if engine is not None:
                engine.leave(reason)

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Start a timeline; an open timeline is closed first."""
        self.stop_timeline()
        runtime = self.world.runtime
        self.timeline = Timeline(
            path, rank=self.world.rank, now=runtime.now, lock=runtime.lock(), mark_cycles=mark_cycles
        )

    def stop_timeline(self) -> None:
        """Close the timeline if there is one."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def close(self) -> None:
        """Leave all sets, the newest first."""
        self.leave("")  # first: ranks that wait for this rank's gradients stop waiting
        for optimizer in list(self.optimizers):
            optimizer.close()
        while self._engines:
            _, engine = self._engines.popitem()
            if engine is not None:
                engine.close()
                engine.team.close()
        self.stop_timeline()

    def check_new_set(self, process_set: ProcessSet) -> tuple[int, ...]:
        """The ranks of a set that can be created. Raises for another set."""
        ranks = tuple(process_set.ranks)
        unknown = [rank for rank in ranks if not 0 <= rank < self.world.size]
        if not ranks or unknown:
            wrong = f"ranks {unknown} are not among 0 to {self.world.size - 1}" if unknown else "it is empty"
            raise IncompatibleError(f"{process_set!r} is not possible: {wrong}")
        for number, found in self.process_sets.items():
            if tuple(found.ranks) == ranks:
                raise IncompatibleError(f"there is a process set of ranks {list(ranks)} already, with id {number}")
        return ranks

    def create_set(self, process_set: ProcessSet) -> None:
        """Create a set on this rank, when all ranks do."""
        number = self._add_engine(self.world.group(tuple(process_set.ranks)))
        process_set.process_set_id = number
        self.process_sets[number] = process_set

    def _add_engine(self, team: Group) -> int:
        number, self._next = self._next, self._next + 1
        engine = None
        if team.member:
            control = team.transport.split(range(team.size)) if team.size > 1 else None
            engine = ProcessSetEngine(team, control, self.settings, lambda: self.timeline)
        self._engines[number] = engine
        return number

    def remove_set(self, number: int) -> None:
        """Remove a set on this rank, when all ranks do."""
        engine = self._engines.pop(number)
        self.process_sets.pop(number).invalidate()
        if engine is not None:
            engine.close()
            engine.team.close()

    def request(
        self, engine: ProcessSetEngine, kind: str, numbers: tuple[int, ...], action: Callable[[OperationPlan], Any]
    ) -> Any:
        """Run an action on every rank of a set, when all have requested it; return this rank's result."""
        request = OperationRequest(kind, engine.unnamed(kind), splits=numbers)
        pending = PendingOperation(self.world.runtime, request, [], [])
        pending.action = action
        engine.submit(pending)
        return engine.wait(pending)


class _ContextSlot:
    """Attached to the world: the context between `init` and `shutdown`."""

    def __init__(self) -> None:
        self.context: HorovodContext | None = None

    def close(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            context.close()


def _context_slot() -> _ContextSlot | None:
    try:
        return current_world().keep("horovod", _ContextSlot)
    except WorldError:
        return None


def context(operation: bool = False) -> HorovodContext:
    """The context of the current world. Without one, it raises Horovod's error, which differs for an `operation`."""
    slot = _context_slot()
    if slot is None or slot.context is None:
        raise UninitializedOperationError if operation else NotInitializedError
    return slot.context


def is_initialized() -> bool:
    """Whether `init()` was called and `shutdown()` was not called since."""
    slot = _context_slot()
    return slot is not None and slot.context is not None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the world, or use the world that `sl.init()` has joined. A second call does nothing.

    `process_sets` are sets to create now; "dynamic" means none, because sets can always be added later. `comm` must
    name all ranks: use process sets for some of them.

    >>> import syncline.compat.horovod.torch as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.size()
    (0, 1)
    >>> hvd.shutdown()
    """
    if is_initialized():
        return
    settings = read(os.environ)
    static = _static(process_sets)
    try:
        world, owns = current_world(), False
    except WorldError:
        world, owns = init_world(), True
    if world.elastic is not None and world.runs:
        raise UnsupportedError(
            "an elastic job trains by sl.distribute or by Horovod's API, not by both: they treat lost workers "
            "differently"
        )
    _check_comm(comm, world)
    if os.environ.get("HOROVOD_LOG_LEVEL"):
        logger.setLevel(LEVELS[settings.log_level])
    idle = without_effect(os.environ)
    if idle and world.rank == 0:
        logger.warning("these variables of Horovod have no effect here: %s", ", ".join(idle))
    made = _open_context(world, settings, owns)
    for process_set in static:
        made.check_new_set(process_set)
        made.create_set(process_set)


def _open_context(world: World, settings: HorovodSettings, owns: bool, form: bool = False) -> HorovodContext:
    """Make the context of this world. In an elastic job a newcomer waits until the others admit it.

    With `form` the members of an elastic job form the next team first.
    """
    slot = _context_slot()
    assert slot is not None, "there is a world"
    elastic = world.elastic
    if elastic is not None:
        elastic.form_manually(PLACE)
        form = form or elastic.joining
    while True:
        if elastic is not None and form:
            elastic.form_next(world, settings.elastic_timeout)
        try:
            slot.context = HorovodContext(world, settings, owns)
            return slot.context
        except (PeerLostError, ProtocolError) as error:  # a worker was lost meanwhile
            if elastic is None:
                raise
            logger.info("rank %d: %s; the team is formed again", world.rank, error)
            form = True


def reset() -> None:
    """Leave the context and open another one on all ranks. In an elastic job the survivors and newcomers form it."""
    slot = _context_slot()
    left = None if slot is None else slot.context
    if slot is None or left is None or left.world.elastic is None:
        shutdown()
        init()
        return
    slot.close()
    _open_context(left.world, left.settings, left.owns, form=True)


def shutdown() -> None:
    """Leave the world; pending operations fail. A second call does nothing."""
    slot = _context_slot()
    if slot is None or slot.context is None:
        return
    left = slot.context
    slot.close()
    if left.owns:
        left.world.close()


def _static(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == DYNAMIC):
        return []
    if isinstance(process_sets, str):
        raise IncompatibleError(f'process_sets={process_sets!r}: a list of ProcessSet, or "{DYNAMIC}"')
    sets = list(process_sets)
    for found in sets:
        if not isinstance(found, ProcessSet):
            raise IncompatibleError(f"process_sets holds {found!r}, which is not a ProcessSet")
    return sets


def _check_comm(comm: Sequence[int] | None, world: World) -> None:
    if comm is None or comm == []:
        return
    ranks = list(comm) if isinstance(comm, (list, tuple, range)) else None
    if ranks != list(range(world.size)):
        given = f"ranks {ranks}" if ranks is not None else f"a {type(comm).__name__}"
        raise IncompatibleError(
            f"comm={given}: Horovod always has all {world.size} ranks; for some of them use process sets"
        )


def _settings_of_rank_0(settings: HorovodSettings, team: Group) -> HorovodSettings:
    """Take the settings that decide the order of operations from rank 0."""
    if team.size == 1:
        return settings
    mine = [settings.fusion_bytes, settings.cache_capacity, int(settings.hierarchical_allreduce)]
    fusion, capacity, hierarchical = broadcast(torch.tensor(mine), root=0, group=team).tolist()
    return replace(settings, fusion_bytes=fusion, cache_capacity=capacity, hierarchical_allreduce=bool(hierarchical))


class ReduceOp(IntEnum):
    """The reduction operations, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp


def rank() -> int:
    """The rank of this process."""
    return context().world.rank


def size() -> int:
    """The number of processes."""
    return context().world.size


def local_rank() -> int:
    """The rank of this process on its host."""
    return context().world.local_rank


def local_size() -> int:
    """The number of processes of this host."""
    return context().world.local_size


def cross_rank() -> int:
    """The number of this host among the hosts that have a process with this local rank."""
    hosts, mine = _hosts_of(local_rank()), context().world.hosts[rank()]
    return hosts.index(mine) if mine in hosts else 0  # in an elastic job a host may have lost a worker


def cross_size() -> int:
    """The number of hosts that have a process with this local rank."""
    return len(_hosts_of(local_rank()))


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    hosts = context().world.hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _hosts_of(number: int) -> list[str]:
    hosts = context().world.hosts
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > number]


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of all usable process sets, by their ids."""
    return {number: list(each.ranks) for number, each in sorted(context().process_sets.items())}


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write the times of all operations to a file for chrome://tracing, until `stop_timeline`."""
    context().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Close the timeline."""
    context().stop_timeline()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads. It is always requested so; raises if MPI is not in use."""
    if not mpi_enabled():
        raise IncompatibleError(
            "Horovod MPI is not enabled: this run does not communicate over MPI; start it with `syncline run --mpi`"
        )
    return True


def mpi_enabled() -> bool:
    """Whether this run communicates over MPI; False before `init()`."""
    return is_initialized() and context().world.transport.name.lower().startswith("mpi")


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Whether this run communicates over gloo; False before `init()`."""
    return is_initialized() and context().world.transport.name == "torch.distributed"


def gloo_built() -> bool:
    """Always true: PyTorch includes gloo."""
    return True


def nccl_built() -> int:
    """The version of NCCL as one number; 0 without NCCL."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Always false: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Always false: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built with ROCm."""
    return torch.version.hip is not None
