"""The update of one-sided asynchronous SGD: pure arithmetic on a state and on what others have left.

    δ_k = 1  iff  ‖(w − εΔ) − w_k‖² < ‖w − w_k‖²          the remote state lies the way the gradient points
    w̄   = (w + Σ δ_k·w_k) / (1 + Σ δ_k)                   element by element, where a message is a part of a state
    w   ← w − ε·((w − w̄) + Δ)

Keuper, Pfreundt: Asynchronous Parallel Stochastic Gradient Descent (2015). The gradient's part is given as a *move* εΔ,
and the factor of (w − w̄) as a *pull*: the paper has ε for both, and a network's optimizer may move otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Part", "accepts", "blend", "step"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Part:
    """A remote state from element `first` on: all of it, or a contiguous part."""

    first: int
    values: Array

    @property
    def span(self) -> slice:
        """Where it lies in a state."""
        return slice(self.first, self.first + len(self.values))


def accepts(state: Array, move: Array, part: Part) -> bool:
    """Whether the move brings the state nearer to the remote one, judged on the part's own elements alone.

    The two squared distances differ by 2⟨w − w_k, εΔ⟩ − ‖εΔ‖², which loses no digits where they are nearly equal. A
    remote state with NaN in it is never accepted.

    >>> state, move = np.zeros(1), np.array([-0.1])
    >>> accepts(state, move, Part(0, np.array([1.0]))), accepts(state, move, Part(0, np.array([-1.0])))
    (True, False)
    """
    mine = move[part.span]
    return bool(2.0 * np.dot(state[part.span] - part.values, mine) > np.dot(mine, mine))


def blend(state: Array, parts: Sequence[Part]) -> Array:
    """w̄: the mean of the state and the parts, each element over those that have it.

    >>> blend(np.zeros(3), [Part(1, np.array([2.0, 2.0])), Part(2, np.array([4.0]))])
    array([0., 1., 2.])
    """
    total, count = state.copy(), np.ones_like(state)
    for part in parts:
        total[part.span] += part.values
        count[part.span] += 1
    return np.asarray(total / count)


def step(state: Array, move: Array, pull: float | Array, parts: Sequence[Part]) -> tuple[Array, list[bool]]:
    """The next state, and which of the parts were accepted.

    >>> after, accepted = step(np.zeros(1), np.array([-0.1]), 0.1, [Part(0, np.array([1.0]))])
    >>> after.round(6), accepted
    (array([0.15]), [True])
    """
    accepted = [accepts(state, move, part) for part in parts]
    after = state - move
    if any(accepted):
        mean = blend(state, [part for part, good in zip(parts, accepted, strict=True) if good])
        after -= pull * (state - mean)
    return after, accepted
