"""Every schedule by operation and name: a new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import get_args

from syncline.collectives import (
    double_tree,
    halving_doubling,
    hierarchical,
    naive,
    pairwise,
    recursive_doubling,
    ring,
    sharded,
    tree,
)
from syncline.collectives.base import Generate, Operation, Schedule
from syncline.collectives.folding import largest_power_of_two
from syncline.errors import SpecError
from syncline.specs import Registry

__all__ = ["NATIVE", "build", "names"]

NATIVE = "native"
"""The engine's own algorithm, whatever it is; where the engine has none, the schedule in `STAND_INS`."""

STAND_INS: dict[Operation, str] = {
    "allreduce": "ring",
    "reduce": "tree",
    "broadcast": "tree",
    "allgather": "ring",
    "reduce_scatter": "ring",
    "alltoall": "pairwise",
    "gather": "naive",
    "scatter": "naive",
}

OTHER_NAMES = {
    **dict.fromkeys(("nccl", "gloo", "mpi", "default", "engine"), NATIVE),
    **dict.fromkeys(("rabenseifner", "recursivehalvingdoubling", "recursivehalving"), "halving_doubling"),
    "butterfly": "recursive_doubling",
    **dict.fromkeys(("doublebinarytree", "doublebinarytrees"), "double_tree"),
    **dict.fromkeys(("binarytree", "binomial", "binomialtree"), "tree"),
    **dict.fromkeys(("star", "central", "centralized"), "naive"),
}
"""Names that users may know an algorithm by, and our names for them."""

_CATALOG: dict[Operation, Registry[Schedule]] = {
    operation: Registry[Schedule](f"algorithm of {operation}", OTHER_NAMES) for operation in get_args(Operation)
}


def names(operation: Operation) -> list[str]:
    """The schedules there are for an operation.

    >>> names("reduce_scatter")
    ['ring', 'sharded']
    """
    return _CATALOG[operation].names()


def build(operation: Operation, algorithm: str) -> Schedule:
    """The schedule that a spec describes.

    >>> build("allreduce", "double_tree(chunks=4)")
    double_tree(chunks=4)
    """
    if not isinstance(algorithm, str):
        return _CATALOG[operation].build(algorithm)  # which says what is wrong with it
    return _build(operation, STAND_INS[operation] if algorithm == NATIVE else algorithm)


@lru_cache(maxsize=256)
def _build(operation: Operation, spec: str) -> Schedule:
    """Schedules do not change, and every collective call asks for one: parse each spec once."""
    return _CATALOG[operation].build(spec)


def _add(
    operation: Operation,
    name: str,
    generate: Generate,
    cut: Callable[[int, tuple[int, ...]], int],
    laned: bool = True,
) -> None:
    schedule = Schedule(name, operation, generate, cut, laned)
    _CATALOG[operation].add(name, lambda: schedule)


def _double_tree(chunks: int = 8) -> Schedule:
    if not isinstance(chunks, int) or chunks < 1:
        raise SpecError(f"double_tree cuts each half into at least one chunk (chunks: {chunks!r})")
    spec = "double_tree" if chunks == 8 else f"double_tree(chunks={chunks})"
    return Schedule(spec, "allreduce", double_tree.double_tree, lambda size, hosts: 2 * chunks)


def _one(size: int, hosts: tuple[int, ...]) -> int:
    return 1


def _per_rank(size: int, hosts: tuple[int, ...]) -> int:
    return size


def _per_pair(size: int, hosts: tuple[int, ...]) -> int:
    return size * size


def _power_of_two(size: int, hosts: tuple[int, ...]) -> int:
    return largest_power_of_two(size)


_add("allreduce", "naive", naive.naive, _one, laned=False)
_add("allreduce", "sharded", sharded.sharded, _per_rank)
_add("allreduce", "ring", ring.ring, _per_rank)
_add("allreduce", "recursive_doubling", recursive_doubling.recursive_doubling, _one)
_add("allreduce", "halving_doubling", halving_doubling.halving_doubling, _power_of_two)
_add("allreduce", "tree", tree.tree, _one, laned=False)
_CATALOG["allreduce"].add("double_tree", _double_tree)
_add("allreduce", "hierarchical", hierarchical.hierarchical, hierarchical.hierarchical_chunks)
_add("reduce", "naive", naive.naive_reduce, _one)
_add("reduce", "tree", tree.tree_reduce, _one)
_add("broadcast", "naive", naive.naive_broadcast, _one)
_add("broadcast", "tree", tree.tree_broadcast, _one)
_add("allgather", "ring", ring.ring_allgather, _per_rank)
_add("allgather", "sharded", sharded.sharded_allgather, _per_rank)
_add("reduce_scatter", "ring", ring.ring_reduce_scatter, _per_rank)
_add("reduce_scatter", "sharded", sharded.sharded_reduce_scatter, _per_rank)
_add("alltoall", "pairwise", pairwise.pairwise, _per_pair)
_add("alltoall", "sharded", sharded.sharded_alltoall, _per_pair)
_add("gather", "naive", naive.naive_gather, _per_rank)
_add("scatter", "naive", naive.naive_scatter, _per_rank)
