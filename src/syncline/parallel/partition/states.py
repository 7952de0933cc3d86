"""The states of a graph: the sets of layers after which it can be cut.

A state is a set of layers that contains, with each layer, all layers whose output it uses. A stage is the difference
of two states. The layers of a state whose output others use form an antichain, as in PipeDream::

          ┌─ b ─┐              {}  {a}  {a,b}  {a,c}  {a,b,c}  {a,b,c,d}
    a ────┤     ├─── d         without reordering, and b before c:
          └─ c ─┘              {}  {a}  {a,b}         {a,b,c}  {a,b,c,d}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.errors import SpecError
from syncline.parallel.partition.base import ModelProfile

__all__ = ["GraphStates", "Matrix", "stage_memory"]

MAX_STATES = 1000
"""States of a graph. The search for a partition takes time in proportion to their square, or their cube with levels."""

Matrix = NDArray[np.float64]
"""Entry [a, b] belongs to the stage between states a and b."""


@dataclass(frozen=True)
class GraphStates:
    """The states of a profile, each after those that it contains, and the sums of costs between them."""

    members: tuple[int, ...]
    """The layers of each state: bit k stands for layer k."""
    seconds: Matrix
    """Forward and backward of each stage; infinite where state b does not contain state a."""
    parameter_bytes: Matrix
    kept_bytes: Matrix
    """Bytes that a mini-batch between forward and backward needs in each stage."""
    cut_bytes: NDArray[np.float64]
    """Bytes of the outputs of a state that layers outside of it use. 0 for the last state."""

    @property
    def count(self) -> int:
        """The number of states."""
        return len(self.members)

    def layers(self, start: int, stop: int) -> list[int]:
        """The layers of a stage, in the order of execution."""
        inside = self.members[stop] & ~self.members[start]
        return [layer for layer in range(inside.bit_length()) if inside >> layer & 1]

    @classmethod
    def of(cls, profile: ModelProfile, *, reorder: bool = False) -> GraphStates:
        """The states of a profile. Without `reorder` only those that the order of execution passes."""
        members = _all_states(profile) if reorder else [(1 << count) - 1 for count in range(len(profile.layers) + 1)]
        if len(members) > MAX_STATES:
            advice = "merge layers" + ", or cut in the order of execution only (reorder=False)" * reorder
            raise SpecError(
                f"a model of {len(profile.layers)} layers can be cut in more than {MAX_STATES} places: {advice}"
            )
        return cls.between(profile, members)

    @classmethod
    def between(cls, profile: ModelProfile, members: list[int]) -> GraphStates:
        """Some states of a profile; each must come after those that it contains."""
        stages = np.array([[one != other and one & other == one for other in members] for one in members])
        bits = np.array(
            [[state >> layer & 1 for layer in range(len(profile.layers))] for state in members], dtype=float
        )

        def sums(values: list[float], otherwise: float = 0.0) -> Matrix:
            totals = bits @ np.array(values, dtype=float)
            return np.where(stages, totals[None, :] - totals[:, None], otherwise)

        return cls(
            members=tuple(members),
            seconds=sums([layer.seconds for layer in profile.layers], np.inf),
            parameter_bytes=sums([layer.parameter_bytes for layer in profile.layers]),
            kept_bytes=sums([layer.kept_bytes for layer in profile.layers]),
            cut_bytes=_cut_bytes(profile, members),
        )


def stage_memory(states: GraphStates, mini_batches: int, weight_copies: float) -> Matrix:
    """Bytes on a worker of each stage: f · (activations + weights) + c · weights.

    f mini-batches are between forward and backward, each with its own version of the weights; c counts gradients
    and the optimizer state in copies of the weights.
    """
    needed = mini_batches * (states.kept_bytes + states.parameter_bytes) + weight_copies * states.parameter_bytes
    return np.where(np.isfinite(states.seconds), needed, np.inf)


def _links(profile: ModelProfile) -> list[tuple[int, int]]:
    return [(profile.place(source), profile.place(target)) for source, target in profile.links()]


def _all_states(profile: ModelProfile) -> list[int]:
    """All states of the graph, by size; stops if there are more than `MAX_STATES`."""
    needs = [0] * len(profile.layers)
    for source, target in _links(profile):
        needs[target] |= 1 << source
    found, level = [0], {0}
    while level and len(found) <= MAX_STATES:
        level = {
            state | 1 << layer
            for state in level
            for layer, needed in enumerate(needs)
            if not state >> layer & 1 and needed & state == needed
        }
        found += sorted(level)
    return found


def _cut_bytes(profile: ModelProfile, members: list[int]) -> NDArray[np.float64]:
    """The outputs that cross from each state to the rest. An output that no layer uses is part of the model's."""
    users: list[Any] = [0] * len(profile.layers)
    for source, target in _links(profile):
        users[source] |= 1 << target
    crossing = [
        math.fsum(
            layer.activation_bytes
            for place, layer in enumerate(profile.layers)
            if state >> place & 1 and (users[place] & ~state or not users[place])
        )
        for state in members
    ]
    return np.array([*crossing[:-1], 0.0])
