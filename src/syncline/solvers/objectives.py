"""The objectives that come with the solvers: k-means, least squares and logistic regression."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncline.errors import IncompatibleError, SpecError
from syncline.solvers.base import Data
from syncline.strategies.onesided.update import Array

__all__ = ["KMeans", "LeastSquares", "Logistic"]

ROWS_PER_CHUNK = 8192
"""Samples that are processed together: their distances to all centres stay in the cache."""
SEEDING_POINTS_PER_CENTRE, SEEDING_TRIALS = 50, 24
"""Points for each centre among which k-means++ chooses, and the candidates for each next centre."""


@dataclass(frozen=True)
class KMeans:
    """k centres: f(c) = mean over x of min_j ‖x − c_j‖².

    Δ_j = c_j − the mean of its points in the mini-batch, 0 if it has none: Newton's step for k-means (Bottou and
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
        chosen = random.choice(len(points), min(len(points), SEEDING_POINTS_PER_CENTRE * self.k), replace=False)
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
        for first in range(0, len(points), ROWS_PER_CHUNK):
            rows = points[first : first + ROWS_PER_CHUNK]
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
        for first in range(0, len(points), ROWS_PER_CHUNK):
            rows = points[first : first + ROWS_PER_CHUNK]
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


def _zeros(data: Data) -> Array:
    inputs = data[0]
    if len(data) != 2 or inputs.ndim != 2 or data[1].ndim != 1:
        shapes = ", ".join(str(each.shape) for each in data)
        raise IncompatibleError(
            f"a regression takes (inputs, targets) of shapes (samples, features) and (samples,), not {shapes}"
        )
    return np.zeros(inputs.shape[1])


def _plus_plus(points: Array, k: int, random: np.random.Generator) -> Array:
    """Greedy k-means++: among points drawn by their squared distance, the next centre minimises the rest.

    Arthur, Vassilvitskii: k-means++, the advantages of careful seeding (2007).
    """
    norms = np.einsum("ij,ij->i", points, points)
    centres = np.empty((k, points.shape[1]))
    centres[0] = points[random.integers(len(points))]
    gaps = ((points - centres[0]) ** 2).sum(axis=1)
    for number in range(1, k):
        total = gaps.sum()
        weights = gaps / total if total > 0 else np.full(len(points), 1 / len(points))
        tried = points[random.choice(len(points), SEEDING_TRIALS, p=weights)]
        squares = norms[:, None] - 2 * points @ tried.T + (tried**2).sum(axis=1)
        left = np.minimum(gaps[:, None], np.maximum(squares, 0.0))
        best = int(left.sum(axis=0).argmin())
        centres[number], gaps = tried[best], left[:, best]
    return centres
