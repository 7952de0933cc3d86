"""What `sl.asgd` can solve: a state vector, an update on a mini-batch, and a value over all samples.

    Objective ── begin(data, random) ──► state              the first one, on rank 0
        ├─ delta(state, batch)       ──► Δ                  w ← w − εΔ; the gradient, or what stands for it
        └─ value(state, data)        ──► a number           mean over the samples, smaller is better

Data is a tuple of arrays with the samples along the first dimension: (points,), or (inputs, targets).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from syncline.errors import IncompatibleError, SpecError
from syncline.strategies.onesided.step import Array

__all__ = ["Data", "KMeans", "LeastSquares", "Logistic", "Objective", "as_data"]

Data = tuple[Array, ...]

ROWS = 8192
"""Samples that `KMeans.value` looks at together: their distances to all centres stay in the cache."""
SEEDING, TRIALS = 50, 24
"""Points for each centre among which k-means++ chooses the first ones, and how many it tries for the next."""


class Objective(Protocol):
    """A problem. States are flat arrays of float64."""

    def begin(self, data: Data, random: np.random.Generator) -> Array:
        """The state to start from."""
        ...

    def delta(self, state: Array, batch: Data) -> Array:
        """The update's direction on a mini-batch: the state moves against it."""
        ...

    def value(self, state: Array, data: Data) -> float:
        """The mean over the samples of what is minimised."""
        ...


@dataclass(frozen=True)
class KMeans:
    """k centres: f(c) = mean over x of min_j ‖x − c_j‖².

    Δ_j = c_j − the mean of its points in the mini-batch, 0 where it has none: Newton's step for k-means (Bottou and
    Bengio 1995). The first centres are drawn by greedy k-means++ among rank 0's points.

    >>> points = np.array([[0.0], [1.0], [10.0], [11.0]])
    >>> two = KMeans(2)
    >>> two.delta(np.array([0.0, 10.0]), (points,)), two.value(np.array([0.5, 10.5]), (points,))
    (array([-0.5, -0.5]), 0.25)
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise SpecError(f"KMeans(k={self.k!r}): a number of centres, at least 1")

    def begin(self, data: Data, random: np.random.Generator) -> Array:
        (points,) = data
        if len(points) < self.k:
            raise IncompatibleError(
                f"rank 0 has {len(points)} points and is to choose {self.k} centres among them: give it more points, "
                "take fewer centres, or say where to start (start=…)"
            )
        chosen = random.choice(len(points), min(len(points), SEEDING * self.k), replace=False)
        return _plus_plus(points[chosen].astype(np.float64), self.k, random).reshape(-1)

    def delta(self, state: Array, batch: Data) -> Array:
        (points,) = batch
        centres = state.reshape(self.k, -1)
        sums, counts = self.sums(centres, points)
        change = centres - sums / np.maximum(counts, 1)[:, None]
        change[counts == 0] = 0.0
        return change.reshape(-1)

    def value(self, state: Array, data: Data) -> float:
        (points,) = data
        centres, total = state.reshape(self.k, -1), 0.0
        for first in range(0, len(points), ROWS):
            rows = points[first : first + ROWS]
            gaps = rows - centres[self.nearest(centres, rows)]
            total += float(np.einsum("ij,ij->", gaps, gaps))
        return total / len(points)

    def nearest(self, centres: Array, points: Array) -> Array:
        """The number of the nearest centre of each point."""
        centres = centres.astype(points.dtype, copy=False)
        scores = points @ centres.T
        scores -= 0.5 * np.einsum("ij,ij->i", centres, centres)
        return np.asarray(scores.argmax(axis=1))

    def sums(self, centres: Array, points: Array) -> tuple[Array, Array]:
        """For each centre the sum of the points that are nearest to it, and how many they are."""
        sums, counts = np.zeros(centres.shape), np.zeros(self.k, np.int64)
        for first in range(0, len(points), ROWS):
            rows = points[first : first + ROWS]
            owners = self.nearest(centres, rows)
            counts += np.bincount(owners, minlength=self.k)
            for column in range(rows.shape[1]):
                sums[:, column] += np.bincount(owners, rows[:, column], self.k)
        return sums, counts


@dataclass(frozen=True)
class LeastSquares:
    """Linear regression: f(w) = ½ mean (xᵀw − y)² + ½ l2 ‖w‖².

    >>> data = np.array([[1.0], [2.0]]), np.array([2.0, 4.0])
    >>> LeastSquares().delta(np.zeros(1), data), LeastSquares().value(np.array([2.0]), data)
    (array([-5.]), 0.0)
    """

    l2: float = 0.0

    def begin(self, data: Data, random: np.random.Generator) -> Array:
        return _zeros(data)

    def delta(self, state: Array, batch: Data) -> Array:
        inputs, targets = batch
        return np.asarray((inputs @ state - targets) @ inputs / len(inputs) + self.l2 * state)

    def value(self, state: Array, data: Data) -> float:
        inputs, targets = data
        return float(0.5 * np.mean((inputs @ state - targets) ** 2) + 0.5 * self.l2 * state @ state)


@dataclass(frozen=True)
class Logistic:
    """Logistic regression, targets 0 or 1: f(w) = mean (log(1 + exp(xᵀw)) − y·xᵀw) + ½ l2 ‖w‖².

    >>> data = np.array([[1.0], [-1.0]]), np.array([1.0, 0.0])
    >>> Logistic().delta(np.zeros(1), data), round(Logistic().value(np.zeros(1), data), 4)
    (array([-0.5]), 0.6931)
    """

    l2: float = 0.0

    def begin(self, data: Data, random: np.random.Generator) -> Array:
        return _zeros(data)

    def delta(self, state: Array, batch: Data) -> Array:
        inputs, targets = batch
        chances = 0.5 * (1.0 + np.tanh(0.5 * (inputs @ state)))  # the logistic function, without an overflow
        return np.asarray((chances - targets) @ inputs / len(inputs) + self.l2 * state)

    def value(self, state: Array, data: Data) -> float:
        inputs, targets = data
        scores = inputs @ state
        return float(np.mean(np.logaddexp(0.0, scores) - targets * scores) + 0.5 * self.l2 * state @ state)


def as_data(data: Any) -> Data:
    """An array, a tensor or a tuple of them, as arrays of floats with equally many samples.

    >>> [array.shape for array in as_data((torch.ones(3, 2), [1, 0, 1]))]
    [(3, 2), (3,)]
    """
    given = data if isinstance(data, tuple) else (data,)
    arrays = [np.asarray(each.detach().cpu().numpy() if isinstance(each, torch.Tensor) else each) for each in given]
    made = tuple(each if each.dtype in (np.float32, np.float64) else each.astype(np.float64) for each in arrays)
    lengths = [each.shape[0] if each.ndim else 0 for each in made]
    if not lengths or min(lengths) < 1 or len(set(lengths)) > 1:
        raise IncompatibleError(
            f"the arrays of the data have {', '.join(map(str, lengths))} samples: give each equally many, at least one"
        )
    return made


def _zeros(data: Data) -> Array:
    inputs = data[0]
    if len(data) != 2 or inputs.ndim != 2 or data[1].ndim != 1:
        shapes = ", ".join(str(each.shape) for each in data)
        raise IncompatibleError(
            f"a regression takes (inputs, targets) of shapes (samples, features) and (samples,), not {shapes}"
        )
    return np.zeros(inputs.shape[1])


def _plus_plus(points: Array, k: int, random: np.random.Generator) -> Array:
    """Greedy k-means++: of some points drawn by their squared distance, the one that leaves the least is next.

    Arthur, Vassilvitskii: k-means++, the advantages of careful seeding (2007).
    """
    norms = np.einsum("ij,ij->i", points, points)
    centres = np.empty((k, points.shape[1]))
    centres[0] = points[random.integers(len(points))]
    gaps = ((points - centres[0]) ** 2).sum(axis=1)
    for number in range(1, k):
        total = gaps.sum()
        weights = gaps / total if total > 0 else np.full(len(points), 1 / len(points))
        tried = points[random.choice(len(points), TRIALS, p=weights)]
        squares = norms[:, None] - 2 * points @ tried.T + (tried**2).sum(axis=1)
        left = np.minimum(gaps[:, None], np.maximum(squares, 0.0))
        best = int(left.sum(axis=0).argmin())
        centres[number], gaps = tried[best], left[:, best]
    return centres
