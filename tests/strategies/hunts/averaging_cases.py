"""Averaging under a drawn case: who takes part, who has how much data, what is late.

Worker i grows every weight by a whole number of its own in each step. A round may move that between workers, and must
lose nothing: p times the agreed weight is the sum of all steps, exactly, for sums and means of so few bits are exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

import syncline as sl
from syncline.strategies import Strategy
from syncline.strategies.adacomm import AdaComm
from syncline.strategies.diloco import DiLoCo
from syncline.strategies.local import Local
from syncline.transports.faults import Delay, Fault, Slow
from tests.strategies.averaging_cases import Scale, push

KINDS = ("local", "adacomm", "diloco", "overlapped")
PATIENCE = 60.0


@dataclass(frozen=True)
class Case:
    """One draw."""

    strategy: Strategy
    seed: int
    pushes: tuple[float, ...]
    """What a step of each worker adds."""
    lengths: tuple[int, ...]
    """Steps of each worker in an epoch."""
    epochs: int
    looks: bool
    """Whether the agreed model is looked at after each step that all take."""
    chaos: bool
    faults: tuple[Fault, ...]

    @staticmethod
    def draw(kind: str, seed: int) -> Case:
        draw = random.Random(f"{kind}/{seed}")
        workers = draw.choice((2, 4))  # halves and quarters are exact
        even = draw.random() < 0.4
        lengths = [draw.randint(1, 6)] * workers if even else [draw.randint(1, 6) for _ in range(workers)]
        period = draw.randint(1, 4)
        faults: list[Fault] = []
        if draw.random() < 0.5:
            faults.append(Slow(draw.randrange(workers), draw.choice((3.0, 10.0)), start=draw.random() * 0.01))
        if draw.random() < 0.7:
            faults.append(Delay(draw.random() * 0.01, probability=0.3))
        strategies: dict[str, Strategy] = {
            "local": Local(period=period, state=draw.choice(("keep", "average", "reset"))),
            "adacomm": AdaComm(start=2 * period, **draw.choice(({"interval": draw.randint(1, 6)}, {"seconds": 0.003}))),
            "diloco": DiLoCo(period=period, outer_lr=1.0, outer_momentum=0.0),
            "overlapped": DiLoCo(
                period=period, outer_lr=1.0, outer_momentum=0.0, overlap=True, delay=draw.randint(0, period)
            ),
        }
        return Case(
            strategy=strategies[kind],
            seed=seed,
            pushes=tuple(float(draw.randint(-8, 8)) for _ in range(workers)),
            lengths=tuple(lengths),
            epochs=draw.randint(1, 3),
            looks=even and draw.random() < 0.5,
            chaos=draw.random() < 0.75,
            faults=tuple(faults),
        )


@dataclass
class Seen:
    """What a worker wrote down."""

    rounds: list[tuple[int, float, int]]
    """After each round that ended in a step: its number, the weight, and the period."""
    looks: list[float]
    left: float
    periods: set[int]


def work(world: sl.World, case: Case) -> Seen:
    model = Scale(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run: Any = sl.distribute(model, optimizer, case.strategy, algorithm="ring")
    draw = random.Random(f"{case.seed}/{world.rank}")
    seen = Seen([], [], 0.0, set())
    for _ in range(case.epochs):
        for _ in run.shard([torch.zeros(1)] * case.lengths[world.rank], split=False):
            world.compute(draw.random() * 1e-3)
            before = run.rounds
            run.note_loss(draw.random() / (1 + run.stats.steps))
            push(model, optimizer, case.pushes[world.rank])
            period = getattr(run, "period", 0)
            seen.periods.add(period)
            if run.rounds != before:
                seen.rounds.append((run.rounds, value_of(model), period))
            if case.looks:
                with run.agreed():
                    seen.looks.append(value_of(model))
    run.close()
    seen.left = value_of(model)
    return seen


def value_of(model: Scale) -> float:
    values = set(model.row.detach().tolist())
    assert len(values) == 1, f"all weights move alike: {values}"
    return float(values.pop())


def check_averaging(kind: str, seed: int) -> int:
    """Run one case and check its invariants; rounds that ended in a step."""
    case = Case.draw(kind, seed)
    size = len(case.lengths)
    simulation = sl.simulate(
        lambda world: work(world, case), ranks=size, faults=case.faults, seed=seed, chaos=case.chaos, timeout=PATIENCE
    )
    found: list[Seen] = list(simulation.results)
    total = sum(case.epochs * length * each for length, each in zip(case.lengths, case.pushes, strict=True))
    for rank, seen in enumerate(found):
        assert seen.left * size == total, f"rank {rank} ends with {seen.left}, and all steps sum up to {total}"
    per_step = sum(case.pushes) / size
    for number, shown in enumerate(zip(*(seen.looks for seen in found), strict=True)):
        assert set(shown) == {(number + 1) * per_step}, f"after step {number + 1} the ranks are shown {shown}"
    if not (isinstance(case.strategy, DiLoCo) and case.strategy.overlap):
        check_rounds(found)
    return sum(len(seen.rounds) for seen in found)


def check_rounds(found: list[Seen]) -> None:
    """Who has taken part in a round has the weight of all, and the period of all."""
    after: dict[int, tuple[float, int]] = {}
    for rank, seen in enumerate(found):
        for number, weight, period in seen.rounds:
            known = after.setdefault(number, (weight, period))
            assert known == (weight, period), (
                f"round {number} left {known} elsewhere, {(weight, period)} on rank {rank}"
            )
