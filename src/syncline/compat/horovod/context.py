"""What `hvd.init()` makes: the process sets of one rank, each with its engine, and the handles that the user holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch

from syncline.compat.horovod.engine import Engine
from syncline.compat.horovod.errors import NotInitializedError, UninitializedOperationError
from syncline.compat.horovod.handles import Handles, Pending
from syncline.compat.horovod.lockstep import Lockstep
from syncline.compat.horovod.process_sets import ProcessSet, global_process_set
from syncline.compat.horovod.requests import Plan, Request
from syncline.compat.horovod.settings import LEVELS, Settings, read, without_effect
from syncline.compat.horovod.timeline import Timeline, Watcher
from syncline.errors import IncompatibleError, SynclineError, WorldError
from syncline.world import Team, World, broadcast, current_world
from syncline.world import init as init_world

__all__ = ["Context", "Joinable", "context", "init", "is_initialized", "shutdown"]

logger = logging.getLogger("syncline")

DYNAMIC = "dynamic"
UNUSED = "is not usable: name it in hvd.init(process_sets=[…]), or call hvd.add_process_set on every rank"


class Joinable(Protocol):
    """What goes on reducing after this rank has joined."""

    def join_rounds(self) -> None:
        """Take part in the others' reductions with zeros until every rank has joined."""
        ...

    def close(self) -> None:
        """Take the hooks off."""
        ...


class Context:
    """Horovod on one rank, from `init()` to `shutdown()`."""

    def __init__(self, world: World, settings: Settings, owns: bool) -> None:
        self.world = world
        self.owns = owns
        self.optimizers: list[Joinable] = []
        self.timeline: Watcher | None = None
        self.handles = Handles(world.runtime.lock())
        first = world.team()
        self.settings = _agreed(settings, first)
        self._engines: dict[int, Engine | None] = {}
        self._sets: dict[int, ProcessSet] = {0: global_process_set}
        self._next = 0
        self._adopt(first)
        if settings.timeline is not None:
            self.start_timeline(settings.timeline, settings.mark_cycles)

    def engine_of(self, process_set: ProcessSet) -> Engine | None:
        """What runs a set's operations here; None where this rank is no member."""
        number = process_set.process_set_id
        if number is not None and self._sets.get(number) is process_set:  # as a rule
            return self._engines[number]
        return self._engines[self.check_set(process_set)]

    def check_set(self, process_set: ProcessSet) -> int:
        """The number of a registered set. A set of an earlier init() may carry a number that another set has now."""
        number = process_set.process_set_id
        known = self._sets.get(number) if number is not None else None
        if number is None or known is None or (known is not process_set and known.ranks != process_set.ranks):
            raise IncompatibleError(f"{process_set!r} {UNUSED}")
        return number

    def engine(self, process_set: ProcessSet) -> Engine:
        """What runs a set's operations here; an error where this rank is no member."""
        engine = self.engine_of(process_set)
        if engine is None:
            raise IncompatibleError(f"rank {self.world.rank} is not a member of the process set {process_set.ranks}")
        return engine

    def add(self, process_set: ProcessSet) -> ProcessSet:
        """Make a set usable, on every rank alike and in the same order."""
        if not self.settings.dynamic_process_sets:
            raise IncompatibleError(
                "HOROVOD_DYNAMIC_PROCESS_SETS=0 forbids sets after init(): name them in hvd.init(process_sets=[…])"
            )
        ranks = self._checked(process_set)
        self._together("add", ranks, lambda plan: self._make(ranks, process_set))
        return process_set

    def remove(self, process_set: ProcessSet) -> bool:
        """Give a set up, on every rank alike."""
        number = self.check_set(process_set)
        self._together("remove", process_set.ranks, lambda plan: self._drop(number))
        return True

    def sets(self) -> list[ProcessSet]:
        """All that can be used, the global one first."""
        return [self._sets[number] for number in sorted(self._sets)]

    def data_team(self, process_set: ProcessSet) -> tuple[Team, Lockstep]:
        """A channel for the members of a set, and the counter of its collectives. Every member calls it."""
        engine = self.engine(process_set)

        def make(plan: Plan) -> tuple[Team, Lockstep]:
            team = self.world.twin(engine.team)

            def give_up() -> None:
                with suppress(SynclineError):  # closed meanwhile
                    team.transport.abort()

            engine.channels.append(Lockstep(self.world.runtime, give_up))
            return team, engine.channels[-1]

        return self._ask(engine, "team", (), make)  # type: ignore[no-any-return]

    def leave(self, reason: str) -> None:
        """Tell the other ranks at once that an operation failed here; closing may take longer."""
        for engine in list(self._engines.values()):
            if engine is not None:
                engine.leave(reason)

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Begin to write a timeline; one that is open already is closed."""
        self.stop_timeline()
        runtime = self.world.runtime
        self.timeline = Timeline(
            path, rank=self.world.rank, now=runtime.now, lock=runtime.lock(), mark_cycles=mark_cycles
        )

    def stop_timeline(self) -> None:
        """Close the timeline, if there is one."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def close(self) -> None:
        """Leave all sets; the last made first."""
        self.leave("")  # first: ranks that wait for this rank's gradients stop waiting
        for optimizer in list(self.optimizers):
            optimizer.close()
        while self._engines:
            _, engine = self._engines.popitem()
            if engine is not None:
                engine.close()
                engine.team.close()
        self.stop_timeline()

    # Within.

    def make_static(self, sets: Sequence[ProcessSet]) -> None:
        """The sets that `init` names, in their order."""
        for process_set in sets:
            self._make(self._checked(process_set), process_set)

    def _checked(self, process_set: ProcessSet) -> tuple[int, ...]:
        ranks = tuple(process_set.ranks)
        strangers = [rank for rank in ranks if not 0 <= rank < self.world.size]
        if not ranks or strangers:
            wrong = f"ranks {strangers} are not among 0 to {self.world.size - 1}" if strangers else "it is empty"
            raise IncompatibleError(f"{process_set!r} cannot be: {wrong}")
        for number, found in self._sets.items():
            if tuple(found.ranks) == ranks:
                raise IncompatibleError(f"there is a process set of ranks {list(ranks)} already, with id {number}")
        return ranks

    def _make(self, ranks: tuple[int, ...], process_set: ProcessSet) -> None:
        number = self._adopt(self.world.team(ranks))
        process_set.process_set_id = number
        self._sets[number] = process_set

    def _adopt(self, team: Team) -> int:
        number, self._next = self._next, self._next + 1
        engine = None
        if team.member:
            control = team.transport.split(range(team.size)) if team.size > 1 else None
            engine = Engine(team, control, self.settings, lambda: self.timeline)
        self._engines[number] = engine
        return number

    def _drop(self, number: int) -> None:
        engine = self._engines.pop(number)
        self._sets.pop(number).invalidate()
        if engine is not None:
            engine.close()
            engine.team.close()

    def _together(self, kind: str, ranks: Sequence[int], action: Callable[[Plan], Any]) -> None:
        self._ask(self.engine(global_process_set), kind, tuple(ranks), action)

    def _ask(self, engine: Engine, kind: str, numbers: tuple[int, ...], action: Callable[[Plan], Any]) -> Any:
        request = Request(kind, engine.unnamed(kind), splits=numbers)
        pending = Pending(self.world.runtime, request, [], [])
        pending.action = action
        engine.submit(pending)
        return engine.wait(pending)


class _Door:
    """What the world keeps: the context, from an init to a shutdown."""

    def __init__(self) -> None:
        self.context: Context | None = None

    def close(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            context.close()


def _door() -> _Door | None:
    try:
        return current_world().keep("horovod", _Door)
    except WorldError:
        return None


def context(operation: bool = False) -> Context:
    """The context of the current world. Without one it raises Horovod's error, which differs for an operation."""
    door = _door()
    if door is None or door.context is None:
        raise UninitializedOperationError if operation else NotInitializedError
    return door.context


def is_initialized() -> bool:
    """Whether `init()` was called, and `shutdown()` not since."""
    door = _door()
    return door is not None and door.context is not None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the others; a second call does nothing. A world that `sl.init()` has made already is used.

    `process_sets` are sets to make now; "dynamic" stands for none, as they may be added at any time here. `comm` may
    only name all ranks: for some of them there are process sets.

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
    _check_comm(comm, world)
    if os.environ.get("HOROVOD_LOG_LEVEL"):
        logger.setLevel(LEVELS[settings.log_level])
    idle = without_effect(os.environ)
    if idle and world.rank == 0:
        logger.warning("these variables of Horovod have no effect here: %s", ", ".join(idle))
    made = Context(world, settings, owns)
    door = _door()
    assert door is not None, "there is a world"
    door.context = made
    made.make_static(static)


def shutdown() -> None:
    """Leave; operations that are still asked for fail. A second call does nothing."""
    door = _door()
    if door is None or door.context is None:
        return
    left = door.context
    door.close()
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
        told = f"ranks {ranks}" if ranks is not None else f"a {type(comm).__name__}"
        raise IncompatibleError(
            f"comm={told}: here Horovod always has all {world.size} ranks; for some of them use process sets"
        )


def _agreed(settings: Settings, team: Team) -> Settings:
    """What decides on the order of operations is rank 0's, whatever the others' variables say."""
    if team.size == 1:
        return settings
    mine = [settings.fusion_bytes, settings.cache_capacity, int(settings.hierarchical_allreduce)]
    fusion, capacity, hierarchical = broadcast(torch.tensor(mine), root=0, group=team).tolist()
    return replace(settings, fusion_bytes=fusion, cache_capacity=capacity, hierarchical_allreduce=bool(hierarchical))
