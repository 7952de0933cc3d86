"""Every schedule, by operation and name. A new schedule is one file and one line here."""

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
from syncline.collectives.base import Generate, Operation, Schedule, largest_power_of_two
from syncline.errors import SpecError
from syncline.specs import Registry

__all__ = ["AUTO", "NATIVE", "build", "names"]

AUTO = "auto"
"""The algorithm that is fastest for each size, by prediction and measurement."""
NATIVE = "native"
"""The engine's own algorithm; where the engine has none, the schedule in `FALLBACKS`."""

FALLBACKS: dict[Operation, str] = {
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
"""Names of algorithms in other libraries, and ours for them."""

_REGISTRIES: dict[Operation, Registry[Schedule]] = {
    operation: Registry[Schedule](f"algorithm of {operation}", OTHER_NAMES) for operation in get_args(Operation)
}


def names(operation: Operation) -> list[str]:
    """The names of the schedules of an operation.

    >>> names("reduce_scatter")
    ['ring', 'sharded']
    """
    return _REGISTRIES[operation].names()


def build(operation: Operation, algorithm: str) -> Schedule:
    """The schedule that a spec describes.

    >>> build("allreduce", "double_tree(chunks=4)")
    double_tree(chunks=4)
    """
    if not isinstance(algorithm, str):
        return _REGISTRIES[operation].build(algorithm)  # raises the error
    return _build(operation, FALLBACKS[operation] if algorithm == NATIVE else algorithm)


@lru_cache(maxsize=256)
def _build(operation: Operation, spec: str) -> Schedule:
    """Each spec is parsed once: every collective call needs its schedule."""
    return _REGISTRIES[operation].build(spec)


def _add(
    operation: Operation,
    name: str,
    generate: Generate,
    chunks_for: Callable[[int, tuple[int, ...]], int],
    supports_lanes: bool = True,
) -> None:
    schedule = Schedule(name, operation, generate, chunks_for, supports_lanes)
    _REGISTRIES[operation].add(name, lambda: schedule)


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


_add("allreduce", "naive", naive.naive, _one, supports_lanes=False)
_add("allreduce", "sharded", sharded.sharded, _per_rank)
_add("allreduce", "ring", ring.ring, _per_rank)
_add("allreduce", "recursive_doubling", recursive_doubling.recursive_doubling, _one)
_add("allreduce", "halving_doubling", halving_doubling.halving_doubling, _power_of_two)
_add("allreduce", "tree", tree.tree, _one, supports_lanes=False)
_REGISTRIES["allreduce"].add("double_tree", _double_tree)
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
