"""The same objectives by aggregation, as in a map-reduce program: the baseline of one-sided SGD.

    each round   map     every worker reads all of its samples: sums, counts, a gradient
                 reduce  one all-reduce
                 step    the same on every worker

K-means is Lloyd's: c_j ← Σ its points / their number. Least squares takes one round: (Σ xxᵀ + n·l2·I) w = Σ xy.
Logistic regression, and any other objective, is gradient descent with the gradient of all samples. Every round waits
for the slowest worker. Chu et al.: Map-Reduce for Machine Learning on Multicore (2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from syncline.errors import DivergedError, SpecError
from syncline.solvers.base import Data, Effort, Objective, Solution, conclude, first_state, own_share
from syncline.solvers.objectives import KMeans, LeastSquares
from syncline.strategies.onesided.update import Array
from syncline.world import World, allreduce, current_world

__all__ = ["aggregate"]


def aggregate(
    objective: Objective,
    data: Any,
    *,
    iterations: int = 100,
    tolerance: float = 1e-4,
    rate: float = 1.0,
    start: Any = None,
    split: bool = True,
    seed: int = 0,
    cost: Callable[[int], float] | None = None,
) -> Solution:
    """Minimise `objective` over the data of all workers, in synchronous rounds.

    It ends after `iterations` rounds, or when a round changes the state by less than `tolerance` of its norm. `rate` is
    that of gradient descent. Every worker calls it, on any backend. The other arguments are those of `asgd`.

    >>> import numpy as np, syncline as sl
    >>> inputs = np.random.default_rng(0).normal(size=(60, 2))
    >>> def solve(world):
    ...     return aggregate(LeastSquares(), (inputs, inputs @ [1.0, -2.0])).state.round(6).tolist()
    >>> sl.simulate(solve, ranks=3).results[2]
    [1.0, -2.0]
    """
    if iterations < 1 or not tolerance >= 0 or not 0 < rate < math.inf:
        raise SpecError(
            f"aggregate(iterations={iterations}, tolerance={tolerance}, rate={rate}): at least 1, not negative, above 0"
        )
    world = current_world()
    own = own_share(data, world, split)
    state = first_state(objective, own, start, seed, world)
    now = world.runtime.now
    begun, rounds, moved, payload = now(), 0, math.inf, 0
    while rounds < iterations and moved > tolerance * max(float(np.linalg.norm(state)), 1e-12):
        if cost is not None:
            world.compute(cost(len(own[0])))
        after, payload = _round(objective, state, own, rate, world)
        moved = float(np.linalg.norm(after - state))
        state, rounds = after, rounds + 1
        if not math.isfinite(moved):
            raise DivergedError("the state is not finite", step=rounds, remedy=f"lower the rate, which is {rate:g}")
        if isinstance(objective, LeastSquares):
            break  # exact
    effort = Effort(
        steps=rounds,
        samples=rounds * len(own[0]),
        sent=rounds,
        sent_bytes=2 * (world.size - 1) * payload // world.size * rounds,  # the least that an all-reduce sends
        batch=len(own[0]),
        seconds=now() - begun,
    )
    return conclude(objective, state, own, effort)


def _round(objective: Objective, state: Array, own: Data, rate: float, world: World) -> tuple[Array, int]:
    """The next state, and the number of bytes that were reduced."""
    if isinstance(objective, KMeans):
        centres = state.reshape(objective.k, -1)
        sums, counts = objective.sums(centres, own[0])
        row = _sum(np.concatenate([sums.reshape(-1), counts]), world)
        sums, counts = row[: -objective.k].reshape(centres.shape), row[-objective.k :]
        moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        return moved.reshape(-1), row.nbytes
    if isinstance(objective, LeastSquares):
        inputs, targets = (each.astype(np.float64, copy=False) for each in own)
        width, count = inputs.shape[1], len(inputs)
        row = _sum(np.concatenate([(inputs.T @ inputs).reshape(-1), targets @ inputs, [count]]), world)
        gram, right, total = row[: width * width].reshape(width, width), row[width * width : -1], row[-1]
        gram = gram + total * objective.l2 * np.eye(width)
        return np.linalg.lstsq(gram, right, rcond=None)[0], row.nbytes
    row = _sum(np.append(len(own[0]) * objective.delta(state, own), len(own[0])), world)
    return state - rate * row[:-1] / row[-1], row.nbytes


def _sum(row: Array, world: World) -> Array:
    return row if world.size == 1 else np.asarray(allreduce(torch.from_numpy(row), op="sum").numpy())
