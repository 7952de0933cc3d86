"""The update by hand: what is accepted, what the mean is, and where the state goes."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.strategies.onesided.update import Array, StateSlice, accepts, blend, step


def one(remote: list[float]) -> tuple[float, list[bool]]:
    """w = 0, ε = 0.1, Δ = −1, and what others have left."""
    after, accepted = step(np.zeros(1), np.array([-0.1]), 0.1, [StateSlice(0, np.array([value])) for value in remote])
    return float(after[0]), accepted


@pytest.mark.parametrize(
    ("remote", "after", "accepted"),
    [
        ([1.0], 0.15, [True]),
        ([-1.0], 0.1, [False]),
        ([], 0.1, []),
        ([1.0, -1.0], 0.15, [True, False]),
        ([1.0, 2.0], 0.1 + 0.1 * 1.0, [True, True]),
        ([0.05], 0.1, [False]),  # half way: as far from it afterwards as before
        ([float("nan")], 0.1, [False]),
    ],
)
def test_the_catch(remote: list[float], after: float, accepted: list[bool]) -> None:
    found, taken = one(remote)
    assert found == pytest.approx(after, abs=1e-15)
    assert taken == accepted


def by_definition(state: Array, move: Array, pull: float, parts: list[StateSlice]) -> Array:
    """The formulas as they are written."""
    total, count = state.copy(), np.ones(len(state))
    for part in parts:
        here = part.span
        before = ((state[here] - part.values) ** 2).sum()
        if ((state[here] - move[here] - part.values) ** 2).sum() < before:
            total[here] += part.values
            count[here] += 1
    return np.asarray(state - move - pull * (state - total / count))


def test_states_and_parts_follow_the_definition() -> None:
    random = np.random.default_rng(0)
    accepted = 0
    for _ in range(300):
        state, move = random.normal(size=9), 0.3 * random.normal(size=9)
        parts = []
        for _ in range(random.integers(5)):
            first = int(random.integers(9))
            parts.append(StateSlice(first, random.normal(size=random.integers(1, 10 - first))))
        after, taken = step(state, move, 0.2, parts)
        accepted += sum(taken)
        np.testing.assert_allclose(after, by_definition(state, move, 0.2, parts), rtol=1e-12)
    assert 100 < accepted < 600, "both are met"


def test_a_part_is_judged_by_its_own_elements_alone() -> None:
    state, move = np.zeros(2), np.array([-0.1, 100.0])
    whole, half = StateSlice(0, np.array([1.0, 1.0])), StateSlice(0, np.array([1.0]))
    assert not accepts(state, move, whole)
    assert accepts(state, move, half)


def test_elements_that_nobody_sent_keep_their_own() -> None:
    found = blend(np.array([1.0, 2.0, 3.0]), [StateSlice(0, np.array([3.0])), StateSlice(0, np.array([5.0, 6.0]))])
    assert found.tolist() == [3.0, 4.0, 3.0]


def test_the_state_that_is_given_is_left_as_it_is() -> None:
    state = np.zeros(1)
    step(state, np.array([-0.1]), 0.1, [StateSlice(0, np.array([1.0]))])
    assert state.tolist() == [0.0]
