"""The scaling curve: the best plan on parts of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.errors import SpecError
from syncline.planner.cluster import read_cluster
from syncline.planner.layer_costs import DescribedCosts
from syncline.planner.models import build_model
from syncline.planner.prediction import StepPredictor
from syncline.planner.scaling import ScalingCurve, part_of_cluster, scaling_curve
from syncline.planner.search import PlanSearch, SearchSettings


def curve(model: str, cluster: str, batch: int, *, strong: bool, slow: dict[int, float] | None = None) -> ScalingCurve:
    here = replace(read_cluster(cluster), slow=slow or {})
    predictor = StepPredictor(DescribedCosts(build_model(model), here.device), here, factors=(0.8, 1.25))
    return scaling_curve(predictor, SearchSettings(batch=batch, optimizer="sgd"), strong=strong)


def test_weak_scaling_keeps_the_samples_of_a_rank_and_strong_scaling_the_batch() -> None:
    cluster, slow = "3 hosts x 4 v100, 10gbit", {9: 1.5}
    weak = curve("resnet(50)", cluster, 384, strong=False, slow=slow)
    assert [size.best.plan.batch for size in weak.sizes] == [32 * ranks for ranks in (1, 2, 4, 8, 12)]
    strong = curve("resnet(50)", cluster, 384, strong=True, slow=slow)
    assert {size.best.plan.batch for size in strong.sizes} == {384}
    assert [size.ranks for size in strong.sizes] == [1, 2, 4, 8, 12]
    for found in (weak, strong):
        assert found.sizes[0].efficiency == 1
        for size in found.sizes:
            rate = size.best.throughput / size.ranks
            assert size.efficiency == pytest.approx(rate / found.sizes[0].best.throughput)
            assert list(size.throughput_interval) == pytest.approx(
                [size.best.throughput * edge for edge in (0.8, 1.25)]
            )
            assert list(size.efficiency_interval) == pytest.approx([size.efficiency * edge for edge in (0.8, 1.25)])
    # The slow rank is on the third host.
    assert weak.sizes[3].efficiency > weak.sizes[4].efficiency


def test_the_last_size_is_the_whole_cluster() -> None:
    here = read_cluster("2 hosts x 2 a100, 25gbit")
    predictor = StepPredictor(DescribedCosts(build_model("gpt(8, 1024)"), here.device), here)
    settings = SearchSettings(batch=64, optimizer="adam-mixed")
    last = scaling_curve(predictor, settings, strong=False).sizes[-1].best
    assert last == PlanSearch(predictor, settings).run().best


def test_sizes_without_a_plan_say_why() -> None:
    found = curve("gpt(layers=48, hidden=6144)", "2 hosts x 8 a100, 400gbit", 128, strong=False)
    assert found.sizes[0].ranks > 1
    assert found.refused[0][0] == 1
    assert "no plan fits" in found.refused[0][1]
    odd = curve("mlp([64, 64])", "1 hosts x 4 v100", 6, strong=True)
    assert [size.ranks for size in odd.sizes] == [1, 2]
    assert "cannot be divided among 4 ranks" in odd.refused[0][1]


def test_a_part_of_a_cluster_is_whole_hosts() -> None:
    with pytest.raises(SpecError, match="not a whole number of hosts"):
        part_of_cluster(read_cluster("4 hosts x 4 a100, 10gbit"), 6)
