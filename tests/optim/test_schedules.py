"""Warm-up and decay: the exact rate of every step, alone, composed, per group, and after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

import syncline as sl
from syncline.errors import SpecError
from syncline.optim import cosine_decay, exponential_decay, step_decay, warmup

BASES = (0.8, 0.3)
STEPS = 24

Make = Callable[[Optimizer], LRScheduler]
Factor = Callable[[int], float]


def optimizer_of(bases: tuple[float, ...] = BASES, *, tensors: bool = False) -> Optimizer:
    groups = [
        {"params": [torch.zeros(2, requires_grad=True)], "lr": torch.tensor(base) if tensors else base}
        for base in bases
    ]
    return SGD(groups, lr=1.0)


def rates(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The rate of each group in each step."""
    found = []
    for _ in range(steps):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def warm(step: int) -> float:
    return 0.125 + 0.875 * step / 7 if step < 7 else 1.0


def halved(step: int) -> float:
    return 0.5 ** ((step >= 3) + (step >= 10))


def every_five(step: int) -> float:
    return float(0.1 ** (step // 5))


def smooth(step: int) -> float:
    return float(0.25 ** (step / 10))


def cosine(step: int) -> float:
    return 0.1 + 0.9 * (1 + math.cos(math.pi * step / 12)) / 2 if step < 12 else 0.1


SINGLE: dict[str, tuple[Make, Factor]] = {
    "warmup": (lambda o: warmup(o, 7, workers=8), warm),
    "warmup by a fraction": (lambda o: warmup(o, 7, start=0.125), warm),
    "steps named": (lambda o: step_decay(o, [3, 10], 0.5), halved),
    "steps in a rhythm": (lambda o: step_decay(o, 5), every_five),
    "exponential": (lambda o: exponential_decay(o, 10, 0.25), smooth),
    "cosine": (lambda o: cosine_decay(o, 12, end=0.1), cosine),
}
IN_SEQUENCE: dict[str, tuple[Make, Factor]] = {
    f"warmup, then {name}": (
        lambda o, make=make: SequentialLR(o, [warmup(o, 7, workers=8), make(o)], [7]),  # type: ignore[misc]
        lambda step, then=then: warm(step) if step < 7 else then(step - 7),  # type: ignore[misc]
    )
    for name, (make, then) in SINGLE.items()
    if "warmup" not in name
}
CHAINED: dict[str, tuple[Make, Factor]] = {
    f"warmup and {name} {'first' * first}": (
        lambda o, make=make, first=first: ChainedScheduler(  # type: ignore[misc]
            [make(o), warmup(o, 7, workers=8)] if first else [warmup(o, 7, workers=8), make(o)]
        ),
        lambda step, then=then: warm(step) * then(step),  # type: ignore[misc]
    )
    for name, (make, then) in SINGLE.items()
    for first in (False, True)
    if "warmup" not in name
}
EXACT = {**SINGLE, **IN_SEQUENCE}
MAKES = {name: make for name, (make, _) in [*EXACT.items(), *CHAINED.items()]}


@pytest.mark.parametrize(("make", "factor"), EXACT.values(), ids=EXACT)
def test_every_step_exactly(make: Make, factor: Factor) -> None:
    """Alone and one after the other no rounding gathers: bit for bit the formula, for each group."""
    optimizer = optimizer_of()
    found = rates(optimizer, make(optimizer), STEPS)
    assert found == [[base * factor(step) for base in BASES] for step in range(STEPS)]


@pytest.mark.parametrize(("make", "factor"), CHAINED.values(), ids=CHAINED)
def test_chained_factors_multiply(make: Make, factor: Factor) -> None:
    """Whichever comes first."""
    optimizer = optimizer_of()
    found = rates(optimizer, make(optimizer), STEPS)
    for step in range(STEPS):
        assert found[step] == pytest.approx([base * factor(step) for base in BASES], rel=1e-12)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("stop", [0, 3, 7, 8, 15])
def test_resumed_in_the_middle(make: Make, stop: int) -> None:
    """Its state is JSON, and a run that goes on from it has the same rates to the bit."""
    first = optimizer_of()
    scheduler = make(first)
    whole = rates(first, scheduler, STEPS)

    first = optimizer_of()
    scheduler = make(first)
    begun = rates(first, scheduler, stop)
    state, optimizer_state = json.loads(json.dumps(scheduler.state_dict(), allow_nan=False)), first.state_dict()

    second = optimizer_of()
    resumed = make(second)
    second.load_state_dict(optimizer_state)
    resumed.load_state_dict(state)
    assert begun + rates(second, resumed, STEPS - stop) == whole


def test_another_warmup_is_replaced_by_the_one_saved() -> None:
    """Resumed on more workers, the warm-up goes on as it began."""
    first = optimizer_of((1.0,))
    scheduler = warmup(first, 10, workers=4)
    whole = rates(first, scheduler, 12)
    second = optimizer_of((1.0,))
    resumed = warmup(second, 5, workers=64)
    third = optimizer_of((1.0,))
    old = warmup(third, 10, workers=4)
    rates(third, old, 6)
    second.load_state_dict(third.state_dict())
    resumed.load_state_dict(old.state_dict())
    assert rates(second, resumed, 6) == whole[6:]


def test_a_rate_changed_by_hand_is_kept() -> None:
    """As with torch's own: who halves the rate in a script halves all that follow."""
    optimizer = optimizer_of((1.0,))
    scheduler = exponential_decay(optimizer, 1, 0.5)
    rates(optimizer, scheduler, 2)
    optimizer.param_groups[0]["lr"] /= 5
    assert rates(optimizer, scheduler, 3) == [[0.05], [0.025], [0.0125]]


def test_rates_in_tensors() -> None:
    """Compiled and captured optimizers hold the rate in a tensor; it stays the same tensor."""
    optimizer = optimizer_of((0.5, 0.25), tensors=True)
    held = [group["lr"] for group in optimizer.param_groups]
    scheduler = SequentialLR(optimizer, [warmup(optimizer, 4, start=0.5), step_decay(optimizer, 2, 0.5)], [4])
    found = rates(optimizer, scheduler, 8)
    assert [rate[0] for rate in found] == [0.25, 0.3125, 0.375, 0.4375, 0.5, 0.5, 0.25, 0.25]
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, held, strict=True))


def test_cosine_reaches_zero_and_stays() -> None:
    """Where torch's own rises again."""
    optimizer = optimizer_of((1.0,))
    found = rates(optimizer, cosine_decay(optimizer, 4), 12)
    assert [rate[0] for rate in found[4:]] == [0.0] * 8


def test_the_world_says_where_to_begin() -> None:
    """Without a number, a warm-up begins at the rate of one worker."""

    def first(world: sl.World, start: str) -> float:
        optimizer = optimizer_of((1.0,))
        warmup(optimizer, 10, start)
        return float(optimizer.param_groups[0]["lr"])

    assert sl.simulate(lambda world: first(world, "linear"), ranks=4).results == (0.25,) * 4
    assert sl.simulate(lambda world: first(world, "sqrt"), ranks=4).results == (0.5,) * 4
    assert sl.simulate(lambda world: first(world, "linear"), ranks=1).results == (1.0,)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o: warmup(o, 0, 0.1), "steps must be a whole number, 1 or more, not 0"),
        (
            lambda o: warmup(o, 2.5, 0.1),  # type: ignore[arg-type]
            "steps must be a whole number, 1 or more, not 2.5",
        ),
        (lambda o: warmup(o, 5, 1.5), "start must lie between 0 and 1, not 1.5"),
        (lambda o: warmup(o, 5, math.nan), "start must lie between 0 and 1, not nan"),
        (lambda o: warmup(o, 5, 0), "start must be above 0"),
        (lambda o: warmup(o, 5, "sqr"), "did you mean 'sqrt'"),
        (lambda o: step_decay(o, 0), "at must be a whole number"),
        (lambda o: step_decay(o, []), "at must name one or more steps"),
        (lambda o: step_decay(o, [5, 3]), r"in order, not \[5, 3\]"),
        (lambda o: step_decay(o, [3, 3]), r"each once and in order, not \[3, 3\]"),
        (lambda o: step_decay(o, [3], 0), "factor must be a finite number above 0, not 0"),
        (lambda o: exponential_decay(o, 3, -1), "factor must be a finite number above 0, not -1"),
        (lambda o: exponential_decay(o, -3), "steps must be a whole number, 1 or more, not -3"),
        (lambda o: cosine_decay(o, 3, 2), "end must lie between 0 and 1, not 2"),
        (lambda o: cosine_decay(o, True), "steps must be a whole number, 1 or more, not True"),
    ],
)
def test_refused(make: Callable[[Any], LRScheduler], says: str) -> None:
    optimizer = optimizer_of()
    with pytest.raises(SpecError, match=says):
        make(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == list(BASES), "refused, but the rate was touched"
