"""Process sets: some of the ranks, which do operations among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from syncline.errors import IncompatibleError

if TYPE_CHECKING:
    from syncline.compat.horovod.context import Context

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the ranks; `hvd.init(process_sets=[…])` or `hvd.add_process_set` makes it usable.

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
        """Its members."""
        return self._ranks

    def invalidate(self) -> None:
        """It was removed."""
        self.process_set_id = None

    def included(self) -> bool:
        """Whether this rank is a member."""
        return self._context().world.rank in self.ranks

    def rank(self) -> int:
        """This rank's place among the members; None where the set was not added. An error on other ranks."""
        if self.process_set_id is None:
            return None  # type: ignore[return-value]  # as Horovod does; a set that is in use has a rank
        return self._context().engine(self).team.rank

    def size(self) -> int:
        """How many members there are; None where the set was not added."""
        if self.process_set_id is None:
            return None  # type: ignore[return-value]  # as Horovod does; a set that is in use has a size
        self._context().check_set(self)
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    @staticmethod
    def _context() -> Context:
        from syncline.compat.horovod.context import context

        return context()


class _GlobalSet(ProcessSet):
    """All ranks, whatever world this is asked in."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        from syncline.compat.horovod.context import is_initialized

        return list(range(self._context().world.size)) if is_initialized() else []

    def invalidate(self) -> None:
        raise AssertionError("the global process set stays")


global_process_set = _GlobalSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set usable after `init()`. Every rank calls it with the same ranks, members or not.

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
    return wanted._context().add(wanted)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Returns False for the global one, and for one that was not added.

    Every rank calls it, after the set's operations have ended.
    """
    if process_set.process_set_id in (0, None):
        return False
    return process_set._context().remove(process_set)
