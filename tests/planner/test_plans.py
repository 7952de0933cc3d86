"""The formulas of pipelines equal the player, and plans are checked."""

from __future__ import annotations

import itertools

import pytest

from syncline.errors import SpecError
from syncline.parallel.player import StageCost, play
from syncline.parallel.schedules import GPipe, Interleaved, OneFOneB, PipelineSchedule, PipelineSetting, ZeroBubble
from syncline.planner.plans import TrainingPlan, pipeline_s

CASES = [
    *itertools.product(["gpipe", "1f1b", "zero_bubble"], [2, 3, 4, 5, 8], [1, 2, 3, 5, 8, 13, 24]),
    *((f"interleaved:{chunks}", p, rounds * p) for chunks in (2, 3, 4) for p in (2, 3, 4, 8) for rounds in (1, 2, 3)),
]


def player(name: str) -> PipelineSchedule:
    kind, _, chunks = name.partition(":")
    return {"gpipe": GPipe, "1f1b": OneFOneB, "zero_bubble": ZeroBubble}.get(
        kind, lambda: Interleaved(chunks=int(chunks or 1))
    )()


def test_formulas_of_pipelines_equal_the_player() -> None:
    for name, p, m in CASES:
        for c in (0.0, 0.25, 2.0, 10.0, *(() if name.startswith("interleaved") else (40.0,))):
            times = (10.0, 11.0, 5.0)
            timeline = play(player(name), PipelineSetting(p, m), StageCost(*times), c)
            assert pipeline_s(name, p, m, *times, c) == pytest.approx(max(timeline.costs_s), rel=1e-12), (name, p, m, c)


def test_uneven_stages_are_near_the_player() -> None:
    """A slower last stage, as with an output layer: the sum of all stages, and the slowest for each micro-batch."""
    for p, m in ((2, 8), (4, 8), (4, 32), (8, 16)):
        costs = [StageCost(1.0, 1.0, 1.0)] * (p - 1) + [StageCost(1.2, 1.2, 1.2)]
        exact = play(OneFOneB(), PipelineSetting(p, m), costs).makespan_s
        assert pipeline_s("1f1b", p, m, 3.6, 0.0, 0.0) + (3.0 * (p - 1) + 3.6 - 3.6 * p) == pytest.approx(
            exact, rel=0.01
        )


def test_micro_batches_in_flight_are_those_of_the_player() -> None:
    for name in ("1f1b", "gpipe", "zero_bubble"):
        for p, m in ((2, 4), (4, 8), (4, 2)):
            peaks = play(player(name), PipelineSetting(p, m), StageCost(1.0, 1.0, 1.0)).peak_activations
            plan = TrainingPlan(pipeline=p, micro_batches=m, schedule=name)
            assert all(plan.in_flight(rank) >= peak for rank, peak in enumerate(peaks)), (name, p, m)
            assert plan.in_flight(0) == peaks[0], (name, p, m)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 0}, "data is 0"),
        ({"schedule": "zb"}, "unknown schedule 'zb'"),
        ({"optimizer": "adamw8"}, "unknown optimizer 'adamw8'"),
        ({"chunks": 2}, "1f1b has one stage a rank"),
        ({"schedule": "interleaved", "pipeline": 4, "micro_batches": 6}, "4 ranks divide, not 6"),
    ],
)
def test_impossible_plans_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrainingPlan(**fields)  # type: ignore[arg-type]
