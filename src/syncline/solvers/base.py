"""What solvers have in common: the contract of an objective, the data, and the solution.

    Objective ── begin(data, random) ──► state              the first state, on rank 0
        ├─ delta(state, batch)       ──► Δ                  w ← w − εΔ; the gradient, or a replacement of it
        └─ value(state, data)        ──► a number           mean over the samples, smaller is better

Data is a tuple of arrays with the samples along the first dimension: (points,), or (inputs, targets).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch

from syncline.errors import IncompatibleError
from syncline.strategies.onesided.update import Array
from syncline.world import World, allgather, broadcast

__all__ = ["Data", "Effort", "Objective", "Solution", "as_data", "conclude", "first_state", "own_share"]

Data = tuple[Array, ...]


class Objective(Protocol):
    """A problem to minimise. States are flat arrays of float64."""

    def begin(self, data: Data, random: np.random.Generator) -> Array:
        """The state to start from."""
        ...

    def delta(self, state: Array, batch: Data) -> Array:
        """The direction of the update on a mini-batch; the state moves against it."""
        ...

    def value(self, state: Array, data: Data) -> float:
        """The mean of the minimised function over the samples."""
        ...


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The work of one worker."""

    steps: int = 0
    """Mini-batches; of an aggregation, rounds over all samples."""
    samples: int = 0
    accepted: int = 0
    """Remote states in the direction of the step."""
    rejected: int = 0
    torn: int = 0
    """Messages that were incomplete when they were read."""
    sent: int = 0
    dropped: int = 0
    """Messages that found the outgoing queue full, or a lost worker."""
    sent_bytes: int = 0
    batch: int = 0
    """Samples in the last mini-batch."""
    seconds: float = 0.0
    """From the first step to the last, without the agreement at the end."""


@dataclass(frozen=True)
class Solution:
    """The agreed state, the same on every worker.

    >>> Solution(torch.zeros(2).numpy(), 0.5, (Effort(steps=3), Effort(steps=4))).steps
    7
    """

    state: Array
    value: float
    """The objective over the samples of all workers."""
    efforts: tuple[Effort, ...]
    """The work of each worker, by rank."""

    @property
    def steps(self) -> int:
        """The sum over all workers."""
        return sum(each.steps for each in self.efforts)

    @property
    def seconds(self) -> float:
        """The time of the slowest worker."""
        return max(each.seconds for each in self.efforts)

    @property
    def sent_bytes(self) -> int:
        """The sum over all workers."""
        return sum(each.sent_bytes for each in self.efforts)

    def total(self, name: str) -> int:
        """The sum of one count of `Effort` over all workers."""
        return int(sum(getattr(each, name) for each in self.efforts))


def conclude(objective: Objective, state: Array, own: Data, mine: Effort) -> Solution:
    """The solution with its value over all samples and every worker's effort. Every worker calls it."""
    kinds = {field.name: field.type for field in fields(Effort)}
    value, samples = objective.value(state, own), len(own[0])
    row = [value, samples, *(float(each) for each in astuple(mine))]  # whole numbers stay exact up to 2^53
    table = allgather(torch.tensor([row], dtype=torch.float64)).tolist()
    mean = sum(each[0] * each[1] for each in table) / sum(each[1] for each in table)
    efforts = []
    for each in table:
        counts = dict(zip(kinds, each[2:], strict=True))
        efforts.append(Effort(**{name: int(counts[name]) if kinds[name] == "int" else counts[name] for name in kinds}))
    return Solution(state, float(mean), tuple(efforts))


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


def own_share(data: Any, world: World, split: bool) -> Data:
    """This worker's samples: every p-th sample, or all with `split=False`."""
    arrays = as_data(data)
    if split and world.size > 1:
        if len(arrays[0]) < world.size:
            raise IncompatibleError(
                f"{len(arrays[0])} samples are too few for {world.size} workers: give more, or start fewer (-n)"
            )
        return tuple(np.ascontiguousarray(each[world.rank :: world.size]) for each in arrays)
    return arrays


def first_state(objective: Objective, own: Data, start: Any, seed: int, world: World) -> Array:
    """Rank 0's first state, on all workers."""
    state = np.zeros(0)
    if world.rank == 0:
        given = start is not None
        state = np.array(start, np.float64).reshape(-1) if given else objective.begin(own, np.random.default_rng(seed))
    if world.size == 1:
        return state
    widths = [math.prod(each.shape[1:]) for each in own]
    table = allgather(torch.tensor([[len(widths), sum(widths), len(state)]])).tolist()
    for rank, row in enumerate(table):
        if row[:2] != table[0][:2]:
            raise IncompatibleError(
                f"a sample of rank {rank} is {row[1]} numbers in {row[0]} arrays, one of rank 0 is {table[0][1]} in "
                f"{table[0][0]}: give every worker the same kind of data"
            )
    return np.array(broadcast(torch.from_numpy(state if world.rank == 0 else np.zeros(table[0][2]))).numpy())
