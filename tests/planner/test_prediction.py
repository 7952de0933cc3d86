"""Parts of a predicted step whose seconds follow from the description."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.planner.cluster import read_cluster
from syncline.planner.layer_costs import DescribedCosts
from syncline.planner.models import build_model
from syncline.planner.plans import TrainingPlan
from syncline.planner.prediction import StepPredictor


def predictor(model: str, cluster: str) -> StepPredictor:
    here = read_cluster(cluster)
    return StepPredictor(DescribedCosts(build_model(model), here.device), here)


def test_the_first_and_the_last_stage_sum_the_gradients_of_tied_weights() -> None:
    """The output layer of a GPT uses the weights of the embedding: on another stage it has a copy of them."""
    shape = {"layers": 4, "hidden": 1024, "vocabulary": 50000}
    here = predictor(f"gpt({', '.join(f'{key}={value}' for key, value in shape.items())})", "2 hosts x 2 a100, 100gbit")
    level = here.cluster.levels[1]
    tied = shape["vocabulary"] * shape["hidden"]
    for tensor, share in ((1, 1), (2, 2)):  # both ranks of a host send their halves at the same time
        plan = TrainingPlan(pipeline=2, tensor=tensor, micro_batches=4)
        nbytes = 4 * tied / tensor
        if tensor == 1:  # both stages are on one host
            level, share = here.cluster.levels[0], 1
        else:
            level = here.cluster.levels[1]
        seconds = level.latency_s + nbytes * share / (level.bandwidth * level.efficiency)
        assert here.predict(plan).parts["reduction"] == pytest.approx(seconds)
        first, last = here.stages(plan)
        blocks = 2 * (12 * 1024**2 + 13 * 1024) / tensor
        assert first.parameters - blocks == pytest.approx((tied + 2048 * 1024) / tensor)
        assert last.parameters - blocks == pytest.approx((tied + 2 * 1024) / tensor)
    assert here.predict(TrainingPlan(tensor=2)).parts["reduction"] == 0
    alone = here.stages(TrainingPlan())[0].parameters
    assert alone == build_model(here.costs.text).parameters


def test_blocking_transfers_are_a_part_of_each_chunk() -> None:
    """Without them ranks compute another chunk meanwhile, so only those of filling and draining count."""
    here = predictor("gpt(layers=16, hidden=1024)", "4 hosts x 1 a100, 100gbit")
    base = TrainingPlan(pipeline=4, micro_batches=8, schedule="interleaved", chunks=2)
    parts, blocking = (here.predict(replace(base, blocking=each)).parts for each in (False, True))
    fill = 2 * (2 * 4 - 1)
    each = parts["transfer"] / fill
    assert blocking["transfer"] == pytest.approx(2 * each * (2 * 8 + 4 - 1))
    assert blocking["bubble"] == pytest.approx(parts["bubble"])
    slow = predictor("gpt(layers=16, hidden=1024)", "4 hosts x 1 a100, 1mbit")
    assert not slow.can_predict(base)
    assert slow.can_predict(replace(base, blocking=True))
    assert slow.predict(replace(base, blocking=True)).seconds > 19


def test_a_whole_tensor_makes_one_server_the_slowest() -> None:
    """As with TensorFlow: 16 servers divide the bytes of ResNet-50, but one has all 9.4 MB of a convolution."""
    here = predictor("resnet(50)", "16 hosts x 1 p100, 80gbit")
    level = here.cluster.levels[1]
    rate = level.bandwidth * level.efficiency
    largest = 4 * 9 * 512 * 512
    whole = 4 * build_model("resnet(50)").parameters
    for servers, whole_tensors, served in ((16, False, whole / 16), (16, True, largest), (4, True, whole / 4)):
        plan = TrainingPlan(data=16, strategy="bsp", servers=servers, whole_tensors=whole_tensors)
        most = max(15 / 16 * whole, 15 * served)
        assert here.predict(plan).parts["reduction"] == pytest.approx(2 * most / rate + 2 * level.latency_s)
