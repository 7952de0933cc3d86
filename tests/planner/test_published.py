"""Predictions beside published rows. docs/planner.md has every row and every miss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from syncline.parallel.partition import ModelProfile, StagePartition, pipedream
from syncline.planner.calibration import (
    A100_TRANSFORMERS,
    A100_TRANSFORMERS_ONE_HOST,
    DESCRIBED,
    MEASURED,
    MeasuredStep,
    calibrate,
    calibration_for,
    interval_factors,
    predict_steps,
)
from syncline.planner.cluster import read_cluster
from syncline.planner.layer_costs import DescribedCosts, described_profile
from syncline.planner.models import build_model
from syncline.planner.search import INDISTINCT
from syncline.planner.target import read_curve
from tests.planner.accuracy import ZERO_BUBBLE, ZeroBubbleRow, tables
from tests.planner.intervals import FITS_WITHOUT, IntervalKind, interval_kinds
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
    # 0.9 is not reached: see the test of the rows that no larger micro-batch explains.
    assert 0.7 < rank_agreement(predicted, published) < 0.9
    every = [step for _, step in vtrain_steps()]
    together = predict_steps(vtrain_cluster, every, dict(found.efficiencies))
    assert rank_agreement(together, [step.seconds for step in every]) > 0.97
    chosen = min(range(len(held)), key=predicted.__getitem__)
    assert published[chosen] <= 1.05 * min(published)


def test_two_measured_steps_of_18_4b_contradict_cheaper_larger_micro_batches() -> None:
    """Their neighbours differ in the micro-batch alone, and bound what a model may say that has these right.

    A larger micro-batch computes a sample in at most the time of a smaller one, whatever a step costs besides.
    """
    measured = {(each.plan.tensor, each.plan.pipeline, each.plan.micro_batch): each for each in steps_of("18.4")}
    assert len(measured) == 15

    def most(place: tuple[int, int, int], smaller: tuple[int, int, int]) -> float:
        base, plan = measured[smaller], measured[place].plan
        bubble = [1 + (each.pipeline - 1) / each.micro_batches for each in (base.plan, plan)]
        return base.seconds * max(1.0, bubble[1] / bubble[0])

    limits = {(8, 1, 16): most((8, 1, 16), (8, 1, 8)), (4, 2, 4): most((4, 2, 4), (4, 2, 2))}
    excess = {place: measured[place].seconds / limit for place, limit in limits.items()}
    assert excess == {(8, 1, 16): pytest.approx(1.094, abs=0.001), (4, 2, 4): pytest.approx(1.031, abs=0.001)}
    published = [each.seconds for each in measured.values()]
    best = [limits.get(place, each.seconds) for place, each in measured.items()]
    assert rank_agreement(best, published) == pytest.approx(0.943, abs=0.001)


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
    assert rank_agreement([predicted[place] for place in held], [steps[place].seconds for place in held]) > 0.98


def test_a_tensor_team_on_two_hosts_uses_all_their_cards() -> None:
    """With one eighth of the cards for each rank, these rows were predicted four times as long."""
    wide = [step for step in steps_of("3.6", "18.4") if step.plan.tensor == 16]
    predicted = predict_steps(vtrain_cluster, wide, dict(A100_TRANSFORMERS.efficiencies))
    assert len(wide) == 6
    assert all(0.85 < a / step.seconds < 1.15 for a, step in zip(predicted, wide, strict=True))


@pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_schedules_of_the_zero_bubble_paper(row: ZeroBubbleRow) -> None:
    """Always too fast, by nearly as much for each schedule of a model: the paper's times lack a part of the work."""
    errors = {schedule: row.predicted(schedule) / rate - 1 for schedule, rate in row.published.items()}
    assert 0 < errors["1f1b"] < 0.1
    assert 0 < errors["zero_bubble"] < 0.1
    assert 0 < errors["interleaved"] < 0.12
    assert max(errors.values()) - min(errors.values()) < 0.05


def test_data_parallel_rows_from_their_smallest_scale() -> None:
    counted = {row.name: abs(row.error) for row in SCALING_ROWS if not row.bad}
    assert sorted(counted.values())[len(counted) // 2] < 0.05
    missed = {name for name, error in counted.items() if error > 0.10}
    assert missed == {row.name for row in SCALING_ROWS if row.miss}
    assert len(missed) == 1


@pytest.mark.parametrize("kind", interval_kinds(), ids=lambda kind: kind.question)
def test_intervals_cover_four_fifths_of_held_out_rows(kind: IntervalKind) -> None:
    inside, total = kind.coverage
    assert 0.7 <= inside / total <= 0.9
    assert interval_factors(kind.groups) == pytest.approx(kind.calibration.factors, abs=0.001)
    assert kind.calibration.rows == total


@pytest.mark.skipif(not os.environ.get("SYNCLINE_HUNT"), reason="fits the efficiencies twice more")
@pytest.mark.parametrize("size", ["3.6", "175"])
def test_fits_without_one_size_of_model(size: str) -> None:
    others = [step for name, step in vtrain_steps() if name != size]
    found = calibrate(vtrain_cluster, others, start={"launch_s": FITS_WITHOUT[size]["launch_s"]})
    assert dict(found.efficiencies) == pytest.approx(FITS_WITHOUT[size], rel=0.01)


def test_each_kind_of_prediction_has_its_calibration() -> None:
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
    """By the published code's formula; by the paper's, 16 machines have 15-1."""
    profile = ModelProfile.read(ROOT / "tests" / "parallel" / "data" / "vgg16-profile.json")
    network = read_cluster("16 hosts x 1 v100, 10gbit").levels[1]
    for machines, replicas in ((4, (3, 1)), (8, (7, 1)), (16, (13, 2, 1))):
        assert pipedream(profile, machines, network.bandwidth, overlap=False).replicas == replicas
    assert pipedream(profile, 16, network.bandwidth, overlap=True).replicas == (15, 1)


def test_pipedream_chooses_data_parallelism_for_a_described_resnet_50() -> None:
    """And 15-1 for a described VGG-16, as in the paper: 10 Gbit/s, V100, its formula."""
    cluster = read_cluster("16 hosts x 1 v100, 10gbit")
    rate = cluster.levels[1].bandwidth
    resnet, vgg = (
        described_profile(DescribedCosts(build_model(text), cluster.device), batch)
        for text, batch in (("resnet(50)", 128), ("vgg(16)", 64))
    )
    assert sum(layer.parameter_bytes for layer in resnet.layers) == 4 * 25_557_032
    for machines in (4, 8, 16):
        assert pipedream(resnet, machines, rate, overlap=True).replicas == (machines,)
    assert pipedream(resnet, (8, 2), (150e9, 25e9 / 8), overlap=False).replicas == (16,)  # hosts with NVLink
    hybrid = pipedream(vgg, 16, rate, overlap=True)
    assert hybrid.replicas == (15, 1)
    assert hybrid.cuts == ("fc6",)
    # By the published code, a pipeline gains at most 12 % with ResNet-50, and 2.8 to 3.2 times with VGG-16.
    for machines in (4, 8, 16):
        assert gain(pipedream(resnet, machines, rate, overlap=False)) < 1.13
        assert gain(pipedream(vgg, machines, rate, overlap=False)) > 2.8


def gain(partition: StagePartition) -> float:
    """The throughput in multiples of data parallelism."""
    prediction = partition.prediction
    assert prediction is not None
    assert prediction.data_parallel_s is not None
    return prediction.data_parallel_s / prediction.time_s


def test_epochs_against_batch_of_mlperf() -> None:
    points = {1664: 36.2, 3328: 41, 33280: 56, 57600: 71, 65536: 87.2}
    curve = read_curve(", ".join(f"{batch}:{epochs}" for batch, epochs in points.items()))
    errors = [abs(curve.epochs(batch) / epochs - 1) for batch, epochs in points.items()]
    assert sum(errors) / len(errors) < 0.06


def test_the_tables_of_the_documentation_are_these() -> None:
    assert tables() in (ROOT / "docs" / "planner.md").read_text(encoding="utf-8"), "python -m tests.planner.accuracy"
