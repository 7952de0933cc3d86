"""Control numbers: what the ranks report about a step, in a few numbers at the end of the last bucket.

    active │ weight │ not finite │ dense[0] … dense[P−1] │ sparse[0] … sparse[P−1] │ newcomers (elastic worlds only)

Each rank writes its own, and the reduction returns the sum: how many ranks had data, their total weight, how many had
NaN or Inf, for each parameter how many ranks have a gradient of it, and what they report about newcomers
(`ElasticMember.report_newcomers`). They need no message of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ControlNumbers", "ExpectedControl", "control_length", "write_control"]

HEADER_LENGTH = 3


def control_length(parameters: int, elastic: bool = False) -> int:
    """Number of control numbers for a model with so many parameters. In an elastic world it is even, else odd."""
    return HEADER_LENGTH + 2 * parameters + elastic


def write_control(
    into: Tensor,
    active: bool,
    weight: float,
    not_finite: Tensor | bool,
    dense: Sequence[bool],
    sparse: Sequence[bool],
    newcomers: int = 0,
) -> None:
    """Write this rank's numbers into `into`."""
    numbers = [float(active), weight, 0.0, *map(float, dense), *map(float, sparse)]
    numbers += [float(newcomers)] * (len(into) - len(numbers))
    into.copy_(torch.tensor(numbers, dtype=into.dtype))
    into[2] = not_finite


class ExpectedControl:
    """The control numbers of a step in which every rank has every gradient. They are written and compared at once."""

    def __init__(self, parameters: int, size: int, like: Tensor, elastic: bool = False) -> None:
        own = torch.zeros(control_length(parameters, elastic), dtype=like.dtype)
        write_control(own, True, 1.0, False, [True] * parameters, [False] * parameters)
        self.own = own.to(like.device)
        self.summed = own * size
        self.control = ControlNumbers.read(self.summed)


@dataclass(frozen=True)
class ControlNumbers:
    """The sums over the ranks."""

    active: int
    weight: float
    not_finite: int
    dense: tuple[int, ...]
    sparse: tuple[int, ...]
    newcomers: int = 0

    @staticmethod
    def read(numbers: Tensor) -> ControlNumbers:
        """Parse the reduced numbers."""
        values = numbers.tolist()
        parameters = (len(values) - HEADER_LENGTH) // 2
        counts = [round(value) for value in values[HEADER_LENGTH:]]
        dense, sparse, rest = counts[:parameters], counts[parameters : 2 * parameters], counts[2 * parameters :]
        return ControlNumbers(
            round(values[0]), values[1], round(values[2]), tuple(dense), tuple(sparse), rest[0] if rest else 0
        )
