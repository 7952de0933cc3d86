"""Six and more planted limits each get their sentence, with the gain of the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.errors import SpecError
from syncline.planner.cluster import Cluster, read_cluster
from syncline.planner.layer_costs import DescribedCosts
from syncline.planner.limits import codec_sentence, find_limit
from syncline.planner.models import build_model
from syncline.planner.plans import TrainingPlan
from syncline.planner.prediction import StepPredictor


def predictor(model: str, cluster: str | Cluster) -> StepPredictor:
    here = read_cluster(cluster) if isinstance(cluster, str) else cluster
    return StepPredictor(DescribedCosts(build_model(model), here.device), here)


GPT = "gpt(24, 2048, attention='flash')"
SLOW = replace(read_cluster("1 hosts x 8 v100"), slow={3: 2.0})
MLP = "mlp([4096, 4096, 4096, 4096])"
PLANTED: list[tuple[str, str, str | Cluster, TrainingPlan, str]] = [
    ("communication", "vgg(16)", "8 hosts x 1 v100, 1gbit", TrainingPlan(data=8, micro_batch=32), "over the network"),
    (
        "skinny matrix products",
        MLP,
        "1 hosts x 1 a100",
        TrainingPlan(micro_batch=1, micro_batches=256, optimizer="sgd"),
        "with 1 samples at a time they reach",
    ),
    (
        "input",
        "vgg(11)",
        "1 hosts x 8 v100, storage 50MB/s",
        TrainingPlan(data=8, micro_batch=32),
        "storage delivers 50 MB/s to a host",
    ),
    (
        "bubble",
        GPT,
        "2 hosts x 8 a100, 400gbit",
        TrainingPlan(pipeline=8, data=2, micro_batch=4, micro_batches=8),
        "with 8 micro-batches for 8 stages",
    ),
    (
        "memory",
        GPT,
        "1 hosts x 8 a100",
        TrainingPlan(data=8, micro_batch=16, recomputation="full"),
        "full recomputation is needed",
    ),
    ("straggler", "resnet(50)", SLOW, TrainingPlan(data=8, micro_batch=64), "rank 3, 2 times as slow"),
    (
        "server",
        "vgg(16)",
        "8 hosts x 1 v100, 10gbit",
        TrainingPlan(data=8, micro_batch=32, strategy="bsp", servers=1),
        "the parameter servers limit it",
    ),
    ("optimizer", MLP, "1 hosts x 1 a100", TrainingPlan(micro_batch=256, optimizer="adam"), "adam reads and writes"),
]


@pytest.mark.parametrize(("kind", "model", "cluster", "plan", "words"), PLANTED, ids=[each[0] for each in PLANTED])
def test_planted_limits(kind: str, model: str, cluster: str | Cluster, plan: TrainingPlan, words: str) -> None:
    here = predictor(model, cluster)
    prediction = here.predict(plan)
    limit = find_limit(here, prediction)
    assert limit.kind == kind, (limit, dict(prediction.parts))
    assert words in limit.sentence, limit.sentence
    assert limit.gain > 0.03, limit.sentence
    assert "shorter" in limit.sentence


def test_tied_weights_of_a_pipeline_are_reduced_over_the_network() -> None:
    here = predictor("gpt(2, 1024)", "2 hosts x 1 a100, 1gbit")
    prediction = here.predict(TrainingPlan(pipeline=2, micro_batches=2))
    assert prediction.parts["reduction"] > prediction.parts["transfer"]
    assert "most of it the exchange of gradients over the network" in find_limit(here, prediction).sentence


def test_the_gain_of_a_straggler_is_that_of_the_plan_without_it() -> None:
    plan = TrainingPlan(data=8, micro_batch=64)
    here = predictor("resnet(50)", SLOW)
    limit = find_limit(here, here.predict(plan))
    equal = predictor("resnet(50)", replace(SLOW, slow={}, step_noise=0.0)).predict(plan).seconds
    assert limit.gain == pytest.approx(1 - equal / here.predict(plan).seconds)


def test_without_a_limit_the_computation_is_named() -> None:
    here = predictor("resnet(50)", "1 hosts x 1 v100")
    limit = find_limit(here, here.predict(TrainingPlan(micro_batch=64, optimizer="sgd")))
    assert limit.kind == "compute"
    assert limit.share > 0.9


def test_compression_pays_on_slow_networks_only() -> None:
    plan = TrainingPlan(data=8, micro_batch=32)
    slow = predictor("vgg(16)", "8 hosts x 1 v100, 1gbit")
    fast = predictor("resnet(50)", "1 hosts x 8 v100")
    sentence = codec_sentence(slow, slow.predict(plan), "topk(0.01)")
    assert "pays here: it saves" in sentence
    sentence = codec_sentence(fast, fast.predict(plan), "topk(0.01)")
    assert "does not pay here" in sentence
    with pytest.raises(SpecError, match="not with local"):
        codec_sentence(slow, slow.predict(TrainingPlan(data=8, strategy="local", period=4)), "topk(0.01)")
    alone = slow.predict(TrainingPlan())
    assert "one data rank" in codec_sentence(slow, alone, "topk(0.01)")
