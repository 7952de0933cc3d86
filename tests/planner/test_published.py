"""Predictions beside published rows. docs/planner.md has every row and every miss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from syncline.parallel.partition import ModelProfile, pipedream
from syncline.planner.calibration import (
    A100_TRANSFORMERS,
    A100_TRANSFORMERS_ONE_HOST,
    DESCRIBED,
    MEASURED,
    MeasuredStep,
    calibrate,
    calibration_for,
    predict_steps,
    residual_factors,
)
from syncline.planner.cluster import read_cluster
from syncline.planner.search import INDISTINCT
from syncline.planner.target import read_curve
from tests.planner.accuracy import ZERO_BUBBLE, tables
from tests.planner.published import SCALING_ROWS, vtrain_cluster, vtrain_single_host_steps, vtrain_steps

ROOT = Path(__file__).parents[2]


def steps_of(*sizes: str) -> list[MeasuredStep]:
    return [step for size, step in vtrain_steps() if size in sizes]


def rank_agreement(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient."""
    places = [sorted(range(len(row)), key=row.__getitem__) for row in (first, second)]
    n = len(first)
    one, two = ([place.index(number) for number in range(n)] for place in places)
    return 1.0 - 6.0 * sum((a - b) ** 2 for a, b in zip(one, two, strict=True)) / (n * (n * n - 1))


def test_vtrain_predicts_a_size_that_was_not_calibrated() -> None:
    start = {"launch_s": dict(A100_TRANSFORMERS.efficiencies)["launch_s"]}
    found = calibrate(vtrain_cluster, steps_of("3.6", "175"), start=start)
    for name, value in A100_TRANSFORMERS.efficiencies:
        assert dict(found.efficiencies)[name] == pytest.approx(value, rel=0.01), name
    held = steps_of("18.4")
    predicted = predict_steps(vtrain_cluster, held, dict(found.efficiencies))
    published = [step.seconds for step in held]
    errors = [abs(a / b - 1) for a, b in zip(predicted, published, strict=True)]
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.10
    # 11 of the 15 lie within 15 % of each other, so the order is harder than the errors. 0.9 is not reached.
    assert 0.7 < rank_agreement(predicted, published) < 0.9
    every = [step for _, step in vtrain_steps()]
    together = predict_steps(vtrain_cluster, every, dict(found.efficiencies))
    assert rank_agreement(together, [step.seconds for step in every]) > 0.97
    chosen = min(range(len(held)), key=predicted.__getitem__)
    assert published[chosen] <= 1.05 * min(published)
    low, high = A100_TRANSFORMERS.factors
    inside = [low <= b / a <= high for a, b in zip(predicted, published, strict=True)]
    assert sum(inside) / len(inside) >= 0.7


def test_small_models_on_one_host() -> None:
    """Only launch_s was fitted to them, and only to every eighth."""
    steps = vtrain_single_host_steps()
    fitted = calibrate(
        vtrain_cluster, steps[::8], names=("launch_s",), start=dict(A100_TRANSFORMERS.efficiencies)
    ).efficiencies
    assert dict(fitted)["launch_s"] == pytest.approx(dict(A100_TRANSFORMERS.efficiencies)["launch_s"], rel=0.05)
    predicted = predict_steps(vtrain_cluster, steps, dict(A100_TRANSFORMERS.efficiencies))
    held = [place for place in range(len(steps)) if place % 8]
    errors = sorted(abs(predicted[place] / steps[place].seconds - 1) for place in held)
    assert sum(errors) / len(errors) < 0.085
    assert errors[-1] < 0.36
    factors = residual_factors([math.log(steps[place].seconds / predicted[place]) for place in held])
    assert factors == pytest.approx(A100_TRANSFORMERS_ONE_HOST.factors, abs=0.01)
    assert rank_agreement([predicted[place] for place in held], [steps[place].seconds for place in held]) > 0.98


def test_a_tensor_team_on_two_hosts_uses_all_their_cards() -> None:
    """With one eighth of the cards for each rank, these rows were predicted four times as long."""
    wide = [step for step in steps_of("3.6", "18.4") if step.plan.tensor == 16]
    predicted = predict_steps(vtrain_cluster, wide, dict(A100_TRANSFORMERS.efficiencies))
    assert len(wide) == 6
    assert all(0.85 < a / step.seconds < 1.15 for a, step in zip(predicted, wide, strict=True))


@pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_zero_bubble_1f1b_within_a_tenth(row: object) -> None:
    assert isinstance(row, type(ZERO_BUBBLE[0]))
    assert row.predicted() == pytest.approx(row.throughput, rel=0.1)


def test_data_parallel_rows_from_their_smallest_scale() -> None:
    counted = {row.name: abs(row.error) for row in SCALING_ROWS if not row.bad}
    assert sorted(counted.values())[len(counted) // 2] < 0.05
    missed = {name for name, error in counted.items() if error > 0.10}
    assert missed == {row.name for row in SCALING_ROWS if row.miss}
    assert len(missed) == 2


def test_intervals_are_the_residuals_of_published_rows() -> None:
    counted = [row for row in SCALING_ROWS if not row.bad]
    assert residual_factors([math.log(1 + row.error) for row in counted]) == pytest.approx(MEASURED.factors, abs=0.005)
    described = [
        math.log(row.throughput(row.scales[0][0], 1.0) / row.scales[0][1]) for row in counted if "fp8" not in row.name
    ]
    assert residual_factors(described) == pytest.approx(DESCRIBED.factors, abs=0.01)
    assert (MEASURED.rows, DESCRIBED.rows) == (len(counted), len(described))
    assert calibration_for(read_cluster("2 hosts x 8 a100, 100gbit"), True) is A100_TRANSFORMERS
    assert calibration_for(read_cluster("1 hosts x 8 a100"), True) is A100_TRANSFORMERS_ONE_HOST
    assert calibration_for(read_cluster("1 hosts x 8 v100"), True) is DESCRIBED
    assert calibration_for(read_cluster("1 hosts x 8 a100"), None) is MEASURED


def test_plans_that_cannot_be_told_apart_differ_less_than_the_median_error() -> None:
    steps = steps_of("3.6", "175")
    predicted = predict_steps(vtrain_cluster, steps, dict(A100_TRANSFORMERS.efficiencies))
    errors = sorted(abs(a / step.seconds - 1) for a, step in zip(predicted, steps, strict=True))
    assert errors[len(errors) // 2] == pytest.approx(INDISTINCT, abs=0.008)


def test_pipedream_chooses_a_hybrid_for_vgg_16() -> None:
    profile = ModelProfile.read(ROOT / "tests" / "parallel" / "data" / "vgg16-profile.json")
    network = read_cluster("16 hosts x 1 v100, 10gbit").levels[1]
    for machines, replicas in ((4, (3, 1)), (8, (7, 1)), (16, (13, 2, 1))):
        assert pipedream(profile, machines, network.bandwidth, overlap=False).replicas == replicas


def test_epochs_against_batch_of_mlperf() -> None:
    points = {1664: 36.2, 3328: 41, 33280: 56, 57600: 71, 65536: 87.2}
    curve = read_curve(", ".join(f"{batch}:{epochs}" for batch, epochs in points.items()))
    errors = [abs(curve.epochs(batch) / epochs - 1) for batch, epochs in points.items()]
    assert sum(errors) / len(errors) < 0.06


def test_the_tables_of_the_documentation_are_these() -> None:
    assert tables() in (ROOT / "docs" / "planner.md").read_text(encoding="utf-8"), "python -m tests.planner.accuracy"
