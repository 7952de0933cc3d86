"""A matrix that somebody brings: read, and refused where gossip with it could not work."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from syncline.errors import SpecError

__all__ = ["SUFFIXES", "Matrix", "check_matrix", "check_mixes", "contraction", "read_matrix"]

Matrix = tuple[tuple[float, ...], ...]

SUFFIXES = (".csv", ".txt", ".json", ".npy")
EXACT = 1e-6
"""How far a row's or a column's sum may be from 1."""
LEAST_GAP = 1e-9
MOST = 4096
"""Workers that a matrix may be for."""


def check_matrix(rows: Sequence[Any], what: str) -> Matrix:
    """Rows of numbers as a matrix: square, not negative, all sums 1.

    >>> check_matrix([[0.5, 0.5], [0.5, 0.5]], "W")
    ((0.5, 0.5), (0.5, 0.5))
    >>> check_matrix([[0.9, 0.1], [0.2, 0.8]], "W")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: W: column 0 sums to 1.1, not 1: ...
    """
    size = len(rows)
    if not 1 <= size <= MOST:
        raise SpecError(f"{what}: a matrix of {size} rows, and 1 to {MOST} can be: one for each worker")
    found: list[tuple[float, ...]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) or len(row) != size:
            told = f"{len(row)} numbers" if isinstance(row, (list, tuple)) else f"{row!r}"
            raise SpecError(f"{what}: row {number} is {told}, and the matrix has {size} rows: it must be square")
        for column, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise SpecError(f"{what}: row {number}, column {column} is {value!r}: a weight is a number from 0 to 1")
        found.append(tuple(float(value) for value in row))
    for kind, lines in (("row", found), ("column", list(zip(*found, strict=True)))):
        for number, line in enumerate(lines):
            total = math.fsum(line)
            if abs(total - 1.0) > EXACT:
                raise SpecError(
                    f"{what}: {kind} {number} sums to {total:.7g}, not 1: rows must, or weights fade or grow, and "
                    "columns, or the mean is not kept; a graph by its edges ('0-1, 1-2') gets weights that do"
                )
    return tuple(found)


def check_mixes(matrix: Matrix, what: str) -> None:
    """Refuse a graph that falls into parts, or one whose rounds bring nobody together."""
    apart = _unreached(matrix)
    if apart:
        raise SpecError(
            f"{what}: no path leads from worker 0 to {', '.join(map(str, apart[:8]))}{', …' * (len(apart) > 8)}: the "
            "graph is not connected, and its parts would train apart; join them by an edge"
        )
    if len(matrix) > 1 and 1.0 - contraction(matrix) < LEAST_GAP:
        raise SpecError(
            f"{what}: a round brings the workers no nearer to each other (the spectral gap is 0), as where all weights "
            "only change places: keep some weight on the diagonal, such as (W + 1) / 2"
        )


def contraction(matrix: Matrix) -> float:
    """‖W − 11ᵀ/p‖₂: the second largest singular value; of a symmetric matrix |λ₂|.

    >>> contraction(((0.75, 0.25), (0.25, 0.75)))
    0.5
    """
    whole = torch.tensor(matrix, dtype=torch.float64)
    return min(1.0, float(torch.linalg.matrix_norm(whole - 1.0 / len(matrix), ord=2)))


def read_matrix(path: str) -> Matrix:
    """A matrix out of a file: .json (lists of numbers), .npy, or text with a row on each line."""
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


def _unreached(matrix: Matrix) -> list[int]:
    """Workers that nothing of worker 0 ever gets to. Columns that sum to 1 make every way a way back too."""
    seen, waiting = {0}, [0]
    while waiting:
        source = waiting.pop()
        for worker, row in enumerate(matrix):
            if row[source] > 0 and worker not in seen:
                seen.add(worker)
                waiting.append(worker)
    return [worker for worker in range(len(matrix)) if worker not in seen]
