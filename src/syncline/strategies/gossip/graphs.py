"""The communication graph of gossip: a mixing matrix W whose rows and columns sum to 1.

    ring      0 ─ 1 ─ 2 ─ 3 ─ 0         a third of each neighbour, a third of the worker itself
    torus     the same on a grid, 4 neighbours; the sides are the two factors of p that are closest to each other
    exponential   i ± 1, i ± 2, i ± 4, …: about 2·log₂(p) neighbours
    complete  all workers: 1/p each

A round x ← W x keeps the mean and reduces the workers' distance from it by the factor σ = ‖W − 11ᵀ/p‖₂, which is |λ₂|
if W is symmetric. 1 − σ is the spectral gap. Any other connected graph gets Metropolis weights, which are symmetric and
doubly stochastic: W_ij = 1 / (1 + max(d_i, d_j)) for neighbours of degrees d_i and d_j; the rest is on the diagonal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.errors import IncompatibleError, SpecError
from syncline.specs import nearest

__all__ = ["GRAPHS", "Graph", "Matrix", "build_graph", "check_connected", "check_graph", "check_matrix", "metropolis"]

Matrix = tuple[tuple[float, ...], ...]

EDGES = re.compile(r"\s*\d+\s*-\s*\d+\s*(,\s*\d+\s*-\s*\d+\s*)*,?\s*")
MATRIX_SUFFIXES = (".csv", ".txt", ".json", ".npy")
SUM_TOLERANCE = 1e-6
"""Largest difference from 1 of the sum of a row or a column."""
MIN_SPECTRAL_GAP = 1e-9
MAX_WORKERS = 4096
"""Largest number of workers that a matrix may have."""


@dataclass(frozen=True)
class Graph:
    """A graph of a world's workers, with its weights.

    >>> ring = build_graph("ring", 4)
    >>> ring.sources(0), round(ring.gap, 4)
    ({1: 0.3333333333333333, 3: 0.3333333333333333}, 0.6667)
    """

    matrix: Matrix

    @property
    def size(self) -> int:
        return len(self.matrix)

    def sources(self, worker: int) -> dict[int, float]:
        """The workers whose weights `worker` mixes into its own, with the factor of each."""
        return {other: weight for other, weight in enumerate(self.matrix[worker]) if weight > 0 and other != worker}

    def targets(self, worker: int) -> list[int]:
        """The workers that mix the weights of `worker` into theirs."""
        return [other for other, row in enumerate(self.matrix) if row[worker] > 0 and other != worker]

    def neighbours(self, worker: int) -> dict[int, float]:
        """The workers at the other ends of its edges, with the mean factor of both directions."""
        column = {other: self.matrix[other][worker] for other in self.targets(worker)}
        row = self.sources(worker)
        return {other: (row.get(other, 0.0) + column.get(other, 0.0)) / 2 for other in sorted({*row, *column})}

    @cached_property
    def contraction(self) -> float:
        """σ = ‖W − 11ᵀ/p‖₂: the largest factor by which a round changes the distance from the mean."""
        return min(1.0, float(torch.linalg.matrix_norm(self.tensor() - 1.0 / self.size, ord=2)))

    @property
    def gap(self) -> float:
        """The spectral gap, 1 − σ."""
        return 1.0 - self.contraction

    def tensor(self) -> Tensor:
        """W, in double precision."""
        return torch.tensor(self.matrix, dtype=torch.float64)


def check_graph(graph: object) -> str | Matrix:
    """Check the strategy's argument: a name, edges, a path, or a matrix, which becomes nested tuples."""
    if isinstance(graph, (list, tuple)):
        return check_matrix(graph, "gossip(graph=…)")
    if not isinstance(graph, str):
        raise SpecError(f"gossip(graph={graph!r}): {_offer()}")
    known = graph in GRAPHS or graph.endswith(MATRIX_SUFFIXES) or EDGES.fullmatch(graph) is not None
    if not known:
        raise SpecError(f"gossip(graph={graph!r}): {nearest(graph, list(GRAPHS))}; or {_offer()}")
    return graph


def build_graph(graph: str | Matrix, size: int) -> Graph:
    """The graph of a world of `size` workers.

    >>> build_graph("0-1, 1-2", 3).matrix[0]
    (0.6666666666666667, 0.3333333333333333, 0.0)
    """
    if size == 1:  # any graph of one worker
        return Graph(((1.0,),))
    if isinstance(graph, str) and graph in GRAPHS:
        return Graph(metropolis({worker: GRAPHS[graph](worker, size) for worker in range(size)}))
    what = f"gossip(graph={graph if isinstance(graph, str) else '…'!r})"
    if isinstance(graph, str) and not graph.endswith(MATRIX_SUFFIXES):
        result = Graph(metropolis(_edges_of(graph, size, what)))
    else:
        result = Graph(_read_matrix(graph) if isinstance(graph, str) else graph)
        if result.size != size:
            raise IncompatibleError(
                f"{what} is for {result.size} workers, and this world has {size}: give a matrix of {size} rows and "
                f"columns, or a graph by its name ({', '.join(GRAPHS)})"
            )
    check_connected(result, what)
    return result


def metropolis(neighbours: Mapping[int, Iterable[int]]) -> Matrix:
    """Symmetric, doubly stochastic weights for a graph that is given by each worker's neighbours.

    >>> metropolis({0: [1], 1: [0]})
    ((0.5, 0.5), (0.5, 0.5))
    """
    size = len(neighbours)
    neighbour_sets: list[set[int]] = [set() for _ in range(size)]
    for worker, others in neighbours.items():
        for other in others:
            if not 0 <= worker < size or not 0 <= other < size:
                raise SpecError(f"an edge {worker}-{other}, and there are workers 0 to {size - 1}")
            if worker != other:
                neighbour_sets[worker].add(other)
                neighbour_sets[other].add(worker)
    rows = []
    for worker in range(size):
        row = [0.0] * size
        for other in neighbour_sets[worker]:
            row[other] = 1.0 / (1 + max(len(neighbour_sets[worker]), len(neighbour_sets[other])))
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
"""By name: the neighbours of a worker in a world of `size`. All degrees are equal, so all Metropolis weights are."""


def _edges_of(edges: str, size: int, what: str) -> dict[int, list[int]]:
    edges_of: dict[int, list[int]] = {worker: [] for worker in range(size)}
    for edge in filter(None, (part.strip() for part in edges.split(","))):
        one, other = (int(end) for end in edge.split("-"))
        if max(one, other) >= size:
            raise IncompatibleError(
                f"{what} has an edge {edge}, and this world has workers 0 to {size - 1}: name edges between those"
            )
        edges_of[one].append(other)
    return edges_of


def _offer() -> str:
    return (
        f"a name ({', '.join(GRAPHS)}), edges such as '0-1, 1-2, 2-0', a matrix whose rows and columns sum to 1, as "
        f"nested tuples, or the path of a file that holds one ({', '.join(MATRIX_SUFFIXES)})"
    )


def check_matrix(rows: Sequence[Any], what: str) -> Matrix:
    """Check that rows of numbers form a square matrix without negative entries whose rows and columns sum to 1.

    >>> check_matrix([[0.5, 0.5], [0.5, 0.5]], "W")
    ((0.5, 0.5), (0.5, 0.5))
    >>> check_matrix([[0.9, 0.1], [0.2, 0.8]], "W")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: W: column 0 sums to 1.1, not 1: ...
    """
    size = len(rows)
    if not 1 <= size <= MAX_WORKERS:
        raise SpecError(f"{what}: a matrix of {size} rows, and 1 to {MAX_WORKERS} can be: one for each worker")
    matrix: list[tuple[float, ...]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) or len(row) != size:
            content = f"{len(row)} numbers" if isinstance(row, (list, tuple)) else f"{row!r}"
            raise SpecError(f"{what}: row {number} is {content}, and the matrix has {size} rows: it must be square")
        for column, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise SpecError(f"{what}: row {number}, column {column} is {value!r}: a weight is a number from 0 to 1")
        matrix.append(tuple(float(value) for value in row))
    for kind, lines in (("row", matrix), ("column", list(zip(*matrix, strict=True)))):
        for number, line in enumerate(lines):
            total = math.fsum(line)
            if abs(total - 1.0) > SUM_TOLERANCE:
                raise SpecError(
                    f"{what}: {kind} {number} sums to {total:.7g}, not 1: rows must, or weights fade or grow, and "
                    "columns, or the mean is not kept; a graph by its edges ('0-1, 1-2') gets weights that do"
                )
    return tuple(matrix)


def check_connected(graph: Graph, what: str) -> None:
    """Refuse a graph that is not connected, or one with a spectral gap of 0."""
    # Because columns sum to 1, every path has a way back: it is enough to look from worker 0.
    seen, waiting = {0}, [0]
    while waiting:
        new = set(graph.targets(waiting.pop())) - seen
        seen |= new
        waiting += new
    unreached = [worker for worker in range(graph.size) if worker not in seen]
    if unreached:
        raise SpecError(
            f"{what}: no path leads from worker 0 to {', '.join(map(str, unreached[:8]))}"
            f"{', …' * (len(unreached) > 8)}: the graph is not connected, and its parts would train apart; "
            "join them by an edge"
        )
    if graph.size > 1 and graph.gap < MIN_SPECTRAL_GAP:
        raise SpecError(
            f"{what}: a round brings the workers no nearer to each other (the spectral gap is 0), as where all weights "
            "only change places: keep some weight on the diagonal, such as (W + 1) / 2"
        )


def _read_matrix(path: str) -> Matrix:
    """Read a matrix from a file: .json (lists of numbers), .npy, or text with a row on each line."""
    file, what = Path(path), f"gossip(graph={path!r})"
    try:
        if path.endswith(".npy"):
            rows = np.load(file, allow_pickle=False).tolist()
        elif path.endswith(".json"):
            rows = json.loads(file.read_text())
        else:
            lines = [line.split("#")[0].replace(",", " ").split() for line in file.read_text().splitlines()]
            rows = [[float(word) for word in line] for line in lines if line]
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{what}: no matrix can be read there ({error})") from None
    if not isinstance(rows, list):
        raise SpecError(f"{what}: it holds {type(rows).__name__}, and not rows of numbers")
    return check_matrix(rows, what)
