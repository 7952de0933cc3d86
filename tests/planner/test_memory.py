"""The memory of transformers, beside Korthikanti's published values."""

from __future__ import annotations

import pytest

from syncline.planner.cluster import read_cluster
from syncline.planner.layer_costs import DescribedCosts
from syncline.planner.memory import block_activation_bytes
from syncline.planner.models import TransformerShape, build_model
from syncline.planner.plans import OPTIMIZERS, TrainingPlan
from syncline.planner.prediction import StepPredictor

GIB = 2.0**30
# Name, hidden, heads, layers, batch, tensor, pipeline, chunks; GiB: nothing recomputed, sequence + selective, weights.
ROWS = [
    ("22B", 6144, 64, 48, 4, 8, 1, 1, 59.25, 9.5625, 45.5625),
    ("175B", 12288, 96, 96, 1, 8, 8, 3, 66.84375, 12.3515625, 45.5625),
    ("530B", 20480, 128, 105, 1, 8, 35, 3, 114.0234375, 23.076171875, 31.640625),
    ("1T", 25600, 160, 128, 1, 8, 64, 1, 131.25, 26.5625, 32.958984375),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_twelve_published_values_exactly(
    row: tuple[str, int, int, int, int, int, int, int, float, float, float],
) -> None:
    _, hidden, heads, layers, batch, t, p, v, none, selective, parameters = row
    shape = TransformerShape(layers=layers, hidden=hidden, heads=heads, sequence=2048, vocabulary=51200)
    schedule = "interleaved" if v > 1 else "1f1b"
    plan = TrainingPlan(tensor=t, pipeline=p, micro_batch=batch, micro_batches=8 * p, schedule=schedule, chunks=v)
    blocks = plan.in_flight(0) * layers / p
    assert blocks * block_activation_bytes(shape, batch, t) / GIB == none
    less = block_activation_bytes(shape, batch, t, sequence=True, recomputation="selective")
    assert blocks * less / GIB == selective
    assert OPTIMIZERS["adam-mixed"].total * 12 * layers * hidden**2 / t / p / GIB == parameters


@pytest.mark.parametrize(
    ("hidden", "heads", "shares"),
    [
        (6144, 64, (66.84, 49.42, 16.18, 7.64)),
        (12288, 96, (62.04, 56.53, 18.49, 8.71)),
        (20480, 128, (58.31, 62.04, 20.27, 9.42)),
        (25600, 160, (58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_shares_of_recomputation(hidden: int, heads: int, shares: tuple[float, ...]) -> None:
    """The published figure counts a little more than the formulas: they agree within 0.15 points of a hundred."""
    shape = TransformerShape(layers=1, hidden=hidden, heads=heads, sequence=2048, vocabulary=1)
    whole = block_activation_bytes(shape, 1, 8)
    found = [
        block_activation_bytes(shape, 1, 8, sequence=True),
        block_activation_bytes(shape, 1, 8, recomputation="selective"),
        block_activation_bytes(shape, 1, 8, sequence=True, recomputation="selective"),
        block_activation_bytes(shape, 1, 8, recomputation="full"),
    ]
    assert [100 * each / whole for each in found] == pytest.approx(shares, abs=0.15)


def test_kinds_of_memory_of_a_plan() -> None:
    cluster = read_cluster("2 hosts x 8 a100, 100gbit")
    model = build_model("mlp([1000, 1000, 10])")
    predictor = StepPredictor(DescribedCosts(model, cluster.device), cluster)
    parameters = 1000 * 1000 + 1000 + 1000 * 10 + 10
    plain = predictor.memory(TrainingPlan(data=16, micro_batch=2, optimizer="momentum"))
    assert (plain.weights, plain.gradients, plain.optimizer) == (4 * parameters,) * 3
    assert plain.buckets == 4 * parameters
    assert plain.activations == 2 * 4 * (1000 + 1000 + 1000 + 10)
    assert plain.residuals == 0
    with_codec = predictor.memory(TrainingPlan(data=16, micro_batch=2, optimizer="momentum", codec="topk(0.01)"))
    assert with_codec.residuals == 4 * parameters
    alone = predictor.memory(TrainingPlan(micro_batch=2, optimizer="momentum"))
    assert alone.buckets == 0
    shards = predictor.memory(TrainingPlan(data=16, micro_batch=2, optimizer="momentum", strategy="fsdp"))
    assert shards.optimizer == 4 * parameters / 16
    assert shards.total < plain.total
