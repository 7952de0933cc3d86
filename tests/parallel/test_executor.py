"""The executor takes the time that the published tables say, sends what it must, and never deadlocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import PeerLostError
from syncline.parallel.boundary import Place
from syncline.parallel.executor import PipelineExecutor
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import Action, PipelineSchedule, build_schedule
from syncline.parallel.stages import MODEL_INPUT, Stage, StageGraph, Value
from syncline.testing.hunting import hunt_cases
from syncline.transports.simulated import kill_rank
from syncline.world import World
from tests.hunting import seeds


def chain(stages: int) -> StageGraph:
    """Stages of which each uses the output of the one before."""
    values = [Value("x", MODEL_INPUT, (0,), 0), *(Value(f"v{n}", n, (n + 1,)) for n in range(stages - 1))]
    return StageGraph(
        tuple(Stage(n, nn.Identity(), (n,), (n + 1,) if n < stages - 1 else ()) for n in range(stages)),
        tuple(values),
    )


class TimedCompute:
    """Computes nothing, in a given virtual time for each kind of action."""

    def __init__(self, world: World, seconds: dict[str, float], last: int, kill_at: int = -1) -> None:
        self.world, self.seconds, self.last, self.kill_at = world, seconds, last, kill_at
        self.done: list[Action] = []

    def _spend(self, action: Action) -> None:
        if len(self.done) == self.kill_at:
            kill_rank(self.world.transport)
        self.done.append(action)
        self.world.compute(self.seconds[action.kind])

    def forward(self, stage: int, micro_batch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        self._spend(Action("F", stage, micro_batch))
        assert [each.item() for each in inputs] == [float(100 * micro_batch + stage)]
        return [] if stage == self.last else [(inputs[0].detach() + 1.0).requires_grad_()]

    def backward(self, action: Action, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        self._spend(action)
        if action.stage == self.last:
            return [torch.tensor(float(action.micro_batch))]
        assert [each.item() for each in gradients if each is not None] == [float(action.micro_batch)]
        return [gradients[0]]

    def backward_weights(self, stage: int, micro_batch: int) -> None:
        self._spend(Action("W", stage, micro_batch))

    def gradients_complete(self, stage: int) -> None:
        self.done.append(Action("R", stage))

    def update(self, stage: int, micro_batch: int) -> None:
        self.done.append(Action("U", stage, micro_batch))


def run_schedule(
    world: World, spec: str, micro_batches: int, seconds: dict[str, float], kill_at: int = -1
) -> tuple[float, list[Action]]:
    """The time of one rank from its first action to its last, and the actions."""
    placement = PipelinePlacement(build_schedule(spec), (1,) * world.size)
    compute = TimedCompute(world, seconds, placement.stages - 1, kill_at)
    executor = PipelineExecutor(
        chain(placement.stages), placement, world.group().transport, compute, torch.device("cpu")
    )
    executor.spans = []
    actions = list(placement.schedule.actions(world.rank, placement.setting(micro_batches)))
    executor.run(actions, lambda number: (torch.tensor(100.0 * number),), step=3)
    executor.finish_sends()
    return executor.spans[-1].end - executor.spans[0].start, compute.done


def test_later_messages_are_expected_during_the_schedule() -> None:
    def first_stage(world: World) -> tuple[list[str], float]:
        placement = PipelinePlacement(build_schedule("1f1b"), (1, 1))
        compute = TimedCompute(world, dict.fromkeys("FB", 1.0), 1)
        executor = PipelineExecutor(chain(2), placement, world.group().transport, compute, torch.device("cpu"))
        boundary, place = executor.boundary, Place(executor.next_number, 0, "the loss")
        order: list[str] = []
        expect = boundary.expect

        def note(source: int, place: Place) -> None:
            order.append(f"{place.text} after {len(compute.done)} of 8")
            expect(source, place)

        boundary.expect = note  # type: ignore[method-assign]
        actions = list(placement.schedule.actions(world.rank, placement.setting(4)))
        later = [(1, place)] if world.rank == 0 else []
        executor.run(actions, lambda number: (torch.tensor(100.0 * number),), step=3, later=later)
        if world.rank == 1:
            boundary.send(torch.tensor(2.5), 0, place, 3)
        value = boundary.receive(1, place, 3) if world.rank == 0 else None
        executor.finish_sends()
        return order, 0.0 if value is None else value.item()

    order, value = sl.simulate(first_stage, 2).results[0]
    assert next(text for text in order if "loss" in text) == "the loss after 1 of 8"
    assert value == 2.5


TABLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
]
"""Ranks, micro-batches, times of F, I, W and a transfer in ms; bubble rates of 1F1B and ZB-H1: Tables 5 and 9 of
Qi et al., *Zero Bubble Pipeline Parallelism* (2024)."""


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"p{row[0]}-m{row[1]}-F{row[2]}")
def test_bubble_rates_of_the_zero_bubble_paper(row: tuple[float, ...]) -> None:
    ranks, micro_batches = row[:2]
    forward, inputs, weights, transfer = (each / 1000 for each in row[2:6])
    seconds = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    network = sl.Network(latency=transfer, bandwidth=1e15)
    work = micro_batches * (forward + inputs + weights)
    for spec, expected in (("1f1b", row[6]), ("zero_bubble", row[7])):
        run = partial(run_schedule, spec=spec, micro_batches=int(micro_batches), seconds=seconds)
        found = sl.simulate(run, int(ranks), network)
        cost = max(time for time, _ in found.results)
        assert round(1.0 - work / cost, 4) == expected


SPECS = ("gpipe", "1f1b", "interleaved(chunks=2)", "zero_bubble", "zbv", "pipedream")
UNIT = dict.fromkeys("FBIW", 0.001)
UNBUFFERED = sl.Network(latency=0.0005, bandwidth=1e9, eager=0)
"""Every send waits until its receive is posted."""


@pytest.mark.hunt
@pytest.mark.parametrize("spec", SPECS)
def test_no_order_of_messages_deadlocks(spec: str) -> None:
    def check(seed: int) -> None:
        found = sl.simulate(
            lambda world: run_schedule(world, spec, 4 + 2 * (seed % 3), UNIT),
            2 + seed % 3,
            UNBUFFERED,
            seed=seed,
            chaos=True,
        )
        stages = sum(len({action.stage for action in done}) for _, done in found.results)
        assert stages == (2 + seed % 3) * build_schedule(spec).stages_per_rank

    hunt_cases(check, seeds(12), f"test_no_order_of_messages_deadlocks({spec!r}), seed {{seed}}")


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_every_survivor_names_the_lost_rank(spec: str, victim: int) -> None:
    """A rank of 3 is killed at each of its actions. The others end with an error that names it."""
    schedule = build_schedule(spec)
    actions = list(schedule.actions(victim, PipelinePlacement(schedule, (1, 1, 1)).setting(4)))
    survivors = [rank for rank in range(3) if rank != victim]
    for kill_at in (number for number, action in enumerate(actions) if action.kind not in "RU"):

        def run(world: World, kill_at: int = kill_at) -> object:
            return run_schedule(world, spec, 4, UNIT, kill_at=kill_at if world.rank == victim else -1)

        found = sl.simulate(run, 3, UNBUFFERED, return_exceptions=True)
        assert found.killed == (victim,)
        for rank in survivors:
            result = found.results[rank]
            if isinstance(result, PeerLostError):
                assert result.peer == victim, result
                assert "stage" in str(result)
                assert "micro-batch" in str(result)
            else:  # it needed nothing more of that rank
                assert isinstance(result, tuple)
        lost = any(isinstance(found.results[rank], PeerLostError) for rank in survivors)
        assert lost or not any(_sends(action, schedule, 3) for action in actions[kill_at + 1 :])


def _sends(action: Action, schedule: PipelineSchedule, ranks: int) -> bool:
    """Whether another rank waits for the result of an action."""
    step = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
    last = ranks * schedule.stages_per_rank - 1
    other = action.stage + step
    return 0 <= other <= last and schedule.rank_of(other, ranks) != schedule.rank_of(action.stage, ranks)
