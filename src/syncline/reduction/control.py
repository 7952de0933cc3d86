"""What the ranks tell one another about a step, in a few numbers that travel at the end of the last bucket.

    active │ weight │ not finite │ dense[0] … dense[P−1] │ sparse[0] … sparse[P−1]

Each rank writes its own and the sum comes back: how many ranks had data, what they weigh together, how many met NaN or
Inf, and for each parameter how many ranks have a gradient of it. It costs no message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ControlNumbers", "ExpectedControl", "control_length", "write_control"]

HEAD = 3


def control_length(parameters: int) -> int:
    """How many numbers there are."""
    return HEAD + 2 * parameters


def write_control(
    into: Tensor, active: bool, weight: float, not_finite: Tensor | bool, dense: Sequence[bool], sparse: Sequence[bool]
) -> None:
    """Put this rank's numbers into `into`."""
    numbers = [float(active), weight, 0.0, *map(float, dense), *map(float, sparse)]
    into.copy_(torch.tensor(numbers, dtype=into.dtype))
    into[2] = not_finite


class ExpectedControl:
    """The control numbers of the usual step, in which every rank has every gradient: written and read in one go."""

    def __init__(self, parameters: int, size: int, like: Tensor) -> None:
        own = torch.zeros(control_length(parameters), dtype=like.dtype)
        everything = [True] * parameters
        write_control(own, True, 1.0, False, everything, [False] * parameters)
        self.own = own.to(like.device)
        self.summed = own * size
        self.control = ControlNumbers.read(self.summed)


@dataclass(frozen=True)
class ControlNumbers:
    """The sum over the ranks."""

    active: int
    weight: float
    not_finite: int
    dense: tuple[int, ...]
    sparse: tuple[int, ...]

    @staticmethod
    def read(numbers: Tensor) -> ControlNumbers:
        """Of the reduced numbers."""
        values = numbers.tolist()
        parameters = (len(values) - HEAD) // 2
        counts = [round(value) for value in values[HEAD:]]
        return ControlNumbers(
            round(values[0]), values[1], round(values[2]), tuple(counts[:parameters]), tuple(counts[parameters:])
        )
