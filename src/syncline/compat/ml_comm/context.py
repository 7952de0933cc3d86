"""`init_mpi()`: the state of the plugin on one rank, from the first call to `finalize()`."""

from __future__ import annotations

import contextvars

from syncline.compat.ml_comm.team import PluginTeam
from syncline.errors import IncompatibleError, UnsupportedError, WorldError
from syncline.world import World, current_world
from syncline.world import init as init_world

__all__ = ["PluginContext", "context", "finalize", "init_mpi"]

_finalized: contextvars.ContextVar[bool] = contextvars.ContextVar("ml_comm_finalized", default=False)
"""Whether `finalize` has closed the world of this process."""


class PluginContext:
    """The plugin on one rank."""

    def __init__(self, world: World, owns: bool) -> None:
        if world.elastic is not None:
            raise UnsupportedError("ml_comm: the ranks of the plugin are fixed; leave --elastic out")
        self.world, self.owns = world, owns
        self.group = world.group()
        """The channel of broadcasts, averages and barriers."""
        self.checks = world.group()
        """The channel of `check_buffers_match`, which scripts may call on some ranks only."""
        self.teams: list[PluginTeam] = []
        self.optimizers = 0
        """The number of optimizers that were distributed so far."""

    def make_teams(self, count: int, max_elements: int) -> None:
        """Make the teams of `init`, in the place of those of an earlier call."""
        for team in self.teams:
            team.close()
        self.teams = [PluginTeam(self.world, number, max_elements) for number in range(count)]

    def team(self, number: int) -> PluginTeam:
        """The team with this number."""
        if not self.teams:
            raise WorldError("ml_comm has no teams yet: call init(threads_per_team, teams, max_elements) first")
        if not 0 <= number < len(self.teams):
            raise IncompatibleError(
                f"team {number} does not exist: init(threads_per_team, teams={len(self.teams)}, …) has made teams 0 to "
                f"{len(self.teams) - 1}"
            )
        return self.teams[number]


class _ContextSlot:
    """Attached to the world: the context until `finalize`. The world closes the groups."""

    def __init__(self) -> None:
        self.context: PluginContext | None = None
        self.finalized = False

    def close(self) -> None:
        self.context = None


def _open_slot() -> _ContextSlot | None:
    try:
        return current_world().keep("ml_comm", _ContextSlot)
    except WorldError:
        return None


def context() -> PluginContext:
    """The context of this rank. Without one it is made, because some scripts never call `init_mpi`."""
    slot = _open_slot()
    if slot is not None and slot.context is not None:
        return slot.context
    if _finalized.get() if slot is None else slot.finalized:
        raise WorldError("ml_comm was finalized: call init_mpi() to join the other ranks again")
    return _open_context()


def _open_context() -> PluginContext:
    try:
        world, owns = current_world(), False
    except WorldError:
        world, owns = init_world(), True
    slot = _open_slot()
    assert slot is not None, "there is a world"
    slot.context = PluginContext(world, owns)
    return slot.context


def init_mpi() -> None:
    """Join the other ranks, as the launcher has started them. A second call does nothing.

    >>> import syncline.compat.ml_comm as mc
    >>> mc.init_mpi()
    >>> mc.get_rank(), mc.get_nranks()
    (0, 1)
    >>> mc.finalize()
    """
    _finalized.set(False)
    slot = _open_slot()
    if slot is not None:
        slot.finalized = False
    context()


def finalize() -> None:
    """Leave the other ranks. A second call does nothing.

    The world is closed if `init_mpi` has made it, and not if the script has called `sl.init()`.
    """
    slot = _open_slot()
    if slot is None or slot.context is None:
        return
    left, slot.context, slot.finalized = slot.context, None, True
    if left.owns:
        _finalized.set(True)
        left.world.close()
        return
    for team in left.teams:
        team.close()
    for group in (left.group, left.checks):
        group.close()
