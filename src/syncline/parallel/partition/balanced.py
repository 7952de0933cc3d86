"""Contiguous stages of equal time or equal memory: the exact block partition.

c(i, j, s): the time of layers i … j − 1, or their memory as stage s. The smallest largest stage::

    A(j, s) = min over i < j of  max{ A(i, s − 1),  c(i, j, s) }

Of several such partitions it is one with the fewest bytes across cuts. Communication does not count.

C. Kim and others, *torchgpipe: on-the-fly pipeline parallelism for training giant models*, 2020, balance by time or by
size; the exact solution is the linear partition problem, S. Skiena, *The algorithm design manual*.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from syncline.errors import SpecError
from syncline.parallel.partition.base import ModelProfile, StagePartition
from syncline.parallel.partition.pipedream import predict_partition
from syncline.parallel.partition.states import GraphStates, Matrix, stage_memory

__all__ = ["balanced"]


def balanced(
    profile: ModelProfile, stages: int, *, by: Literal["time", "memory"] = "time", weight_copies: float = 1.0
) -> StagePartition:
    """Cut the model into stages with one worker each, so that the largest is as small as possible.

    >>> from syncline.parallel.partition import LayerCost
    >>> layers = tuple(
    ...     LayerCost(name=f"fc{k}", forward_s=t, backward_s=2 * t, activation_bytes=8e6, parameter_bytes=4e6)
    ...     for k, t in enumerate([1.0, 2.0, 3.0, 4.0])
    ... )
    >>> print(balanced(ModelProfile(layers=layers, batch_size=8), 2))
    1-1, cut before fc3

    Args:
        by: what is balanced. For the memory, stage s of p keeps p − s micro-batches, as in 1F1B, with their weights.
        weight_copies: gradients and optimizer state, in copies of the weights; they count only by memory.

    Raises:
        SpecError: if there are more stages than layers.
    """
    if by not in ("time", "memory"):
        raise SpecError(f"by is {by!r}; it must be 'time' or 'memory'")
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise SpecError(f"stages is {stages!r}; it must be a whole number, at least 1")
    if stages > len(profile.layers):
        raise SpecError(
            f"{stages} stages need as many layers, but the profile has {len(profile.layers)}: use at most "
            f"{len(profile.layers)} stages, or profile smaller layers"
        )
    states = GraphStates.of(profile)
    costs = [states.seconds] * stages
    if by == "memory":
        costs = [stage_memory(states, stages - stage, weight_copies) for stage in range(stages)]
    ends = _fewest_bytes(states, costs, _smallest_largest(costs))
    partition = StagePartition(tuple(profile.names[end] for end in ends), (1,) * stages)
    return predict_partition(profile, partition, overlap=False, weight_copies=weight_copies)


def _smallest_largest(costs: list[Matrix]) -> float:
    """The cost of the largest stage of the best partition."""
    best = costs[0][0]
    for cost in costs[1:]:
        best = np.maximum(best[:, None], cost).min(axis=0)
    return float(best[-1])


def _fewest_bytes(states: GraphStates, costs: list[Matrix], limit: float) -> list[int]:
    """The states at which stages 1, 2, … begin, so that no stage costs more than `limit`."""
    fewest = np.where(costs[0][0] <= limit, 0.0, np.inf)
    begins = []
    for cost in costs[1:]:
        total = np.where(cost <= limit, (fewest + states.cut_bytes)[:, None], np.inf)
        begins.append(total.argmin(axis=0))
        fewest = total.min(axis=0)
    ends = [states.count - 1]
    for begin in reversed(begins):
        ends.insert(0, int(begin[ends[0]]))
    return ends[:-1]
