"""Who talks with whom, and with what weight: W, whose rows and columns sum to 1.

    ring      0 ─ 1 ─ 2 ─ 3 ─ 0         a third of each neighbour, a third of oneself
    torus     the same on a grid, 4 neighbours; the sides are the two factors of p that are nearest each other
    exponential   i ± 1, i ± 2, i ± 4, …: about 2·log₂(p) neighbours
    complete  everybody: 1/p each

A round x ← W x leaves the mean as it is and brings the workers together by the factor σ = ‖W − 11ᵀ/p‖₂, which is |λ₂|
where W is symmetric. 1 − σ is the spectral gap. For any other connected graph Metropolis' weights are symmetric and
doubly stochastic: W_ij = 1 / (1 + max(d_i, d_j)) between neighbours of degrees d_i and d_j, and the rest on oneself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, SpecError
from syncline.specs import nearest
from syncline.strategies.gossip.matrices import SUFFIXES, Matrix, check_matrix, check_mixes, contraction, read_matrix

__all__ = ["GRAPHS", "Graph", "build_graph", "check_graph", "metropolis"]

EDGES = re.compile(r"\s*\d+\s*-\s*\d+\s*(,\s*\d+\s*-\s*\d+\s*)*,?\s*")


@dataclass(frozen=True)
class Graph:
    """A graph of a world's workers, with its weights.

    >>> ring = build_graph("ring", 4)
    >>> ring.listens_to(0), round(ring.gap, 4)
    ({1: 0.3333333333333333, 3: 0.3333333333333333}, 0.6667)
    """

    matrix: Matrix

    @property
    def size(self) -> int:
        return len(self.matrix)

    def listens_to(self, worker: int) -> dict[int, float]:
        """Whose weights a worker mixes into its own, and how much of them."""
        return {other: weight for other, weight in enumerate(self.matrix[worker]) if weight > 0 and other != worker}

    def tells(self, worker: int) -> list[int]:
        """Who mixes this worker's weights into theirs."""
        return [other for other, row in enumerate(self.matrix) if row[worker] > 0 and other != worker]

    def neighbours(self, worker: int) -> dict[int, float]:
        """Whom it is joined with either way, and how strongly; for averages of two."""
        column = {other: self.matrix[other][worker] for other in self.tells(worker)}
        row = self.listens_to(worker)
        return {other: (row.get(other, 0.0) + column.get(other, 0.0)) / 2 for other in sorted({*row, *column})}

    @cached_property
    def contraction(self) -> float:
        """σ: what is left of the distance to the mean after a round, at most."""
        return contraction(self.matrix)

    @property
    def gap(self) -> float:
        """The spectral gap, 1 − σ."""
        return 1.0 - self.contraction

    def tensor(self) -> Tensor:
        """W, in double precision."""
        return torch.tensor(self.matrix, dtype=torch.float64)


def check_graph(graph: object) -> str | Matrix:
    """A strategy's argument as it is kept: a name, edges, a path, or a matrix of tuples. What cannot be is refused."""
    if isinstance(graph, (list, tuple)):
        return check_matrix(graph, "gossip(graph=…)")
    if not isinstance(graph, str):
        raise SpecError(f"gossip(graph={graph!r}): {_offer()}")
    known = graph in GRAPHS or graph.endswith(SUFFIXES) or EDGES.fullmatch(graph) is not None
    if not known:
        raise SpecError(f"gossip(graph={graph!r}): {nearest(graph, list(GRAPHS))}; or {_offer()}")
    return graph


def build_graph(graph: str | Matrix, size: int) -> Graph:
    """The graph of a world of `size` workers.

    >>> build_graph("0-1, 1-2", 3).matrix[0]
    (0.6666666666666667, 0.3333333333333333, 0.0)
    """
    if size == 1:  # there is nobody to mix with, whatever the graph is for
        return Graph(((1.0,),))
    if isinstance(graph, str) and graph in GRAPHS:
        return Graph(metropolis({worker: GRAPHS[graph](worker, size) for worker in range(size)}))
    what = f"gossip(graph={graph if isinstance(graph, str) else '…'!r})"
    if isinstance(graph, str) and not graph.endswith(SUFFIXES):
        found = Graph(metropolis(_joined(graph, size, what)))
    else:
        found = Graph(read_matrix(graph) if isinstance(graph, str) else graph)
        if found.size != size:
            raise IncompatibleError(
                f"{what} is for {found.size} workers, and this world has {size}: give a matrix of {size} rows and "
                f"columns, or a graph by its name ({', '.join(GRAPHS)})"
            )
    check_mixes(found.matrix, what)
    return found


def metropolis(neighbours: Mapping[int, Iterable[int]]) -> Matrix:
    """Weights for a graph that is given by each worker's neighbours: symmetric, doubly stochastic.

    >>> metropolis({0: [1], 1: [0]})
    ((0.5, 0.5), (0.5, 0.5))
    """
    size = len(neighbours)
    joined: list[set[int]] = [set() for _ in range(size)]
    for worker, others in neighbours.items():
        for other in others:
            if not 0 <= worker < size or not 0 <= other < size:
                raise SpecError(f"an edge {worker}-{other}, and there are workers 0 to {size - 1}")
            if worker != other:
                joined[worker].add(other)
                joined[other].add(worker)
    rows = []
    for worker in range(size):
        row = [0.0] * size
        for other in joined[worker]:
            row[other] = 1.0 / (1 + max(len(joined[worker]), len(joined[other])))
        row[worker] = 1.0 - math.fsum(row)
        rows.append(tuple(row))
    return tuple(rows)


def _ring(worker: int, size: int) -> list[int]:
    return [(worker - 1) % size, (worker + 1) % size]


def _torus(worker: int, size: int) -> list[int]:
    down = next(factor for factor in range(math.isqrt(size), 0, -1) if size % factor == 0)
    across = size // down
    row, column = divmod(worker, across)
    beside = [row * across + (column + way) % across for way in (-1, 1)]
    return beside + [(row + way) % down * across + column for way in (-1, 1)]


def _exponential(worker: int, size: int) -> list[int]:
    hops = [1 << power for power in range(max(0, (size - 1).bit_length()))]
    return [(worker + way * hop) % size for hop in hops for way in (-1, 1)]


def _complete(worker: int, size: int) -> list[int]:
    return list(range(size))


GRAPHS: Mapping[str, Callable[[int, int], Sequence[int]]] = {
    "ring": _ring,
    "torus": _torus,
    "exponential": _exponential,
    "complete": _complete,
}
"""By name: the neighbours of a worker among so many. As many for each, so that Metropolis' weights are all alike."""


def _joined(edges: str, size: int, what: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {worker: [] for worker in range(size)}
    for edge in filter(None, (part.strip() for part in edges.split(","))):
        one, other = (int(end) for end in edge.split("-"))
        if max(one, other) >= size:
            raise IncompatibleError(
                f"{what} has an edge {edge}, and this world has workers 0 to {size - 1}: name edges between those"
            )
        found[one].append(other)
    return found


def _offer() -> str:
    return (
        f"a name ({', '.join(GRAPHS)}), edges such as '0-1, 1-2, 2-0', a matrix whose rows and columns sum to 1, as "
        f"nested tuples, or the path of a file that holds one ({', '.join(SUFFIXES)})"
    )
