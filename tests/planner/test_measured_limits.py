"""Measured steps get the sentences of the planner's limits, with the gain of the remedy."""

from __future__ import annotations

import pytest

from syncline.planner.limits import find_limit
from syncline.planner.measured_limits import PipelineShape, StepMeasurement, measured_limits
from tests.planner.test_limits import PLANTED, predictor

PLANTED_MEASUREMENTS = [
    (
        "communication",
        StepMeasurement(compute_s=0.06, exposed_s=0.04, communication_s=0.05, workers=4),
        (0.4, 0.25),
        "over the network: 40 ms of 100 ms a step (40%); with twice the bandwidth",
    ),
    (
        "server",
        StepMeasurement(compute_s=0.05, exposed_s=0.05, workers=8, servers=1),
        (0.5, 0.25),
        "the parameter servers limit it (1 server): 50 ms of 100 ms a step (50%); with 2 servers",
    ),
    (
        "server",  # each worker's own link is the limit: more servers gain nothing
        StepMeasurement(compute_s=0.05, exposed_s=0.05, workers=8, servers=8),
        (0.5, 0.25),
        "(8 servers): 50 ms of 100 ms a step (50%); with twice the bandwidth",
    ),
    (
        "straggler",
        StepMeasurement(compute_s=0.05, exposed_s=0.05, rank_compute_s=(0.05, 0.05, 0.1, 0.04), workers=4),
        (0.5, 0.5),
        "all wait for rank 2, 2 times as slow",
    ),
    (
        "input",
        StepMeasurement(compute_s=0.08, data_s=0.02, samples=64),
        (0.2, 0.2),
        "the input limits it: a worker reads 3.2e+03 samples/s",
    ),
    (
        "bubble",
        StepMeasurement(compute_s=0.08, exposed_s=0.03, pipeline=PipelineShape("1f1b", 4, 8), workers=4),
        (0.03 / 0.11, 0.015 / 0.11),
        "with 8 micro-batches for 4 stages",
    ),
    (
        "optimizer",
        StepMeasurement(compute_s=0.1, update_s=0.035, optimizer="adam"),
        (0.35, 0.35 * (1 - 12 / 28)),
        "the update of adam: 35 ms of 100 ms a step (35%); with plain SGD",
    ),
    (
        "optimizer",
        StepMeasurement(compute_s=0.1, update_s=0.04, optimizer="sgd", samples=8),
        (0.4, 0.3),
        "with 32 samples at a time, for as many samples, the step would be 30 ms (30%) shorter",
    ),
    (
        "skinny matrix products",
        StepMeasurement(compute_s=0.1, batch_fixed_share=0.8, samples=2),
        (0.8, 0.6),
        "with 2 samples at a time a sample takes 5 times as long as in large batches; it loses: 80 ms",
    ),
]


@pytest.mark.parametrize(("kind", "step", "shares", "words"), PLANTED_MEASUREMENTS)
def test_planted_measurements(kind: str, step: StepMeasurement, shares: tuple[float, float], words: str) -> None:
    limit = measured_limits(step)[0]
    assert limit.kind == kind
    assert [limit.share, limit.gain] == pytest.approx(shares)
    assert words in limit.sentence


def test_the_words_are_those_of_predicted_limits() -> None:
    begins = {}
    for kind, model, cluster, plan, _ in PLANTED:
        here = predictor(model, cluster)
        begins[kind] = " ".join(find_limit(here, here.predict(plan)).sentence.split()[:3])
    for kind, step, _, _ in PLANTED_MEASUREMENTS:
        assert measured_limits(step)[0].sentence.startswith(begins[kind]), kind


def test_waiting_counts_once() -> None:
    """Of 60 ms of waiting, 50 are for the slow rank and 10 for the network."""
    step = StepMeasurement(compute_s=0.05, exposed_s=0.06, rank_compute_s=(0.05, 0.05, 0.1), workers=3)
    slow, network = measured_limits(step)
    assert (slow.kind, network.kind) == ("straggler", "communication")
    assert network.share == pytest.approx(0.01 / 0.11)
    # On the slow rank itself the network is all of what is waited for.
    own = StepMeasurement(compute_s=0.1, exposed_s=0.01, rank_compute_s=(0.1, 0.05, 0.05), workers=3)
    assert [limit.kind for limit in measured_limits(own)] == ["straggler", "communication"]
    assert measured_limits(own)[1].share == pytest.approx(0.01 / 0.11)
    pipelined = StepMeasurement(compute_s=0.08, exposed_s=0.05, pipeline=PipelineShape("1f1b", 4, 8), workers=4)
    bubble, transfer = measured_limits(pipelined)
    assert (bubble.kind, transfer.kind) == ("bubble", "communication")
    assert "transfers between stages" in transfer.sentence
    assert transfer.share == pytest.approx(0.02 / 0.13)


def test_asynchronous_ranks_do_not_wait_for_a_slow_one() -> None:
    step = StepMeasurement(compute_s=0.05, rank_compute_s=(0.05, 0.05, 0.1), synchronous=False, workers=3)
    assert [limit.kind for limit in measured_limits(step)] == ["compute"]


def test_messages_under_way_together_gain_no_more_than_half_a_step() -> None:
    step = StepMeasurement(compute_s=0.01, exposed_s=0.09, communication_s=0.5, workers=4)
    assert measured_limits(step)[0].gain == pytest.approx(0.5)


def test_small_shares_limit_nothing() -> None:
    step = StepMeasurement(
        compute_s=0.1, exposed_s=0.004, data_s=0.004, update_s=0.004, batch_fixed_share=0.3, samples=8
    )
    (limit,) = measured_limits(step)
    assert limit.kind == "compute"
    assert "the computation itself limits it: 93% of the step" in limit.sentence
    assert measured_limits(StepMeasurement(compute_s=0.0)) == ()
